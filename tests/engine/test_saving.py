"""Which memory a save reads in place. Saves themselves are tested with engines, in test_checkpoint.py."""

import pytest
import torch

from rlx.checkpoint.tensors import pieces_of
from rlx.engine import saving


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frozen_memory_is_read_in_place_and_nobody_waits_for_it(device):
    """Trained tensors are copied first, or if the device is another one, the optimizer waits until they are read."""
    frozen, trained = torch.zeros(6, 64), torch.zeros(64)
    pieces = {"model": pieces_of({"a": frozen[2:4], "b": trained, "c": frozen[4:]})}
    found, live = saving._find_all(pieces, [], torch.device(device), {frozen.untyped_storage()})
    in_place = {f.piece.name: f for f in found["model"]}
    for name, tensor in (("a", frozen[2:4]), ("c", frozen[4:])):
        assert in_place[name].live is None
        assert in_place[name].on_host[0].data_ptr() == tensor.data_ptr()
    assert (in_place["b"].on_host is None) == (device == "cpu")
    assert len(live) == (device != "cpu")
