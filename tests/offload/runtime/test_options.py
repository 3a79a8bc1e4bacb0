import logging
import pickle

import pytest

from rlx.offload import OffloadOptions
from rlx.offload.storage.ranges import MIN_STAGING_BYTES


@pytest.mark.parametrize(
    "wrong",
    [
        {"save": "everything"},
        {"tier": "tape"},
        {"min_bytes": -1},
        {"min_bytes": None},
        {"min_bytes": 1.5},
        {"prefetch_layers": -1},
        {"prefetch_layers": True},
        {"max_inflight_bytes": -5},
        {"max_host_bytes": "1G"},
        {"max_device_bytes": -1},
        {"max_device_bytes": "most"},
        {"pin_memory": 1},
        {"use_streams": None},
        {"directory": 3},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_named_with_what_was_got(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=name) as error:
        OffloadOptions(**wrong)
    assert repr(value) in str(error.value)


def test_what_may_wait_in_host_memory_beside_buffers_for_the_disk():
    assert OffloadOptions().host_bytes is None
    assert OffloadOptions(max_host_bytes=5).host_bytes == 5
    assert OffloadOptions(tier="disk", directory="/tmp").host_bytes == 0
    both = OffloadOptions(max_host_bytes=1 << 30, directory="/tmp")
    assert both.host_bytes == (1 << 30) - 24 * both.staging_chunk_bytes


def test_the_disk_tier_needs_a_folder_which_a_driver_may_lack():
    with pytest.raises(ValueError, match="no usable folder: got directory=None"):
        OffloadOptions(tier="disk")
    options = OffloadOptions(tier="disk", directory="/no/such/folder")
    assert options.uses_disk
    assert options == pickle.loads(pickle.dumps(options))


@pytest.mark.parametrize(("tier", "least"), [("disk", MIN_STAGING_BYTES), ("cpu", 4 * MIN_STAGING_BYTES)])
def test_the_cap_on_host_memory_leaves_room_for_buffers_to_the_disk(tier, least):
    with pytest.raises(ValueError, match=f"expected at least {least} "):
        OffloadOptions(tier=tier, directory="/tmp", max_host_bytes=least - 1)
    options = OffloadOptions(tier=tier, directory="/tmp", max_host_bytes=least)
    assert options.staging_chunk_bytes == 4096
    assert OffloadOptions(tier="cpu", max_host_bytes=0).uses_disk is False


def test_a_folder_takes_what_the_cap_leaves_and_is_without_effect_without_one(caplog):
    OffloadOptions(directory="/tmp", max_host_bytes=1 << 30).log_without_effect(on_accelerator=True)
    OffloadOptions(tier="disk", directory="/tmp").log_without_effect(on_accelerator=True)
    assert not caplog.records
    OffloadOptions(directory="/tmp").log_without_effect(on_accelerator=True)
    assert "directory" in caplog.text


def test_save_follows_from_recomputation():
    assert OffloadOptions().resolve_save(True) == "boundary"
    assert OffloadOptions().resolve_save(False) == "all"
    assert OffloadOptions(save="all").resolve_save(False) == "all"
    with pytest.raises(ValueError, match="enable_ckpt=False"):
        OffloadOptions(save="all").resolve_save(True)
    with pytest.raises(ValueError, match="enable_ckpt=True"):
        OffloadOptions(save="boundary").resolve_save(False)


def test_options_without_effect_are_named_in_one_line(caplog):
    caplog.set_level(logging.INFO, "rlx.offload")
    OffloadOptions().log_without_effect(on_accelerator=False)
    assert not caplog.records
    OffloadOptions(pin_memory=False, max_device_bytes=1).log_without_effect(on_accelerator=False)
    (record,) = caplog.records
    assert "max_device_bytes, pin_memory" in record.getMessage()
    OffloadOptions(save="auto", max_device_bytes=1).log_without_effect(on_accelerator=False)
    assert len(caplog.records) == 1
