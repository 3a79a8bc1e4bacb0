"""A model sharded with FSDP1."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.optim import Optimizer

from rlx.config.schema import FSDPConfig
from rlx.engine.fsdp_units import Unit, materialise, own_names, sharding_units
from rlx.engine.sharded import Precision, Sharded, build_mesh, sum_dtype_of, trained_dtypes


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
        self.replicas, self.sum_dtype = mesh.size() // shards, sum_dtype_of(precision, model)
        self._summed: dict[nn.Parameter, Tensor] = {}
        sharded = shards > 1
        if not sharded and len({p.requires_grad for p in model.parameters()}) == 2:
            # After backward FSDP1 leaves a frozen unit's parameters as plain tensors, and the next forward fails.
            raise ValueError("lora_rank: FSDP1 cannot train adapters in a single process; use strategy=fsdp2")
        if trained_dtypes(model) - {precision.stored}:
            raise ValueError(
                f"lora_rank: adapters are fp32 and the weights {precision.stored}, but FSDP1 keeps a layer's parameters in one "
                "type; use strategy=fsdp2 or model_dtype=fp32"
            )
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
        of_root = own_names(model, list(layers))
        for name, layer in layers.items():
            materialise(layer, [], device)
            names = own_names(layer, [])
            parent, _, leaf = name.rpartition(".")
            wrapped = _wrap(layer, options)
            setattr(model.get_submodule(parent), leaf, wrapped)
            self.units.append(Unit(f"{name}.", layer, names, wrapped))
        materialise(model, list(layers.values()), device)
        inner = _wrap(model, options)
        self.units.insert(0, Unit("", model, of_root, inner))
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
    reshards = fsdp.reshards(mesh.size())
    if mesh.ndim == 1:
        return ShardingStrategy.FULL_SHARD if reshards else ShardingStrategy.SHARD_GRAD_OP
    if fsdp.fsdp_size == 1 or not reshards:
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
