"""The slots of a layer call: autograd holds their numbers in place of the tensors that it saves in a recomputed layer.

When forward has ended, a slot keeps shape and dtype of its tensor, and a way to tell whether it was written to; the memory is free.

Note [the work of hooks]
Work in a hook costs several times as much as in a loop, because the layer's kernels run between the calls. So the hooks only append
tensors to a list, which is examined when forward, or the recomputation, has ended. The lists are cleared in any case: the graph holds
the hooks, these hold the lists, and the tensors hold the graph.

Note [who may write to a saved tensor]
Plain autograd raises an error for a write to a saved tensor, so the slots must notice one.

* A result of an operation in the layer. After forward a weak reference to the tensor, or to its base, is enough: once the tensor and
  its views are gone no write is possible. A write through `y.detach()` after `y` is gone is missed, and does no harm.
* A tensor from before the layer (a constant, a mask). Recomputation reads it again, and any alias may write to it. So the slots keep
  an alias without memory that shares its version counter.

Note [layers on several streams]
A layer may compute on streams of its own. A recomputation that stops after the last saved tensor would skip the waits for them. So a
layer that saves a tensor on another stream than the one on which its recomputation, or its forward, began is run to its end, now and
later. Backward may read the tensors on any of the streams; each first waits for the recomputation. Asking for the current stream takes
time, so the hook asks at every tensor only if the saved tensors have new shapes or dtypes.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from rlx.offload.recompute.ambient_state import AmbientState, RandomState
from rlx.offload.recompute.module_state import TensorSites
from rlx.offload.runtime.session import Layer
from rlx.offload.storage.tensor_bytes import modified_in_place, without_memory

_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
_UNWRITTEN = torch.empty(0, device="cpu")  # never written to
_NO_ALIAS = weakref.ref(_UNWRITTEN)  # for a tensor without a version counter


class TensorSpecs(NamedTuple):
    """Dtypes and shapes of tensors; None for a shape: nested tensors have none."""

    dtypes: list[torch.dtype]
    shapes: list[torch.Size | None]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> TensorSpecs:
        return cls([tensor.dtype for tensor in tensors], [_shape(tensor) for tensor in tensors])

    def match(self, tensors: Sequence[Tensor]) -> bool:
        try:
            return list(map(_DTYPE, tensors)) == self.dtypes and list(map(_SHAPE, tensors)) == self.shapes
        except RuntimeError:
            return False


class SavedSlots:
    """The slots of one forward call: numbers, in the order in which autograd saves tensors."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []  # while forward runs
        self.versions: list[int | None] = []  # of the tensors at the save; None for one without a version counter
        # After forward. Of each slot a tensor with its version counter, for as long as anybody may write to it.
        self.aliases: list[weakref.ref[Tensor]] = []
        self._kept_aliases: list[Tensor] = []  # those that live as long as the slots
        # By slot: the parameter that the tensor is, or is a view of; without views if an input of the layer is such a view.
        self.parameters: dict[int, Parameter] = {}
        self._others: list[int] = []  # the slots of all other tensors
        self._views: list[int] = []  # those of them whose tensor is a view, but not of a parameter
        self.specs = TensorSpecs([], [])  # of the tensors of `_others`
        # Slots of tensors from before the layer that are no parameters, by the id of their base.
        self._slots_by_base: dict[int, list[int]] = {}
        # While forward runs: the alias for a tensor and its views, by the id of their base; the layer's inputs too.
        self.alias_by_base: dict[int, Tensor] = {}

    def packer(self) -> Callable[[Tensor], int]:
        saved, versions = self.saved, self.versions

        def pack(tensor: Tensor) -> int:
            saved.append(tensor)
            try:
                versions.append(tensor._version)
            except RuntimeError:  # an inference tensor
                versions.append(None)
            return len(versions) - 1

        return pack

    def end_forward(self, expected: TensorSpecs | None) -> TensorSpecs:
        """Keep all but the memory of the saved tensors; return their specs: `expected`, of the last forward, if these hold."""
        versions, by_base = self.versions, self.alias_by_base
        aliases: list[weakref.ref[Tensor]] = []
        others: list[Tensor] = []
        for index, tensor in enumerate(self.saved):
            base = tensor._base  # all views of a tensor share its version counter
            if base is None:
                base = tensor
            version = versions[index]
            if type(base) is Parameter and version is not None and (base is tensor or id(base) not in by_base):
                self.parameters[index] = base
                aliases.append(weakref.ref(base))
                continue
            self._others.append(index)
            others.append(tensor)
            if base is not tensor and type(base) is not Parameter:
                self._views.append(index)
            if type(tensor) is not Tensor or version is None:
                reference = None
            elif base.is_leaf:
                alias = by_base.get(id(base))
                if alias is None:
                    alias = by_base[id(base)] = _alias(tensor)
                    self._kept_aliases.append(alias)
                reference = None if alias is _UNWRITTEN else weakref.ref(alias)
                self._slots_by_base.setdefault(id(base), []).append(index)
            elif base._version == version:
                reference = weakref.ref(base)
            else:
                reference, versions[index] = _NO_ALIAS, ~version  # it has been written to: never equal to a version
            if reference is None:
                reference = _NO_ALIAS
                versions[index] = _UNWRITTEN._version
            aliases.append(reference)
        self.specs = expected if expected is not None and expected.match(others) else TensorSpecs.of(others)
        self.aliases.extend(aliases)  # at once and last: from now on another thread may ask for slots
        return self.specs

    def release_forward(self) -> None:
        self.saved.clear()
        self.alias_by_base.clear()

    def accept_writes(self, writes: Iterable[tuple[Tensor, int]]) -> None:
        """Accept writes to buffers, by their number, that were made by the recomputation and undone after it."""
        for tensor, count in writes:
            for index in self._slots_by_base.get(id(tensor), ()):
                self.versions[index] = (self.versions[index] or 0) + count

    def is_written(self, index: int) -> bool:
        alias = self.aliases[index]()
        return alias is not None and alias._version != self.versions[index]

    def written(self, index: int) -> RuntimeError:
        version = self.versions[index]
        assert version is not None
        parameter = self.parameters.get(index)
        if parameter is not None:
            shape, dtype = parameter.shape, parameter.dtype
        else:
            other = self._others.index(index)
            shape, dtype = self.specs.shapes[other] or torch.Size(), self.specs.dtypes[other]
        saved_at = version if version >= 0 else ~version
        return modified_in_place(shape, dtype, saved_at, "but was written to after that")

    def difference(self, saved: Sequence[Tensor]) -> str | None:
        if len(saved) != len(self.versions):
            return f"{len(self.versions)} tensors were saved and {len(saved)} are now"
        others = [saved[index] for index in self._others]
        if self.specs.match(others):
            return None
        for index, tensor, dtype, shape in zip(self._others, others, *self.specs, strict=True):
            if dtype != tensor.dtype or (shape is not None and shape != tensor.shape):
                return f"tensor {index} was {dtype} {shape} and is {tensor.dtype} {tensor.shape} now"
        return None

    def changed_parameter(self, saved: Sequence[Tensor], filled: Set[int]) -> str | None:
        """Say how a parameter in `saved`, the tensors of a recomputation, was changed since forward; None if none was.

        Tensors of the slots `filled` were not computed. They may be copies of a parameter instead of views.
        """
        versions, parameters = self.versions, self.parameters
        others = list(map(type, saved)).count(Parameter)
        for index, parameter in parameters.items():
            if index >= len(saved):
                break
            tensor = saved[index]
            if tensor is parameter:
                others -= 1
            elif tensor._base is not parameter:
                if index in filled:
                    continue
                return _replaced(tensor)
            if parameter._version != versions[index]:
                return f"a parameter of shape {list(parameter.shape)} has been modified by an inplace operation"
        if others:
            new = (t for i, t in enumerate(saved) if type(t) is Parameter and t is not parameters.get(i))
            return _replaced(next(new))
        for index in self._views:  # a parameter may have taken the tensor's place
            if index < len(saved) and type(saved[index]._base) is Parameter:
                return _replaced(saved[index])
        return None


def _replaced(parameter: Tensor) -> str:
    return f"a parameter of shape {list(parameter.shape)} has been replaced"


def _alias(tensor: Tensor) -> Tensor:
    try:
        return without_memory(tensor)
    except RuntimeError:  # sparse and nested layouts
        return _UNWRITTEN


def _shape(tensor: Tensor) -> torch.Size | None:
    try:
        return tensor.shape
    except RuntimeError:  # nested tensors have none
        return None


class RecomputedLayer(Layer):
    """A layer that is recomputed."""

    sites: TensorSites | None = None  # where it keeps parameters and buffers; found at its first forward
    specs: TensorSpecs | None = None  # of the tensors that autograd saved in its last forward
    uses_streams = False  # whether it computes on several streams
    specs_checked: TensorSpecs | None = None  # the specs with which `uses_streams` was last looked for


class RecomputeError(RuntimeError):
    """A recomputation differs from the forward that it repeats."""


def changed(layer: str, change: str) -> RecomputeError:
    return RecomputeError(
        f"layer {layer} has to be recomputed, but since its forward {change}, so that gradients would be "
        "wrong; change parameters and buffers only when no backward is pending, or use enable_ckpt=False"
    )


def not_the_same(layer: str, how: str) -> RecomputeError:
    return RecomputeError(
        f"recomputing layer {layer} did not save the tensors that its forward saved: {how}; a layer that is "
        "recomputed must do the same each time: look for state that it changes, or randomness of its own; or use enable_ckpt=False"
    )


_NONE: frozenset[int] = frozenset()


class _EnoughRecomputedError(BaseException):
    """Stops a recomputation. It is no Exception, so that a layer that catches those lets it pass."""


class Collector:
    """Collects the tensors of one recomputation, which may stop after the last slot if `may_stop`.

    `began_on` is the accelerator's stream on which forward began; None for a layer on the CPU.
    """

    __slots__ = ("_ambient", "_checks_each", "_count", "_home", "_layer", "filled", "saved")

    def __init__(
        self,
        layer: RecomputedLayer,
        slots: SavedSlots,
        began_on: torch.Stream | None,
        may_stop: bool,
        ambient: AmbientState,
    ) -> None:
        self.saved: list[Tensor] = []
        self.filled: Set[int] = _NONE  # slots whose tensors were not computed
        self._layer = layer
        self._ambient = ambient
        self._home: torch.Stream | None = None
        self._checks_each = False  # see Note [layers on several streams]
        if began_on is not None:
            self._home = torch.accelerator.current_stream(began_on.device)
            layer.uses_streams = layer.uses_streams or self._home != began_on
            self._checks_each = not layer.uses_streams and layer.specs_checked is not slots.specs
            layer.specs_checked = slots.specs
        self._count = len(slots.versions) if may_stop and not layer.uses_streams else sys.maxsize

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with saved_tensors_hooks(self._hook(), _unused):
            try:
                forward(*args, **kwargs)
            except _EnoughRecomputedError:
                return

    def _hook(self) -> Callable[[Tensor], None]:
        # The graph of the saved tensors holds the hook, so the hook must hold no reference to the layer's call.
        saved, count, layer, home, checks_each = self.saved, self._count, self._layer, self._home, self._checks_each

        def collect(tensor: Tensor) -> None:
            saved.append(tensor)
            is_last = len(saved) >= count
            if (is_last or checks_each) and _is_on_one_stream(layer, home) and is_last:
                raise _EnoughRecomputedError

        return collect

    def fill(self, first_slot: int, tensors: list[Tensor]) -> None:
        saved = self.saved
        if first_slot != len(saved):
            self.fail(f"{first_slot} tensors were saved and {len(saved)} are at this point")
        saved.extend(tensors)
        self.filled = self.filled | set(range(first_slot, len(saved)))
        if len(saved) >= self._count and _is_on_one_stream(self._layer, self._home):
            raise _EnoughRecomputedError

    def skip_to(self, random_state: RandomState) -> None:
        self._ambient.skip_to(random_state)

    def fail(self, how: str) -> NoReturn:
        raise not_the_same(self._layer.name, how)

    def end(self) -> torch.Event | None:
        return self._home.record_event() if self._home is not None and self._layer.uses_streams else None


def _is_on_one_stream(layer: RecomputedLayer, home: torch.Stream | None) -> bool:
    """Whether the layer has computed on one stream only, up to now; True on the CPU."""
    if home is None:
        return True
    if torch.accelerator.current_stream(home.device) != home:
        layer.uses_streams = True
    return not layer.uses_streams


def _unused(packed: None) -> Tensor:
    raise RecomputeError(
        "backward has reached a tensor that a layer made while it was recomputed: the layer keeps it in an object outside of its "
        "modules, and a loss was made of it after a backward pass; make that loss before, or use enable_ckpt=False"
    )
