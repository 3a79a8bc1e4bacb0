"""Describe the machine or cluster of a run as data, so that the rules are pure functions."""

import os
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from rlx.config.host_memory import all_host_bytes
from rlx.config.schema import PPOConfig
from rlx.config.vllm_range import LOWEST, vllm_version
from rlx.offload.plan.hardware import PROFILES, Hardware, profile_of

OPTIONAL_PACKAGES = ("peft", "torchao", "bitsandbytes", "wandb", "flash_attn", "liger_kernel")
CORES_PER_GPU = 16  # of a machine that is only named; no prediction depends on it
# One of these exists if a driver for CUDA devices is loaded (the last one under WSL).
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster to join."""

    address: str  # from RAY_ADDRESS or ray_kwargs.ray_init.address
    node_gpus: tuple[int, ...] = ()  # GPUs of each machine in it
    error: str | None = None  # the reason why it could not be reached; None if it answered


@dataclass(frozen=True)
class Machine:
    """The resources of a run."""

    gpus: int  # CUDA devices of this machine
    cpus: int  # cores that this process may use
    packages: frozenset[str]  # the installed ones of OPTIONAL_PACKAGES
    cluster: Cluster | None = None  # the cluster to join; None starts Ray on this machine alone
    vllm: str | None = None  # the version of vLLM, None if there is none
    # None: not known, as on a cluster of several machines
    device_bytes: int | None = None  # memory of the smallest device
    host_bytes: int | None = None  # memory of the machine or its container
    hardware: Hardware | None = None  # of its devices, if they are equal
    name: str | None = None  # of a machine that is only named; None: this machine, or the cluster's

    @property
    def label(self) -> str:
        return self.name or ("this machine" if self.cluster is None else f"the cluster at {self.cluster.address}")

    @property
    def node_gpus(self) -> tuple[int, ...]:
        return (self.gpus,) if self.cluster is None else self.cluster.node_gpus


def inspect_machine(cluster: Cluster | None = None) -> Machine:
    packages = frozenset(name for name in OPTIONAL_PACKAGES if find_spec(name) is not None)
    # Not every system tells which cores a process may use.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus, device_bytes, hardware = look_at_gpus()
    machine = Machine(gpus, cpus, packages, cluster, vllm_version())
    if cluster is not None and len(cluster.node_gpus) > 1:
        return machine  # the cluster's other machines may differ
    return replace(machine, device_bytes=device_bytes, host_bytes=all_host_bytes(), hardware=hardware)


def named_machine(text: str) -> Machine:
    """Return a machine by name, such as `8xh100`, `rtx4090` or `1x24gb`, with every package that rlx can use.

    Of a card that is named by its memory nothing else is known. Raises ValueError for one that is not in hardware.py.
    """
    count, name = re.fullmatch(r"(?:(\d+)x)?(.*)", text.lower()).groups()  # type: ignore[union-attr]  # it always matches
    gpus, lowest = int(count or 1), ".".join(map(str, LOWEST))
    card, memory = PROFILES.get(name), re.fullmatch(r"([1-9]\d*)gb", name)
    if (card is None and memory is None) or gpus < 1:
        raise ValueError(
            f"--on: got {text!r}, expected a number and one of {', '.join(PROFILES)}, or a number and the memory of another card, "
            "such as 8xh100 or 1x24gb"
        )
    return Machine(
        gpus,
        CORES_PER_GPU * gpus,
        frozenset(OPTIONAL_PACKAGES),
        vllm=vllm_version() or lowest,
        device_bytes=int(card.device_bytes) if card else int(memory[1]) * 10**9,  # type: ignore[index]  # one of them is known
        host_bytes=int(gpus * card.host_bytes) if card else None,
        hardware=card,
        name=f"{gpus}x{name}",
    )


def look_at_gpus() -> tuple[int, int | None, Hardware | None]:
    """Return the number of CUDA devices, the memory of the smallest [bytes] and their profile; allocate nothing on them."""
    if not any(Path(file).exists() for file in DRIVER_FILES):
        return 0, None, None
    import torch  # slow, so only with a driver

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    smallest = min((each.total_memory for each in found), default=None)
    profiles = {profile_of(each.name, each.total_memory) for each in found}
    return len(found), smallest, profiles.pop() if len(profiles) == 1 else None


def on_accelerator(config: PPOConfig, machine: Machine) -> bool:
    """Whether the run uses accelerators: as `trainer.device` says; auto uses them if there are any."""
    device = config.trainer.device
    return any(machine.node_gpus) if device == "auto" else device != "cpu"


def processes(config: PPOConfig) -> int:
    """Return the number of processes that train."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node
