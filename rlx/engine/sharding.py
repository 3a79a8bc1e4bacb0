"""A model sharded over processes with FSDP1 or FSDP2, or left whole in one process."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
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
from rlx.engine.fsdp_units import Unit, materialise, own_names, sharding_units, whole

TRAINING_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Precision(NamedTuple):
    """Types of stored parameters, of forward and backward, and of the sum of gradients over processes."""

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


def precision_of(fsdp: FSDPConfig, device: torch.device) -> Precision:
    chosen, stored = fsdp.mixed_precision.param_dtype, TRAINING_DTYPES[fsdp.model_dtype]
    automatic = stored if device.type == "cpu" else torch.bfloat16
    compute = automatic if chosen == "auto" else TRAINING_DTYPES[chosen]
    return Precision(stored, compute, TRAINING_DTYPES[fsdp.mixed_precision.reduce_dtype])


def trained_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Return the types of the trained parameters: adapters may be wider than the weights below them."""
    return {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}


def casts(precision: Precision, model: nn.Module) -> bool:
    """Whether weights are cast to the type of computation. Else those that the model keeps in a wider type stay wide."""
    return {precision.stored} | trained_dtypes(model) != {precision.compute}


def build_mesh(fsdp_size: int, device: torch.device) -> DeviceMesh:
    """Return a mesh with one dimension `shard`, or `replicate` x `shard` for shards over a part of the processes (HSDP)."""
    world = dist.get_world_size()
    size = world if fsdp_size == -1 else fsdp_size
    if size == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))


class Sharded(ABC):
    """A model that is sharded over the processes; forward and backward of `root` gather and reduce by themselves."""

    replicas = 1  # processes that hold each shard
    state_dict_shares_storages = True  # whether a state_dict holds the tensors themselves, without touching their bytes

    def __init__(self, model: nn.Module, precision: Precision, device: torch.device):
        self.root, self.device, self.layers = model, device, sharding_units(model)
        # Of gradients summed over micro-batches
        self.sum_dtype = reduce(torch.promote_types, trained_dtypes(model), precision.reduce)
        self.state_options = StateDictOptions()
        self.units = [Unit("", model, own_names(model, list(self.layers)), model)]
        self.units += [Unit(f"{name}.", layer, own_names(layer, []), layer) for name, layer in self.layers.items()]

    @abstractmethod
    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Return a context around forward and backward of one micro-batch; `last` is true if the optimizer steps next.

        Gradients are summed in the type of `mixed_precision.reduce_dtype`: bf16 sums of 64 gradients lose most of their digits. Unless
        they stay whole, they are reduced to shards after every micro-batch.
        """

    @abstractmethod
    def reshard(self) -> None:
        """Free gathered parameters that remain after a forward without a backward."""

    def drop_gradients(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad()

    @abstractmethod
    def gathering(self, unit: Unit) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Return a context that gives a function. It copies one of the unit's tensors in full; all processes join each call."""

    def _cast_inputs(self, dtype: torch.dtype) -> None:
        """Cast what each unit gets, as FSDP2 does, for models that widen what goes from layer to layer."""
        for unit in self.units:
            unit.module.register_forward_pre_hook(lambda _, *given: _cast(given, dtype), with_kwargs=True)

    def _widen_gradients(self) -> None:
        """Prepare the sums of gradients for the next micro-batch, whose gradients are added to them in place."""
        for parameter in self.root.parameters():
            if parameter.grad is not None and parameter.grad.dtype != self.sum_dtype:
                parameter.grad_dtype = None  # any type
                parameter.grad = parameter.grad.to(self.sum_dtype)


def shard(
    model: nn.Module,
    strategy: str,
    fsdp: FSDPConfig,
    precision: Precision,
    device: torch.device,
    streamed: Set[nn.Parameter],
) -> Sharded:
    """Shard a model, with rank 0's weights in host memory, over all processes; `streamed` weights stay where they are.

    With `fsdp2` a single process uses FSDP2 only to cast weights layer by layer, or for its offload policy.
    """
    if strategy == "fsdp":
        assert not streamed, "`rlx check` rejects weights that are streamed with FSDP1"
        return FSDP1Model(model, fsdp, precision, device)
    if dist.get_world_size() == 1 and not fsdp.offload_policy:
        # FSDP2 rounds gradients of weights that are cast to a wider type, as it does with several processes.
        widens = precision.compute.itemsize > precision.stored.itemsize
        if not casts(precision, model) or not (widens or fsdp.reshards(1)):
            return SingleModel(model, precision, device, streamed)
    return FSDP2Model(model, fsdp, precision, device, streamed)


class FSDP2Model(Sharded):
    """A model sharded by `fully_shard`, whose parameters become DTensors in place."""

    def __init__(
        self,
        model: nn.Module,
        fsdp: FSDPConfig,
        precision: Precision,
        device: torch.device,
        streamed: Set[nn.Parameter],
    ):
        mesh = build_mesh(fsdp.fsdp_size, device)
        super().__init__(model, precision, device)
        self.replicas = mesh.size() // mesh["shard"].size()
        self._sums_whole = fsdp.reshard_after_forward == "never" and precision.reduce == self.sum_dtype
        self._is_last = True
        options: dict[str, Any] = {
            "mesh": mesh,
            "ignored_params": set(streamed),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=precision.compute if casts(precision, model) else None,
                # A single process sums nothing: it would write values in the wider type and round them back to the same bits.
                reduce_dtype=precision.reduce if mesh.size() > 1 else None,
            ),
            # On the CPU parameters already are in host memory, as under the policy.
            "offload_policy": CPUOffloadPolicy() if fsdp.offload_policy and device.type != "cpu" else OffloadPolicy(),
        }
        # What is never freed between layers is one unit: for a small layer FSDP's work on the host takes longer than the kernels.
        layers = list(self.layers.values())
        if fsdp.reshard_after_forward == "never":
            layers, self.units = [], [unit._replace(wrapped=model) for unit in self.units]
            if casts(precision, model):
                self._cast_inputs(precision.compute)
        for layer in layers:
            materialise(layer, [], device, streamed)
            fully_shard(layer, reshard_after_forward=fsdp.reshards(mesh.size()), **options)
        materialise(model, layers, device, streamed)
        # The head is the last part of forward and the first of backward, so freeing it in between would only gather it again.
        fully_shard(model, reshard_after_forward=False, **options)
        if fsdp.forward_prefetch:
            for layer, following in pairwise(layers):
                layer.set_modules_to_forward_prefetch([following])

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """See Sharded. With replicas (HSDP) only the sum of the last micro-batch is reduced between them.

        With `reshard_after_forward=never` weights and gradients stay whole until the last micro-batch. Unless sums are wider than the
        type of the reduction: FSDP2 would round them to it.
        """
        if last != self._is_last:  # each call visits all modules
            self.root.set_requires_all_reduce(last)
            if self._sums_whole:
                self.root.set_requires_gradient_sync(last)
                self.root.set_reshard_after_backward(last)
            self._is_last = last
        yield
        if not last and not self._sums_whole:
            self._widen_gradients()

    def reshard(self) -> None:
        for unit in self.units:
            assert isinstance(unit.wrapped, FSDPModule)
            unit.wrapped.reshard()

    @contextmanager
    def gathering(self, unit: Unit) -> Iterator[Callable[[Tensor], Tensor]]:
        assert isinstance(unit.wrapped, FSDPModule)
        unit.wrapped.reshard()  # not all units at each unit: with 48 layers that would be 2,304 calls
        yield self._full

    def _full(self, tensor: Tensor) -> Tensor:
        # With one process a gather would cost more than the copy: adapters are hundreds of small tensors.
        if not isinstance(tensor, DTensor) or tensor.device_mesh.size() == 1:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            return own.detach().to(self.device, copy=True)
        # The device's collectives cannot reach shards that an offload policy keeps in host memory.
        shards = tensor.detach().to(self.device)
        if self.device.type == "cpu":
            return whole(shards)
        full = shards.full_tensor()
        # If the shards are over one process (HSDP), nothing was gathered: the result is the parameter's own memory.
        own_memory = tensor.to_local().untyped_storage().data_ptr()
        return full.clone() if full.untyped_storage().data_ptr() == own_memory else full


class FSDP1Model(Sharded):
    """`FullyShardedDataParallel` with original parameters."""

    state_dict_shares_storages = False

    def __init__(self, model: nn.Module, fsdp: FSDPConfig, precision: Precision, device: torch.device):
        mesh = build_mesh(fsdp.fsdp_size, device)
        super().__init__(model, precision, device)
        shards = mesh["shard"].size()
        self.replicas = mesh.size() // shards
        self._summed: dict[nn.Parameter, Tensor] = {}
        # FSDP1 has no sharded state_dict for a single process; the full one reads and writes the same format.
        self.state_options = StateDictOptions(full_state_dict=shards == 1)
        options: dict[str, Any] = {
            "sharding_strategy": _fsdp1_strategy(fsdp, mesh),
            "device_mesh": mesh,
            "device_id": device,
            "use_orig_params": True,
            "forward_prefetch": fsdp.forward_prefetch,
            "mixed_precision": MixedPrecision(param_dtype=precision.compute, reduce_dtype=precision.reduce),
        }
        for number, (name, layer) in enumerate(self.layers.items(), start=1):
            materialise(layer, [], device)
            parent, _, leaf = name.rpartition(".")
            wrapped = _wrap(layer, options)
            setattr(model.get_submodule(parent), leaf, wrapped)
            self.units[number] = self.units[number]._replace(wrapped=wrapped)
        materialise(model, list(self.layers.values()), device)
        inner = _wrap(model, options)
        self.units[0] = self.units[0]._replace(wrapped=inner)
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
        with FullyShardedDataParallel.summon_full_params(unit.wrapped, recurse=False, writeback=False):
            yield lambda tensor: tensor.detach().clone()


def _fsdp1_strategy(fsdp: FSDPConfig, mesh: DeviceMesh) -> ShardingStrategy:
    if mesh.size() == 1:
        return ShardingStrategy.NO_SHARD
    reshards = fsdp.reshards(mesh.size())
    if mesh.ndim == 1:
        return ShardingStrategy.FULL_SHARD if reshards else ShardingStrategy.SHARD_GRAD_OP
    return ShardingStrategy.HYBRID_SHARD


def _wrap(module: nn.Module, options: dict[str, Any]) -> FullyShardedDataParallel:
    with warnings.catch_warnings():
        # The warning is for users who choose NO_SHARD among several processes.
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        return FullyShardedDataParallel(module, **options)


class SingleModel(Sharded):
    """The plain model; if it computes in another type than it stores, forward and backward read a copy of the weights.

    FSDP2 would copy each layer's weights twice per micro-batch, with as much work on the host as launching its kernels. Here all are
    copied at the first forward after `reshard`. Results are those of FSDP2, but for gradients of weights that the model multiplies
    with wider tensors, as some norms are: FSDP2 rounds these to the type of computation in each micro-batch.
    """

    def __init__(self, model: nn.Module, precision: Precision, device: torch.device, streamed: Set[nn.Parameter]):
        super().__init__(model, precision, device)
        materialise(model, [], device, streamed)
        self._compute = precision.compute
        places = [  # of each parameter; a tied one has several
            (module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if parameter not in streamed and parameter.is_floating_point() and parameter.dtype != precision.compute
        ]
        self._weights = places if casts(precision, model) else []
        self._copies: dict[nn.Parameter, nn.Parameter] = {}  # by the weights that they are read for
        for parameter in model.parameters():
            parameter.grad_dtype = None  # any type: that of the sum
        if self._weights:
            model.register_forward_pre_hook(lambda *_: self._read_copies())
            self._cast_inputs(precision.compute)

    @torch.no_grad()
    def _read_copies(self) -> None:
        if self._copies:
            return
        copies = {
            weight: nn.Parameter(weight.detach().to(self._compute), weight.requires_grad)
            for weight in dict.fromkeys(weight for _, _, weight in self._weights)
        }
        for module, name, weight in self._weights:
            copies[weight].grad_dtype = None
            setattr(module, name, copies[weight])
        self._copies = copies

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """See Sharded. After an exception there are no gradients."""
        try:
            yield
        except BaseException:
            self.reshard()
            for parameter in self.root.parameters():
                parameter.grad = None
            raise
        if not last:
            self._widen_gradients()
            return
        for weight, copy in self._copies.items():
            if copy.grad is not None:
                weight.grad = copy.grad.to(torch.promote_types(copy.grad.dtype, weight.dtype))
                copy.grad = None
        self.reshard()

    def reshard(self) -> None:
        """See Sharded. The copies are freed."""
        if self._copies:
            for module, name, weight in self._weights:
                setattr(module, name, weight)
            self._copies = {}

    @contextmanager
    def gathering(self, unit: Unit) -> Iterator[Callable[[Tensor], Tensor]]:
        self.reshard()
        yield lambda tensor: tensor.detach().to(self.device, copy=True)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    match value:
        case Tensor():
            return value.to(dtype) if value.is_floating_point() else value
        case dict():
            return {name: _cast(each, dtype) for name, each in value.items()}
        case tuple() | list():
            made = [_cast(each, dtype) for each in value]
            return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value
