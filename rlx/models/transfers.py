"""Copies from the host that do not wait for the device.

A blocking copy first lets the device finish all its work. Then it idles while the host launches the next kernels one by one, which
can take longer than a small model's kernels run.
"""

import torch
from torch import Tensor

MOST_BYTES = 16 << 20
"""Larger tensors are copied with a wait: torch keeps the page-locked memory of the others for later copies."""


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device, copied in the order of the current stream; on CUDA the host goes on at once."""
    if device.type != "cuda" or x.device.type != "cpu" or x.nbytes > MOST_BYTES:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
