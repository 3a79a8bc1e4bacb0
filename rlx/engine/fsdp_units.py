"""The parts of a model that FSDP shards, gathers and frees one by one.

Each transformer layer is a unit, and so is the root with everything outside the layers (embeddings, final norm, head). Tied
embeddings therefore belong to one unit.

Note [gloo and DTensor.full_tensor]
`DTensor.full_tensor` gathers by an operation that torch calls ALLGATHER_COALESCED. A gloo group has two threads. After each
operation its thread writes this name to a string of the group, without a lock (`ProcessGroupGloo::runLoop`, torch 2.13). A name
of more than 15 letters is in allocated memory, so both threads may free the same bytes, and the process crashes, though rarely.
The name of `dist.all_gather` is short enough to lie in the string itself.
"""

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlx.offload.runtime.layers import find_layers


def gathered(own: Any) -> list[Any]:
    """Return an object of each process; all of them call this."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a sharded tensor; return a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: DTensor) -> Tensor:
    """Gather the shards of a tensor that FSDP2 divides by its first dimension, on the CPU. All processes that have shards call it.

    See Note [gloo and DTensor.full_tensor]. The result has memory of its own.
    """
    divided = next(dim for dim, placement in enumerate(tensor.placements) if placement.is_shard())
    group, shard = tensor.device_mesh.get_group(divided), tensor.to_local().detach()
    processes = dist.get_world_size(group)
    rows = -(-tensor.shape[0] // processes)  # of each shard but the last ones
    padded = shard.new_zeros(rows, *tensor.shape[1:])
    padded[: len(shard)] = shard
    found = shard.new_empty(rows * processes, *tensor.shape[1:])
    dist.all_gather(list(found.chunk(processes)), padded, group)
    return found[: tensor.shape[0]]


def sharding_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a transformers model that become units of their own, by their name in the model.

    A layer that shares a parameter with the rest of the model is left to the root: FSDP would give each of two units its own
    copy. For example Zamba's attention layers share one set of weights. Raises ValueError if no layer is left.
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
    """Parameters that FSDP gathers together: a layer, or the root without its layers."""

    prefix: str  # the module's path in the model with a dot at its end, "" for the root
    module: nn.Module  # the plain one
    names: list[str]  # its own entries in the model's state_dict, relative to the module; a tied one once
    wrapped: nn.Module  # the module that FSDP made of it

    def tensors(self) -> dict[str, Tensor]:
        """Return its current tensors by their full names."""
        found = {}
        for name in self.names:
            path, _, leaf = name.rpartition(".")
            found[f"{self.prefix}{name}"] = getattr(self.module.get_submodule(path), leaf)
        return found


def own_names(module: nn.Module, layers: Sequence[str]) -> list[str]:
    """Return the names in the module's state_dict outside these layers; of tied tensors only the first."""
    seen: set[int] = set()
    names = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and not any(name.startswith(f"{layer}.") for layer in layers):
            names.append(name)
        seen.add(id(tensor))
    return names


def materialise(
    module: nn.Module, layers: Sequence[nn.Module], device: torch.device, streamed: Set[nn.Parameter] = frozenset()
) -> None:
    """Move the tensors of `module` outside `layers`, except `streamed`, to the device, with rank 0's values on every rank.

    Other ranks may hold them on the meta device, so that only one process per run reads the weights. Tied tensors stay tied. Tensors
    get memory of torch's own: that of a weights file cannot be freed, and would change with the file.
    """
    inside = {part for layer in layers for part in layer.modules()}
    moved: dict[Tensor, Tensor] = {}
    for part in module.modules():
        if part in inside:
            continue
        every: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
        for name, tensor in [*part.named_parameters(**every), *part.named_buffers(**every)]:
            if tensor in streamed:
                continue
            if tensor not in moved:
                value = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device)
                value = value if value.untyped_storage().resizable() else value.clone()
                dist.broadcast(value, src=0)
                moved[tensor] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            setattr(part, name, moved[tensor])
