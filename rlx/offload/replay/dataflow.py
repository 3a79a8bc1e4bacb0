"""What a layer computes from what: which operations need not run again because nobody reads their results.

Recomputation is run for what autograd saves. Where a result is saved, so that it need not be computed, what it was made of may be
needed by nobody any more: with rotated queries the linear map and the rotation before them, with the mean of squares in a norm
the squares. Such an operation is left out: its own slots are filled from its arguments, and it gives memory with nothing in it.

Note [how it is known that nobody reads]
*Watched.* While a layer is measured every torch function it calls is noted, with the results that it was given, found by
their storage. Of those in `_KNOWN` and of linear maps the effect is known: they read their arguments and make a result. Any other may do
anything: what it is given counts as read, unless it makes a view, in which the same result lives on. What autograd saves is
read. So is all there is when a tensor turns up that has a graph and that no function seen has made: something works unseen there.
*Proved.* Before anything is left out, a layer is recomputed twice in one backward, once with NaN in all that is to be left out, and
all that is saved must be the same bit for bit. Until the device has said so all layers of the kind run as they are.
*Held to.* In each later forward the same functions must read the same results in the same order; where they do not, nothing
is left out of that call.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Container, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlx.offload.storage.regions import is_parameter, is_plain, storage_address

logger = logging.getLogger("rlx.offload")

_NAMES = (
    *("add", "sub", "mul", "div", "neg", "pow", "square", "rsqrt", "sqrt", "exp", "mean", "sum", "cat"),
    *("silu", "gelu", "relu", "sigmoid", "tanh", "softplus"),
    *("to", "float", "half", "bfloat16", "double", "type_as"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__", "__pow__"),
)
# Functions of their arguments alone: no random numbers, nothing written, one tensor as the result.
_KNOWN: dict[Any, str] = {
    function: name
    for name in _NAMES
    for function in (getattr(home, name, None) for home in (torch, torch.Tensor, F))
    if function is not None
}
GETTER = type(object().__str__)  # of the getters of what a tensor looks like, and of no function
CALL = "call"  # what a call goes by among readings


def known_name(function: Any, kwargs: Any) -> str | None:
    """The name of a function that may be left out or answered though it is no linear map; None for any other."""
    name = _KNOWN.get(function)
    return name if name is None or not kwargs or "out" not in kwargs else None


class OpNode(NamedTuple):
    """One operation of a layer.

    Args:
        place: among calls, from 0 on; among other operations from -1 downwards (Note [places] in `rlx.offload.replay.layer_policy`).
        reads: steps whose results it was given.
        may_be_left_out: its slots can be filled from its arguments, and it gives a tensor of floating point numbers.
    """

    place: int
    reads: tuple[int, ...]
    may_be_left_out: bool


class Dataflow(NamedTuple):
    """The operations of a layer.

    Args:
        steps: in the order in which they run.
        read: steps whose results autograd saves, or something reads of which more is not known.
        names: of operations that are no calls, in order.
        readings: which function read the result of which place, in order.
    """

    steps: tuple[OpNode, ...]
    read: tuple[int, ...]
    names: tuple[str, ...]
    readings: tuple[tuple[str, int], ...]

    def left_out(self, answered: Collection[int]) -> frozenset[int]:
        """The places of operations whose results nobody reads where those of some places are answered.

        Those behind the last one that is read are not among them: recomputation ends there.
        """
        needed: set[int] = set()
        ways = [*self.read]
        for step in self.steps:
            if not step.may_be_left_out and step.place not in answered:
                ways += step.reads
        while ways:
            index = ways.pop()
            if index not in needed:
                needed.add(index)
                if self.steps[index].place not in answered:
                    ways += self.steps[index].reads
        return frozenset(
            step.place
            for index, step in enumerate(self.steps[: max(needed, default=0)])
            if step.may_be_left_out and index not in needed and step.place not in answered
        )

    def expected(self, places: Collection[int]) -> tuple[tuple[str, int], ...]:
        """What reads the results of some places."""
        return tuple(reading for reading in self.readings if reading[1] in places)


class Trail:
    """Finds out which results are given to whom, by their storage, for as long as they live."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, int]] = {}

    def note(self, tensor: Tensor, number: int) -> None:
        """A tensor is the result of something."""
        storage = tensor.untyped_storage()
        self._made[id(storage)] = weakref.ref(storage), number

    def of(self, tensor: Tensor) -> int | None:
        """Whose result a tensor is, or looks at."""
        storage = tensor.untyped_storage()
        reference, number = self._made.get(id(storage), (None, 0))
        return number if reference is not None and reference() is storage else None


class DataflowRecorder:
    """Writes down the flow of a layer while it is measured.

    Args:
        inputs: addresses of the memory of tensors that the layer is called with.
    """

    def __init__(self, inputs: Container[int]) -> None:
        self._steps: list[OpNode] = []
        self._read: set[int] = set()
        self._names: list[str] = []
        self._readings: list[tuple[str, int]] = []
        self._trail = Trail()
        self._inputs = inputs
        self._is_lost = False

    def step(
        self, place: int, name: str, arguments: Sequence[Tensor], results: Sequence[Tensor], may_be_left_out: bool
    ) -> None:
        """An operation has run; `name` of one that is no call."""
        if place < 0:
            self._names.append(name)
        reads, index = self._readers(name, arguments), len(self._steps)
        here = {storage_address(tensor) for tensor in arguments if is_plain(tensor)}
        is_new = all(is_plain(tensor) and storage_address(tensor) not in here for tensor in results)
        if not is_new:
            self._read.update(reads)  # it gives an argument, or looks at one
        else:
            for tensor in results:
                self._trail.note(tensor, index)
        is_one = len(results) == 1 and results[0].is_floating_point()
        self._steps.append(OpNode(place, tuple(reads), may_be_left_out and is_new and is_one))

    def pass_by(self, function: Any, arguments: Sequence[Tensor], has_written: bool, results: Sequence[Tensor]) -> None:
        """A function that is not known has run."""
        reads = self._readers(getattr(function, "__name__", ""), arguments)
        here = {storage_address(tensor) for tensor in arguments if is_plain(tensor)}
        are_views = bool(results) and all(is_plain(tensor) and storage_address(tensor) in here for tensor in results)
        if has_written or not are_views:
            self._read.update(reads)

    def flow(self, saved: Sequence[Tensor]) -> Dataflow | None:
        """All of it, at the end of the layer; None where more happens than is seen."""
        if self._is_lost:
            return None
        for tensor in saved:
            number = self._trail.of(tensor) if is_plain(tensor) else None
            if number is not None:
                self._read.add(number)
        return Dataflow(tuple(self._steps), tuple(sorted(self._read)), tuple(self._names), tuple(self._readings))

    def _readers(self, name: str, arguments: Sequence[Tensor]) -> list[int]:
        found = []
        for tensor in arguments:
            if not is_plain(tensor) or is_parameter(tensor):
                continue
            number = self._trail.of(tensor)
            if number is not None:
                found.append(number)
                self._readings.append((name, self._steps[number].place))
            elif tensor.grad_fn is not None and storage_address(tensor) not in self._inputs:
                self._is_lost = True
        return found


class DeadOpProof:
    """Whether what a plan leaves out of layers of one kind is read by nobody: found by one of them, once.

    Note [how it is known that nobody reads].
    """

    def __init__(self) -> None:
        self._is_given = False
        self._is_begun = False
        self._verdict: Tensor | None = None
        self._passed: torch.Event | None = None

    @property
    def is_given(self) -> bool:
        """Whether the device has said so; waits for nothing."""
        if self._verdict is not None and (self._passed is None or self._passed.query()):
            self._is_given, self._verdict = bool(self._verdict.item()), None
            if not self._is_given:
                logger.info(
                    "activation offloading: a layer reads results by ways that are not seen; it is recomputed whole, which "
                    "takes longer than planned"
                )
        return self._is_given

    def begin(self) -> bool:
        """Whether the caller is the one to give it."""
        was_begun, self._is_begun = self._is_begun, True
        return not was_begun

    def give_up(self) -> None:
        """It could not be given; somebody else may."""
        self._is_begun = False

    def give(self, poisoned: Sequence[Tensor], whole: Sequence[Tensor]) -> None:
        """Compare the fingerprints of what was saved with poison in what is to be left out, and without."""
        if len(poisoned) != len(whole):
            return
        device = next((tensor.device for tensor in whole if tensor.device.type != "cpu"), torch.device("cpu"))
        same = [(one == other).to(device, non_blocking=True) for one, other in zip(poisoned, whole, strict=True)]
        verdict = torch.stack(same).all() if same else torch.ones((), dtype=torch.bool)
        if verdict.device.type != "cpu":
            here = torch.empty((), dtype=torch.bool, pin_memory=True)
            verdict = here.copy_(verdict, non_blocking=True)
            self._passed = torch.accelerator.current_stream(device).record_event()
        self._verdict = verdict


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of the bits of each plain tensor that is no parameter, a sum: whole numbers, so that it is exact."""
    found = []
    for tensor in tensors:
        if type(tensor) is Tensor and is_plain(tensor):
            numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            bits = numbers.detach().view(_BITS[numbers.element_size()])
            found.append(bits.sum(dtype=torch.int64))
    return found
