"""A model of one process: nothing is sharded, gathered or reduced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from rlx.engine.fsdp_units import Unit, materialise, own_names, sharding_units
from rlx.engine.sharded import Precision, Sharded, casts, sum_dtype_of


class SingleModel(Sharded):
    """The plain model; if it computes in another type than it stores, forward and backward read a copy of the weights.

    FSDP2 would copy the weights of each layer twice in each micro-batch, and for each layer run code on the host that takes as
    long as launching the layer's kernels. Here they are copied at the first forward after `reshard`, all at once. Results are
    those of FSDP2, but for gradients of weights that the model multiplies with wider tensors, as some norms are: FSDP2 rounds
    these to the type of computation in each micro-batch.

    Args:
        model: with its weights in host memory.
        precision: the result of `precision_of`.
        device: of this process.
        streamed: parameters that stay where they are, in the type of computation.
    """

    state_dict_shares_storages = True
    replicas = 1

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        device: torch.device,
        streamed: frozenset[nn.Parameter] = frozenset(),
    ):
        layers = sharding_units(model)
        self.device, self.root, self.sum_dtype = device, model, sum_dtype_of(precision, model)
        self.state_options = StateDictOptions()
        self.units = [Unit("", model, own_names(model, list(layers)), model)]
        self.units += [Unit(f"{name}.", layer, own_names(layer, []), layer) for name, layer in layers.items()]
        materialise(model, [], device, streamed)
        self._compute = precision.compute
        places = [
            _Weight(module, name, parameter)
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
            for unit in self.units:  # as FSDP2 does, for models that widen what goes from layer to layer
                unit.module.register_forward_pre_hook(partial(_cast_inputs, self._compute), with_kwargs=True)

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
        if last:
            for weight, copy in self._copies.items():
                if copy.grad is not None:
                    weight.grad = copy.grad.to(torch.promote_types(copy.grad.dtype, weight.dtype))
                    copy.grad = None
            self.reshard()
            return
        for parameter in self.root.parameters():
            # autograd adds the next micro-batch's gradient to this one in place.
            if parameter.grad is not None and parameter.grad.dtype != self.sum_dtype:
                parameter.grad = parameter.grad.to(self.sum_dtype)

    def reshard(self) -> None:
        """See Sharded. The copies are freed."""
        if self._copies:
            for module, name, weight in self._weights:
                setattr(module, name, weight)
            self._copies = {}

    @contextmanager
    def gathering(self, unit: Unit) -> Iterator[Callable[[Tensor], Tensor]]:
        """See Sharded."""
        self.reshard()
        yield lambda tensor: tensor.detach().to(self.device, copy=True)


class _Weight(NamedTuple):
    """A place of a parameter in the model; a tied one has several."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def _cast_inputs(dtype: torch.dtype, _module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast(args, dtype), _cast(kwargs, dtype)


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
