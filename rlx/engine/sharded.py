"""Interface of a model that is sharded over processes, and the types and the mesh that both strategies use."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from rlx.config.schema import FSDPConfig
from rlx.engine.fsdp_units import Unit

TRAINING_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Precision(NamedTuple):
    """Types of stored parameters, of forward and backward, and of the sum of gradients over processes."""

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


def precision_of(fsdp: FSDPConfig, device: torch.device) -> Precision:
    """Return the configured types, with `auto` decided for this device."""
    chosen, stored = fsdp.mixed_precision.param_dtype, TRAINING_DTYPES[fsdp.model_dtype]
    automatic = stored if device.type == "cpu" else torch.bfloat16
    compute = automatic if chosen == "auto" else TRAINING_DTYPES[chosen]
    return Precision(stored, compute, TRAINING_DTYPES[fsdp.mixed_precision.reduce_dtype])


def trained_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the types of the parameters that are trained: adapters may be wider than the weights below them."""
    return {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}


def casts(precision: Precision, model: nn.Module) -> bool:
    """Return whether weights are cast to the type of computation. Else weights that the model keeps in a wider type stay wide."""
    return {precision.stored} | trained_dtypes(model) != {precision.compute}


def sum_dtype_of(precision: Precision, model: nn.Module) -> torch.dtype:
    """Return the type in which gradients are summed over micro-batches."""
    return reduce(torch.promote_types, trained_dtypes(model), precision.reduce)


def build_mesh(fsdp_size: int, device: torch.device) -> DeviceMesh:
    """Return a mesh with one dimension `shard`, or with `replicate` x `shard` if shards are not over all processes (HSDP).

    Raises:
        ValueError: `fsdp_size` does not divide the number of processes.
    """
    world = dist.get_world_size()
    size = world if fsdp_size == -1 else fsdp_size
    if size < 1 or world % size:
        raise ValueError(f"fsdp_size: got {fsdp_size}, expected -1 or a divisor of the number of processes, {world}")
    if size == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))


class Sharded(ABC):
    """A model that is sharded over the processes.

    Attributes:
        root: the module to call; its forward and backward gather and reduce by themselves.
        units: the units, the root first.
        replicas: number of processes that hold each shard.
        state_options: for torch.distributed.checkpoint.state_dict.
        state_dict_shares_storages: whether a state_dict holds the tensors themselves, without touching their bytes.
        sum_dtype: of gradients summed over micro-batches.
    """

    root: nn.Module
    units: list[Unit]
    replicas: int
    state_options: StateDictOptions
    state_dict_shares_storages: bool
    sum_dtype: torch.dtype

    @abstractmethod
    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Return a context around forward and backward of one micro-batch; `last` is true if the optimizer steps next.

        Gradients are reduced to shards after every micro-batch. Keeping them whole until the last one would save traffic but
        cost a full copy of the gradients. The shards are summed over micro-batches in the type of
        `mixed_precision.reduce_dtype`, which may be wider than the parameters: bf16 sums of 64 gradients lose most of their digits.
        """

    @abstractmethod
    def reshard(self) -> None:
        """Free gathered parameters that remain after a forward without a backward."""

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """Free the gradients after the optimizer's step."""
        optimizer.zero_grad()

    @abstractmethod
    def gathering(self, unit: Unit) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Return a context that gives a function. It copies one of the unit's tensors in full; all processes join each call."""
