"""Copies to a device; on a GPU `tests/engine/test_gpu.py` counts the waits."""

import torch

from rlx.models.tree_attention import to_device


def test_a_tensor_that_is_there_already_is_not_copied():
    x = torch.arange(3)
    assert to_device(x, torch.device("cpu")) is x


def test_other_devices_than_cuda_take_a_plain_copy():
    assert to_device(torch.arange(3), torch.device("meta")).device.type == "meta"
