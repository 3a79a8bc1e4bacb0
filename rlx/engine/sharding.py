"""Shard a model over processes with FSDP1 or FSDP2, one class for each.

A model is sharded in units: each transformer layer, and the root with everything outside the layers (embeddings, final norm,
head). Tied embeddings therefore belong to one unit.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlx.config.schema import FSDPConfig
from rlx.offload.runtime.layers import find_layers

TRAINING_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor; return a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def sharding_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a transformers model that become units of their own, by their name in the model.

    A layer that shares a parameter with the rest of the model is left to the root: FSDP would give each of two units its own
    copy and break the tie. For example Zamba's attention layers share one set of weights.

    Raises:
        ValueError: there are no such layers.
    """
    layers = find_layers(model, None)
    found = {name: layer for name, layer in layers if not _shares_parameters(model, name, layer)}
    if not found:
        raise ValueError(
            f"{type(model).__name__}: each of its {len(layers)} layers shares a parameter with another module, expected layers "
            "with weights of their own, which FSDP shards one by one; take another model"
        )
    return found


def _shares_parameters(model: nn.Module, name: str, module: nn.Module) -> bool:
    inside = set(module.parameters())
    named = model.named_parameters(remove_duplicate=False)
    return any(tensor in inside and not other.startswith(f"{name}.") for other, tensor in named)


class Unit(NamedTuple):
    """Parameters that FSDP gathers together: a layer, or the root without its layers.

    Attributes:
        prefix: the module's path in the model with a dot at its end, "" for the root.
        module: the plain module.
        names: its own entries in the model's state_dict, relative to the module; a tied one once.
        wrapped: the module that FSDP made of it.
    """

    prefix: str
    module: nn.Module
    names: list[str]
    wrapped: nn.Module

    def tensors(self) -> dict[str, Tensor]:
        """Return its current tensors by their full names."""
        found = {}
        for name in self.names:
            path, _, leaf = name.rpartition(".")
            found[f"{self.prefix}{name}"] = getattr(self.module.get_submodule(path), leaf)
        return found


def _own_names(module: nn.Module, layers: Sequence[str]) -> list[str]:
    """Return the names in the module's state_dict outside these layers; of tied tensors only the first."""
    seen: set[int] = set()
    names = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and not any(name.startswith(f"{layer}.") for layer in layers):
            names.append(name)
        seen.add(id(tensor))
    return names


def materialise(module: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
    """Move the tensors of `module` outside `layers` to the device, with rank 0's values on every rank.

    Other ranks may hold them on the meta device, so that only one process per run reads the weights. Tied tensors stay tied.
    """
    inside = {part for layer in layers for part in layer.modules()}
    moved: dict[Tensor, Tensor] = {}
    for part in module.modules():
        if part in inside:
            continue
        own = [
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in own:
            if tensor not in moved:
                value = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
                dist.broadcast(value, src=0)
                moved[tensor] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            setattr(part, name, moved[tensor])


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


class FSDP2Model(Sharded):
    """A model sharded by `fully_shard`, whose parameters become DTensors in place."""

    state_dict_shares_storages = True

    def __init__(self, model: nn.Module, fsdp: FSDPConfig, precision: Precision, device: torch.device):
        mesh = build_mesh(fsdp.fsdp_size, device)
        layers = sharding_units(model)
        self.device, self.root, self.sum_dtype = device, model, _sum_dtype(precision)
        self.replicas = mesh.size() // mesh["shard"].size()
        self.state_options = StateDictOptions()
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": _mixed_precision_policy(precision, mesh.size())}
        # On the CPU parameters already are in host memory, as under the policy.
        options["offload_policy"] = (
            CPUOffloadPolicy() if fsdp.offload_policy and device.type != "cpu" else OffloadPolicy()
        )
        self.units = [Unit("", model, _own_names(model, list(layers)), model)]
        for name, layer in layers.items():
            self.units.append(Unit(f"{name}.", layer, _own_names(layer, []), layer))
            materialise(layer, [], device)
            fully_shard(layer, reshard_after_forward=fsdp.reshard_after_forward, **options)
        materialise(model, list(layers.values()), device)
        # The head is the last part of forward and the first of backward, so freeing it in between would only gather it again.
        fully_shard(model, reshard_after_forward=False, **options)
        if fsdp.forward_prefetch:
            for layer, following in pairwise(layers.values()):
                layer.set_modules_to_forward_prefetch([following])

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """See Sharded. With replicas (HSDP) only the sum of the last micro-batch is reduced between them."""
        self.root.set_requires_all_reduce(last)
        yield
        if last:
            return
        for parameter in self.root.parameters():
            # FSDP2 adds the next micro-batch's gradient to this one in place.
            if parameter.grad is not None and parameter.grad.dtype != self.sum_dtype:
                parameter.grad_dtype = None  # any type
                parameter.grad = parameter.grad.to(self.sum_dtype)

    def reshard(self) -> None:
        """See Sharded."""
        for unit in self.units:
            assert isinstance(unit.wrapped, FSDPModule)
            unit.wrapped.reshard()

    def recover(self) -> None:
        """Prepare for the next forward after an exception ended a forward or backward. All processes call it together.

        Needs torch 2.13, see Note [why torch 2.13] in `oom_retry.py`. Without the loop, gradients that backward summed in
        gathered parameters would be added to the next ones.
        """
        assert isinstance(self.root, FSDPModule)
        self.root.reset_iter_state()
        for unit in self.units:
            assert isinstance(unit.wrapped, FSDPModule)
            unit.wrapped.unshard()
            for tensor in unit.tensors().values():
                tensor.grad = None
            unit.wrapped.reshard()

    @contextmanager
    def gathering(self, unit: Unit) -> Iterator[Callable[[Tensor], Tensor]]:
        """See Sharded."""
        self.reshard()
        yield self._full

    def _full(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach().clone()
        # The device's collectives cannot reach shards that an offload policy keeps in host memory.
        full = tensor.detach().to(self.device).full_tensor()
        return full.clone() if tensor.device_mesh.size() == 1 else full


def _sum_dtype(precision: Precision) -> torch.dtype:
    return torch.promote_types(precision.stored, precision.reduce)


def _mixed_precision_policy(precision: Precision, processes: int) -> MixedPrecisionPolicy:
    compute = None if precision.compute == precision.stored else precision.compute
    # A single process sums nothing: it would write values in the wider type, copy them and round them back to the same bits.
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.reduce if processes > 1 else None)


class FSDP1Model(Sharded):
    """`FullyShardedDataParallel` with original parameters.

    Raises:
        ValueError: FSDP1 does not support an option together with gradient accumulation.
    """

    state_dict_shares_storages = False

    def __init__(self, model: nn.Module, fsdp: FSDPConfig, precision: Precision, device: torch.device):
        mesh = build_mesh(fsdp.fsdp_size, device)
        layers = sharding_units(model)
        shards = mesh["shard"].size()
        self.replicas, self.sum_dtype = mesh.size() // shards, _sum_dtype(precision)
        self._summed: dict[nn.Parameter, Tensor] = {}
        sharded = shards > 1
        if not sharded and len({p.requires_grad for p in model.parameters()}) == 2:
            # After backward FSDP1 leaves a frozen unit's parameters as plain tensors, and the next forward fails.
            raise ValueError("lora_rank: FSDP1 cannot train adapters in a single process; use strategy=fsdp2")
        # FSDP1 has no sharded state_dict for a single process; the full one reads and writes the same format.
        self.state_options = StateDictOptions(full_state_dict=not sharded)
        options: dict[str, Any] = {
            "sharding_strategy": _fsdp1_strategy(fsdp, mesh),
            "device_mesh": mesh,
            "device_id": device,
            "use_orig_params": True,
            "forward_prefetch": fsdp.forward_prefetch,
            "mixed_precision": MixedPrecision(param_dtype=precision.compute, reduce_dtype=precision.reduce),
        }
        self.units = []
        own_names = _own_names(model, list(layers))
        for name, layer in layers.items():
            materialise(layer, [], device)
            names = _own_names(layer, [])
            parent, _, leaf = name.rpartition(".")
            wrapped = _wrap(layer, options)
            setattr(model.get_submodule(parent), leaf, wrapped)
            self.units.append(Unit(f"{name}.", layer, names, wrapped))
        materialise(model, list(layers.values()), device)
        inner = _wrap(model, options)
        self.units.insert(0, Unit("", model, own_names, inner))
        # FSDP1 never frees the root's parameters after forward. An outer root without parameters lets the inner one be freed.
        self.root = _wrap(inner, options)
        # If a unit is gathered before the root is known, that unit becomes a root.
        with FullyShardedDataParallel.summon_full_params(self.root, recurse=False, writeback=False):
            pass

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """See Sharded. FSDP1 sums in the parameters' type, so wider sums are kept here."""
        yield
        narrow = [p for p in self.root.parameters() if p.grad is not None and p.grad.dtype != self.sum_dtype]
        for parameter in narrow if self._summed or not last else ():
            gradient, parameter.grad = parameter.grad, None
            before = self._summed.get(parameter)
            self._summed[parameter] = gradient.to(self.sum_dtype) if before is None else before.add_(gradient)
        if last:
            for parameter, summed in self._summed.items():
                parameter.grad_dtype = None  # any type
                parameter.grad = summed
            self._summed = {}

    def drop_gradients(self, optimizer: Optimizer) -> None:
        """See Sharded. FSDP1 holds gradients until the model's next forward, which may come after a rollout."""
        storages = [p.grad.untyped_storage() for p in self.root.parameters() if p.grad is not None]
        optimizer.zero_grad()
        for storage in storages:
            storage.resize_(0)

    def reshard(self) -> None:
        """Do nothing. With reshard_after_forward=False parameters remain until backward, and FSDP1 cannot free them before."""

    @contextmanager
    def gathering(self, unit: Unit) -> Iterator[Callable[[Tensor], Tensor]]:
        """See Sharded."""
        with FullyShardedDataParallel.summon_full_params(unit.wrapped, recurse=False, writeback=False):
            yield lambda tensor: tensor.detach().clone()


def _fsdp1_strategy(fsdp: FSDPConfig, mesh: DeviceMesh) -> ShardingStrategy:
    if fsdp.offload_policy:
        raise ValueError(
            "offload_policy: FSDP1 loses accumulated gradients with it; use strategy=fsdp2, or param_offload and optimizer_offload"
        )
    if mesh.size() == 1:
        return ShardingStrategy.NO_SHARD
    if mesh.ndim == 1:
        return ShardingStrategy.FULL_SHARD if fsdp.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP
    if fsdp.fsdp_size == 1 or not fsdp.reshard_after_forward:
        raise ValueError(
            f"fsdp_size={fsdp.fsdp_size} with reshard_after_forward={fsdp.reshard_after_forward}: FSDP1 can only replicate groups "
            "of 2 or more processes that reshard after forward; use strategy=fsdp2"
        )
    return ShardingStrategy.HYBRID_SHARD


def _wrap(module: nn.Module, options: dict[str, Any]) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        # The warning is for users who choose NO_SHARD among several processes.
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        return FullyShardedDataParallel(module, **options)


def shard(model: nn.Module, strategy: str, fsdp: FSDPConfig, precision: Precision, device: torch.device) -> Sharded:
    """Shard a model over all processes.

    Args:
        model: with rank 0's weights in host memory; other ranks may hold it on the meta device.
        strategy: `fsdp2` or `fsdp`.
        fsdp: the configuration.
        precision: the result of `precision_of`.
        device: of this process.

    Raises:
        ValueError: the configuration does not fit the number of processes or the strategy.
    """
    kinds = {"fsdp2": FSDP2Model, "fsdp": FSDP1Model}
    if strategy not in kinds:
        raise ValueError(f"strategy: got {strategy!r}, expected fsdp2 or fsdp")
    return kinds[strategy](model, fsdp, precision, device)
