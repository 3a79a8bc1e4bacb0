import logging
import pickle

import pytest

from rlx.offload import OffloadOptions


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
        {"pin_memory": 1},
        {"use_streams": None},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_named_with_what_was_got(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=name) as error:
        OffloadOptions(**wrong)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("later", [{"save": "attention"}, {"save": "auto"}, {"tier": "disk"}], ids=str)
def test_what_this_version_lacks_is_refused(later):
    with pytest.raises(ValueError, match="not available in this version"):
        OffloadOptions(**later)


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


def test_options_are_values():
    assert OffloadOptions(min_bytes=0) == pickle.loads(pickle.dumps(OffloadOptions(min_bytes=0)))
