import pickle

import pytest

from rlx.offload import OffloadOptions


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
