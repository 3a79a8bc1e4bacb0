"""A model sharded with FSDP2."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlx.config.schema import FSDPConfig
from rlx.engine.fsdp_units import Unit, materialise, own_names, sharding_units, whole
from rlx.engine.sharded import Precision, Sharded, build_mesh, casts, sum_dtype_of


class FSDP2Model(Sharded):
    """A model sharded by `fully_shard`, whose parameters become DTensors in place."""

    state_dict_shares_storages = True

    def __init__(
        self,
        model: nn.Module,
        fsdp: FSDPConfig,
        precision: Precision,
        device: torch.device,
        streamed: frozenset[nn.Parameter] = frozenset(),
    ):
        mesh = build_mesh(fsdp.fsdp_size, device)
        layers = sharding_units(model)
        self.device, self.root, self.sum_dtype = device, model, sum_dtype_of(precision, model)
        self.replicas = mesh.size() // mesh["shard"].size()
        self.state_options = StateDictOptions()
        options: dict[str, Any] = {
            "mesh": mesh,
            "ignored_params": set(streamed),
            "mp_policy": _mixed_precision_policy(precision, casts(precision, model), mesh.size()),
            # On the CPU parameters already are in host memory, as under the policy.
            "offload_policy": CPUOffloadPolicy() if fsdp.offload_policy and device.type != "cpu" else OffloadPolicy(),
        }
        self.units = [Unit("", model, own_names(model, list(layers)), model)]
        for name, layer in layers.items():
            self.units.append(Unit(f"{name}.", layer, own_names(layer, []), layer))
            materialise(layer, [], device, streamed)
            fully_shard(layer, reshard_after_forward=fsdp.reshards(mesh.size()), **options)
        materialise(model, list(layers.values()), device, streamed)
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

    @contextmanager
    def gathering(self, unit: Unit) -> Iterator[Callable[[Tensor], Tensor]]:
        """See Sharded."""
        assert isinstance(unit.wrapped, FSDPModule)
        unit.wrapped.reshard()  # not all units at each unit: with 48 layers that would be 2,304 calls
        yield self._full

    def _full(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach().to(self.device, copy=True)
        # A gather would cost more than the copy: adapters are hundreds of small tensors.
        if tensor.device_mesh.size() == 1:
            return tensor.to_local().detach().to(self.device, copy=True)
        # The device's collectives cannot reach shards that an offload policy keeps in host memory.
        shards = tensor.detach().to(self.device)
        if self.device.type == "cpu":
            return whole(shards)
        full = shards.full_tensor()
        # If the shards are over one process (HSDP), nothing was gathered: the result is the parameter's own memory.
        own = tensor.to_local().untyped_storage().data_ptr()
        return full.clone() if full.untyped_storage().data_ptr() == own else full


def _mixed_precision_policy(precision: Precision, is_cast: bool, processes: int) -> MixedPrecisionPolicy:
    compute = precision.compute if is_cast else None
    # A single process sums nothing: it would write values in the wider type, copy them and round them back to the same bits.
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precision.reduce if processes > 1 else None)
