"""The layers of a model, and transformers' own checkpointing and caches in them."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

NamedLayer = tuple[str, nn.Module]
LayerName = str | nn.Module | type[nn.Module]
CHECKPOINTING_FLAG = "gradient_checkpointing"


def find_layers(model: nn.Module, layers: Sequence[LayerName] | None) -> list[NamedLayer]:
    """Return the layers of a model with their names, in the order of registration; ValueError if there are none.

    `layers` are modules, qualified names, classes or their names. None: the first of these that there are: blocks that FSDP wraps;
    classes in `_no_split_modules`; members of the outermost `ModuleList`s whose members share a class; in a `Sequential`, two or
    more modules of one class of the model's own, else `Sequential`s of one structure.
    """
    if isinstance(layers, (str, type)) or not isinstance(layers, (Iterable, NoneType)):
        got = f"the string {layers!r}" if isinstance(layers, str) else _shown(layers)
        raise ValueError(f"layers= is {got}, expected a sequence of modules, module names, classes or class names")
    if layers is not None:
        found = _named_layers(model, layers)
    else:
        finders = (_fsdp_blocks, _no_split_layers, _list_members, _own_blocks, _nested_blocks)
        found = next(filter(None, (find(model) for find in finders)), [])
    if not found:
        raise ValueError(
            f"no layers found in {type(model).__name__}: it has no FSDP-wrapped blocks, no _no_split_modules, no ModuleList whose "
            "members share a class and no Sequential with two blocks, which are modules of one class of your own or Sequentials of "
            "one structure. A Linear or GELU alone saves no memory as a layer: put several into one nn.Sequential each, or name "
            "the layers with layers=[...] (modules, module names, classes or class names)"
        )
    unwrapped = [(name, _inside_fsdp1(module)) for name, module in found]
    ids = {id(module) for _, module in unwrapped}
    for name, module in unwrapped:
        inner = [n for n, child in module.named_modules() if child is not module and id(child) in ids]
        if inner:
            outer = repr(name) if name else "the model itself"
            raise ValueError(f"layers must not lie inside one another, but {outer} contains the layer {inner[0]!r}")
    return unwrapped


def _named_layers(model: nn.Module, layers: Iterable[LayerName]) -> list[NamedLayer]:
    modules = list(model.named_modules())
    wanted: set[int] = set()
    for layer in layers:
        matches = [m for n, m in modules if m is layer or n == layer]
        if not matches:
            of_class = [m for _, m in modules if _is_of_class(m, layer)]
            # A model of nested Sequentials is one too, but its layers are meant.
            matches = [m for m in of_class if m is not model] or of_class
        if not matches:
            raise ValueError(
                f"layers=: {_shown(layer)} is not a module, module name, class or class name in {type(model).__name__}"
            )
        wanted.update(map(id, matches))
    return [(name, module) for name, module in modules if id(module) in wanted]


def _is_of_class(module: nn.Module, layer: LayerName) -> bool:
    return isinstance(module, layer) if isinstance(layer, type) else layer == type(module).__name__


def _shown(layer: object) -> str:
    if isinstance(layer, nn.Module):
        return f"module {type(layer).__name__}"
    return f"class {layer.__name__}" if isinstance(layer, type) else repr(layer)


def _outermost(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[NamedLayer]:
    found: list[NamedLayer] = []
    for name, module in model.named_modules():
        if is_wanted(module) and not any(not outer or name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    return found


def _fsdp_blocks(model: nn.Module) -> list[NamedLayer]:
    # Blocks are in lists. A root, an embedding or an output head may be wrapped too, but is in none.
    members, kinds = _members(model, (nn.ModuleList, nn.Sequential)), fsdp_kinds()
    return _outermost(model, lambda module: isinstance(module, kinds) and id(module) in members)


def _members(model: nn.Module, lists: type[nn.Module] | tuple[type[nn.Module], ...]) -> set[int]:
    return {id(member) for module in model.modules() if isinstance(module, lists) for member in module.children()}


def _no_split_layers(model: nn.Module) -> list[NamedLayer]:
    classes: set[str] = set()
    for module in model.modules():
        classes.update(getattr(module, "_no_split_modules", None) or ())
    members = _members(model, nn.ModuleList)
    named = _outermost(model, lambda module: type(module).__name__ in classes)
    # Some models also name embeddings and poolers there; layers are in lists.
    return [(name, module) for name, module in named if id(module) in members] or named


def _list_members(model: nn.Module) -> list[NamedLayer]:
    lists = _outermost(model, lambda module: isinstance(module, nn.ModuleList) and len(set(map(type, module))) == 1)
    return [(f"{name}.{key}" if name else key, layer) for name, group in lists for key, layer in group.named_children()]


def _own_blocks(model: nn.Module) -> list[NamedLayer]:
    """Return members of one class of a `Sequential`; a module of torch's without parts, such as Linear, is no block."""

    def kind(part: nn.Module) -> type | None:
        is_block = any(part.children()) or not type(part).__module__.startswith("torch.nn.")
        return type(part) if is_block and not isinstance(part, nn.Sequential) else None

    return _repeated(model, kind)


def _nested_blocks(model: nn.Module) -> list[NamedLayer]:
    """Return members of a `Sequential` that are `Sequential`s of one structure, or of the inner one if it has such itself."""

    def kind(part: nn.Module) -> tuple[tuple[str, type], ...] | None:
        if not isinstance(part, nn.Sequential) or not any(part.children()) or _repeated(part, kind):
            return None
        return tuple((name, type(inner)) for name, inner in part.named_modules())

    return _repeated(model, kind)


def _repeated(model: nn.Module, kind: Callable[[nn.Module], object]) -> list[NamedLayer]:
    def kinds(module: nn.Module) -> set[object]:
        counts = Counter(map(kind, module)) if isinstance(module, nn.Sequential) else Counter[object]()
        return {each for each, number in counts.items() if number > 1 and each is not None}

    return [
        (f"{name}.{key}" if name else key, part)
        for name, group in _outermost(model, lambda module: bool(kinds(module)))
        for key, part in group.named_children()
        if kind(part) in kinds(group)
    ]


def _inside_fsdp1(module: nn.Module) -> nn.Module:
    """Return the module that FSDP1 wraps, if it does: its forward runs with the parameters gathered."""
    return module.module if is_fsdp1(module) else module


@functools.cache
def fsdp_kinds() -> tuple[type, ...]:
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return FullyShardedDataParallel, FSDPModule


def is_fsdp1(module: nn.Module) -> TypeGuard[FullyShardedDataParallel]:
    return isinstance(module, fsdp_kinds()[:1])


class CheckpointingFlags:
    """The flags that switch transformers' gradient checkpointing on, of modules that are held weakly."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = weakref.WeakSet(modules)
        self._was_own: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, model: nn.Module, layers: Iterable[NamedLayer]) -> CheckpointingFlags:
        """Return the flags that make transformers recompute layers: of the layers, of modules in them and around them."""
        found = [layer for _, layer in layers]
        ids = set(map(id, found))
        above = [module for module in model.modules() if any(id(inner) in ids for inner in module.modules())]
        return cls([*above, *(inner for layer in found for inner in layer.modules())])

    def switch_off(self) -> bool:
        flagged = [module for module in self._modules if is_checkpointed(module)]
        for module in flagged:
            self._was_own.setdefault(module, CHECKPOINTING_FLAG in vars(module))
            setattr(module, CHECKPOINTING_FLAG, False)
        return bool(flagged)

    def restore(self) -> None:
        for module, was_own in self._was_own.items():
            if was_own:
                setattr(module, CHECKPOINTING_FLAG, True)
            else:
                delattr(module, CHECKPOINTING_FLAG)
        self._was_own.clear()


def is_checkpointed(module: nn.Module) -> bool:
    return getattr(module, CHECKPOINTING_FLAG, False) is True


def is_cache(value: Any) -> bool:
    if value is None or isinstance(value, torch.Tensor):
        return False
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def is_filled(cache: Any, layer: nn.Module) -> bool:
    indices = (getattr(module, "layer_idx", None) for module in layer.modules())
    index = next((index for index in indices if isinstance(index, int)), 0)
    try:
        return bool(cache.get_seq_length(index) > 0)
    except ValueError:  # the layer has no attention: the cache holds a state, which has no length
        has_state = getattr(cache, "has_previous_state", None)
        return has_state is not None and bool(has_state(index))
