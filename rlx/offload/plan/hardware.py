"""Rates and memory of accelerators and their machines: figures of data sheets, and the share of them that training reaches.

Peaks are for dense bf16 with fp32 sums. The shares were fitted to the steps of one H200 in docs/planning.md; for all other machines
they are an assumption.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MATMUL_SHARE = 0.61  # of the peak, in linear maps
ATTENTION_SHARE = 0.59  # of the peak, in attention's forward
ATTENTION_BACKWARD_SHARE = 0.53
MEMORY_SHARE = 0.75  # of the memory's bandwidth, in elementwise kernels
LINK_SHARE = 0.87  # of PCIe's bandwidth, with page-locked memory, one direction at a time
LINK_BOTH_SHARE = 0.79  # of each direction's bandwidth, both at once
DEVICE_SHARE = 0.94  # of device memory that tensors may take; the rest is CUDA's, NCCL's and the allocator's slack

_PCIE_4, _PCIE_5 = 31.5e9, 63.0e9  # x16 in each direction: 16 or 32 GT/s, 16 lanes, 128 of 130 bits


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its share of the machine. Rates of the link are those that training reaches."""

    name: str
    peak_flops: float  # dense bf16 [1/s]
    memory_bytes_per_s: float
    device_bytes: float
    link_bytes_per_s: float  # to the host or back, one direction at a time: forward only offloads, backward fetches
    link_both_bytes_per_s: float  # of each direction with both at once; plans do not use it
    host_bytes: float  # host memory per accelerator in a usual machine


def _on_pcie(pcie: float, name: str, tflops: float, tb_per_s: float, device_gb: float, host_gb: float) -> Hardware:
    link, both = pcie * LINK_SHARE, pcie * LINK_BOTH_SHARE
    return Hardware(name, tflops * 1e12, tb_per_s * 1e12, device_gb * 1e9, link, both, host_gb * 1e9)


# Peaks and memory: NVIDIA's data sheets and white papers (2021 to 2024); sheets with sparse figures are halved. Host memory: DGX A100
# (1 and 2 TB), DGX H100, H200 and B200 (2 TB) for eight accelerators; 64 GB for any other card is an assumption.
# GB200: figures of half a superchip, since two GPUs share one Grace: 480 GB, 512 GB/s of memory, and 900 GB/s of NVLink-C2C
# in both directions together. The link's shares are assumed to be PCIe's; both at once cannot exceed the memory's 512 GB/s.
_GB200 = replace(_on_pcie(225e9, "gb200", 2500, 8.0, 186, 240), link_both_bytes_per_s=512e9 / 4)
PROFILES = {
    hardware.name: hardware
    for hardware in (
        _on_pcie(_PCIE_4, "a100-40", 312, 1.555, 40, 128),
        _on_pcie(_PCIE_4, "a100-80", 312, 2.039, 80, 256),
        _on_pcie(_PCIE_5, "h100", 989, 3.35, 80, 256),
        _on_pcie(_PCIE_5, "h200", 989, 4.8, 141, 256),
        _on_pcie(_PCIE_5, "b200", 2250, 8.0, 180, 256),
        _GB200,
        _on_pcie(_PCIE_4, "rtx3090", 71, 0.936, 24, 64),
        _on_pcie(_PCIE_4, "rtx4090", 165, 1.008, 24, 64),
        _on_pcie(_PCIE_5, "rtx5090", 209.5, 1.792, 32, 64),
        _on_pcie(_PCIE_4, "a6000", 154.8, 0.768, 48, 64),
        _on_pcie(_PCIE_4, "l40s", 362, 0.864, 48, 64),
        _on_pcie(_PCIE_4, "a10", 125, 0.6, 24, 64),
        _on_pcie(_PCIE_4, "l4", 121, 0.3, 24, 64),
    )
}


def profile_of(device: str, device_bytes: float) -> Hardware | None:
    """Return the profile of a device by the name that CUDA gives it, such as `NVIDIA A100-SXM4-80GB`, and its memory.

    None if there is none of this name whose memory differs by 10 % at most, so that a laptop's RTX 4090 is no rtx4090.
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"rtx (?=\d)", "rtx", device.lower()))
    of_name = [each for each in PROFILES.values() if each.name.partition("-")[0] in words]
    return next((each for each in of_name if abs(device_bytes / each.device_bytes - 1) < 0.1), None)
