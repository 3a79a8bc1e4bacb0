"""`save="attention"`: operations whose results leave the device, so that recomputation answers them instead of running them.

In forward a `Watch` sees each call of attention and of a linear map and what autograd saved in it. Of a call that can be
answered there remains an `Answer`: its result, and for each tensor that autograd saved either where in the arguments it
lies or its bytes off the device. In recomputation a `Replay` sees the same calls in the same order; one with an answer
does not run: its slots are filled and its result is handed out.

Which calls are answered: attention; the linear maps before it (the q, k and v projections) and the first one behind it (the
output projection); and the layer's last linear map, if something behind it makes recomputation pass through it. Results of
the linear maps behind attention are looked at when it is known what comes after them, so only one of them is held.

Note [what makes an answer right]
The forward of an answered call ran as in plain autograd, gradient mode on, whichever kernel was chosen: what its backward
reads is what it saved (the log-sum-exp of fused attention, its random seed), bit for bit. A linear map is answered only if
everything that autograd saved in it looks at its arguments, whose values recomputation has anyway. Under autocast the casts
of activations are made before the call, so that they are its arguments; those of weights are left to autocast, which
shares them between calls, and are made again. A result that the layer writes to before its forward ends is not answered, for the bytes that left
may be those before or after the write. Random numbers that the call drew are skipped by setting the state behind it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from rlx.offload.engine import map_leaves, tensors_in
from rlx.offload.identity import Layout, Probe, is_plain, size_bytes, span_bytes, storage_address
from rlx.offload.stored import Stored

_LINEAR: frozenset[Any] = frozenset(
    {F.linear, torch.addmm, torch.mm} | ({F.grouped_mm} if hasattr(F, "grouped_mm") else set())
)
# Of these, the ones whose arguments autocast casts.
_CAST: frozenset[Any] = frozenset({F.linear, torch.addmm, torch.mm, F.scaled_dot_product_attention})
_ATTENTION: set[Any] = {F.scaled_dot_product_attention}
_WATCHED: set[type] = set()  # autograd Functions whose `apply` looks for a watch
# Where known attention kernels stand that are an autograd Function and thus no torch function: flash-attn 2, 3 and 4.
_FUNCTIONS = {
    "flash_attn.flash_attn_interface": ("FlashAttnFunc", "FlashAttnVarlenFunc"),
    "flash_attn_interface": ("FlashAttnFunc", "FlashAttnVarlenFunc"),
    "flash_attn.cute.interface": ("FlashAttnFunc", "FlashAttnVarlenFunc"),
}
# Attention that saves more than this many times its result beside its arguments is no fused kernel: it saves the scores.
_MAX_SAVED_RATIO = 2.0
# The last linear map is answered if repeating it takes at least this many operations for each byte of its result: on
# current machines a link moves one byte in the time of some thousand operations, and has room left at this point.
MIN_OPERATIONS_PER_BYTE = 1000

_active = threading.local()


def register_attention(function: Any) -> None:
    """Let `save="attention"` answer calls of an attention kernel of one's own.

    Args:
        function: a function that torch dispatches (`torch.ops.<namespace>.<name>`, a function of `torch.nn.functional`),
            or a subclass of `torch.autograd.Function`, whose `apply` is wrapped once and for all. Its outputs may be a tensor or a
            tuple with tensors; what it saves for backward must be among its arguments and outputs, or small.

    Raises:
        ValueError: for anything else.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        packet = getattr(function, "overloadpacket", function)
        if not callable(packet) or type(packet).__name__ == "CustomOpDef":
            raise ValueError(
                f"register_attention: got {function!r}, expected a function that torch dispatches or a subclass of "
                "torch.autograd.Function; a custom operator goes by torch.ops.<namespace>.<name>"
            )
        # A call of an operator is seen as one of its overload, or of the packet of them all.
        _ATTENTION.update([packet, *(getattr(packet, name) for name in getattr(packet, "overloads", list)())])
        return
    if function in _WATCHED:
        return
    _WATCHED.add(function)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(function, cls).apply
        watch: _Watcher | None = getattr(_active, "watch", None)
        return run(*args, **kwargs) if watch is None else watch.run(run, args, kwargs, is_attention=True)

    function.apply = classmethod(apply)  # type: ignore[assignment]


def register_known_attention() -> None:
    """Register the kernels of flash-attn as far as they are imported already."""
    for module, names in _FUNCTIONS.items():
        if module in sys.modules:
            for name in names:
                function = getattr(importlib.import_module(module), name, None)
                if function is not None:
                    register_attention(function)


class Recording(Protocol):
    """What a watch needs of the layer call whose forward it sees."""

    seen: list[Tensor] | None

    @property
    def slot_count(self) -> int:
        """How many tensors autograd has saved so far."""

    def store(self, tensor: Tensor) -> Stored | None:
        """Send a tensor off, or keep it if it is small; None where the host has no room."""

    def random_state(self) -> tuple[Tensor, ...]:
        """The state of the random generators."""


class _FromArgument(NamedTuple):
    """A saved tensor that looks at the storage of an argument; the layout's offset counts from the argument's.

    Or at that of the argument's cast to the layout's dtype.
    """

    argument: int
    layout: Layout

    def of(self, arguments: list[Tensor]) -> Tensor:
        """The tensor, from the arguments of now."""
        argument = arguments[self.argument].detach().to(self.layout.dtype)
        layout = self.layout._replace(offset=self.layout.offset + int(argument.storage_offset()))
        return layout.on(argument.untyped_storage(), 0)


class Answer:
    """What is left of a call: enough to fill its slots and to hand out its result without running it."""

    __slots__ = ("_layouts", "_parameters", "_probes", "_result", "_saved", "first_slot", "function", "random_state")

    def __init__(
        self,
        function: Any,
        first_slot: int,
        arguments: list[Tensor],
        saved: list[_FromArgument | Stored],
        result: Any,
    ) -> None:
        self.function = function
        self.first_slot = first_slot
        self.random_state: tuple[Tensor, ...] | None = None
        self._layouts = tuple(map(Layout.of, arguments))
        self._parameters = [(i, argument) for i, argument in enumerate(arguments) if type(argument) is Parameter]
        self._saved = saved
        self._probes = [Probe(tensor) for tensor in tensors_in(result)]
        self._result: Any = None

    def store_result(self, recording: Recording, result: Any) -> bool:
        """Send the result off; False where the layer has written to it, or the host has no room."""
        has_room = True

        def store(leaf: Any) -> Any:
            nonlocal has_room
            if not isinstance(leaf, Tensor):
                return leaf
            stored = recording.store(leaf)
            has_room = has_room and stored is not None
            return stored

        if not self.is_result_untouched:
            return False
        self._result = map_leaves(store, result)
        return has_room

    @property
    def is_result_untouched(self) -> bool:
        """Whether the layer has not written to the result."""
        return all(probe.is_untouched for probe in self._probes)

    @property
    def is_whole(self) -> bool:
        """Whether what was stored is there as it was."""
        results: list[Stored] = []
        map_leaves(lambda leaf: results.append(leaf) if isinstance(leaf, Stored) else None, self._result)
        saved = (value for value in self._saved if isinstance(value, Stored))
        return all(value.is_whole for value in (*saved, *results))

    def saved(self, arguments: list[Tensor]) -> list[Tensor] | None:
        """What autograd would save, in order; None if the arguments are not what they were."""
        if len(arguments) != len(self._layouts) or any(arguments[i] is not was for i, was in self._parameters):
            return None
        for argument, layout in zip(arguments, self._layouts, strict=True):
            if (argument.shape, argument.stride(), argument.dtype) != (layout.shape, layout.stride, layout.dtype):
                return None
        tensors = []
        for source in self._saved:
            tensors.append(source.tensor().detach() if isinstance(source, Stored) else source.of(arguments))
        return tensors

    def result(self) -> Any:
        """The result, ready for the current stream."""
        return map_leaves(lambda leaf: leaf.tensor() if isinstance(leaf, Stored) else leaf, self._result)


class _Watcher(TorchFunctionMode):
    """Sees the calls of attention and linear maps on this thread; a call inside another one is part of it."""

    def __init__(self) -> None:
        super().__init__()
        self._is_inside = False

    def __enter__(self) -> Any:
        self._outer = getattr(_active, "watch", None)
        _active.watch = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        _active.watch = self._outer
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **(kwargs or {}))
        if function in _LINEAR:
            return self.run(function, args, kwargs or {}, is_attention=False)
        if function in _ATTENTION:
            return self.run(function, args, kwargs or {}, is_attention=True)
        return function(*args, **(kwargs or {}))

    def run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        """Run a call or answer it."""
        if self._is_inside or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        self._is_inside = True
        try:
            args, kwargs = _cast_activations(function, args, kwargs)
            return self._run(function, args, kwargs, is_attention)
        finally:
            self._is_inside = False

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        raise NotImplementedError


class Watch(_Watcher):
    """Keeps answers while a layer's forward runs.

    Args:
        recording: the layer call.
        expected: how many attention calls the layer made when it ran before; 0 where it has not.
    """

    def __init__(self, recording: Recording, expected: int) -> None:
        super().__init__()
        self.answers: list[Answer | None] = []
        self.attention_count = 0
        self.attention_slots: int | None = None  # how many slots there are up to the map behind the last attention
        self.refused: str | None = None
        self._recording = recording
        self._expected = expected
        self._pending: dict[int, tuple[Any, bool]] = {}  # place among the answers -> result, worth it if it comes last
        self._wants_next = False

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        if is_attention:
            for place, (result, _) in self._pending.items():
                self._store(place, result)
            self._pending.clear()
        arguments = tensors_in((args, kwargs))
        versions = _versions(arguments)
        first_slot = self._recording.slot_count
        place = len(self.answers)
        self.answers.append(None)  # also where the call fails and the layer goes on
        seen: list[Tensor] = []
        self._recording.seen = seen
        try:
            result = function(*args, **kwargs)
        finally:
            self._recording.seen = None
        answer = None
        if versions == _versions(arguments):  # a call that writes to its arguments has to run again
            answer = self._answer(function, arguments, first_slot, seen, result, is_attention)
        self.answers[place] = answer
        if is_attention:
            self.attention_count += 1
            if answer is not None:
                answer.random_state = self._recording.random_state()
                self._store(place, result)
        elif self._wants_next:
            self._store(place, result)
            self.attention_slots = self._recording.slot_count
        elif answer is not None:
            if self.attention_count >= max(self._expected, 1):
                self._drop_pending()
            self._pending[place] = map_leaves(_detached, result), _is_worth(function, args, result)
        self._wants_next = is_attention
        return result

    def _answer(
        self,
        function: Any,
        arguments: list[Tensor],
        first_slot: int,
        seen: list[Tensor],
        result: Any,
        is_attention: bool,
    ) -> Answer | None:
        results = tensors_in(result)
        if not results or not all(map(is_plain, (*arguments, *seen, *results))):
            self._refuse(is_attention, "works on subclasses of tensors")
            return None
        if not all(map(storage_address, (*arguments, *results))):
            self._refuse(is_attention, "works on tensors without memory")
            return None
        room = _MAX_SAVED_RATIO * sum(map(size_bytes, results)) + 4096 if is_attention else 0.0
        sources = [_source(tensor, arguments) for tensor in seen]
        if sum(size_bytes(t) for t, source in zip(seen, sources, strict=True) if source is None) > room:
            self._refuse(is_attention, "saves more than a fused kernel of attention does: its scores, or copies")
            return None
        saved: list[_FromArgument | Stored] = []
        for tensor, source in zip(seen, sources, strict=True):
            stored = source or self._recording.store(tensor)
            if stored is None:
                return None
            saved.append(stored)
        return Answer(function, first_slot, arguments, saved, result)

    def _refuse(self, is_attention: bool, why: str) -> None:
        if is_attention:
            self.refused = why

    def end_forward(self) -> None:
        """Close the forward: settle the last linear map, and drop answers whose results were written to."""
        if self._pending and self.attention_count:
            place, (result, is_worth) = next(reversed(self._pending.items()))
            answer = self.answers[place]
            assert answer is not None
            if is_worth and answer.first_slot + len(answer._saved) < self._recording.slot_count:
                self._store(place, result)
                self._pending.pop(place)
        self._drop_pending()
        self.answers = [a if a is not None and a.is_result_untouched else None for a in self.answers]

    def _store(self, place: int, result: Any) -> None:
        answer = self.answers[place]
        if answer is not None and not answer.store_result(self._recording, result):
            self.answers[place] = None

    def _drop_pending(self) -> None:
        for place in self._pending:
            self.answers[place] = None
        self._pending.clear()


class Replay(_Watcher):
    """Answers calls while a layer is recomputed.

    Args:
        answers: one for each call that forward made, None for those that run again.
        fill: fills the slots from a given one on; may end the recomputation by an exception.
        set_random_state: sets the state of the random generators.
        differs: makes the error for a forward that is not the same as it was.
    """

    def __init__(
        self,
        answers: Sequence[Answer | None],
        fill: Callable[[int, list[Tensor]], None],
        set_random_state: Callable[[tuple[Tensor, ...]], None],
        differs: Callable[[str], Exception],
    ) -> None:
        super().__init__()
        self._answers: Iterator[Answer | None] = iter(answers)
        self._fill = fill
        self._set_random_state = set_random_state
        self._differs = differs

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        try:
            answer = next(self._answers)
        except StopIteration:
            raise self._differs(f"{function} is called once more than in forward") from None
        if answer is None or not answer.is_whole:
            return function(*args, **kwargs)
        if answer.function != function:
            raise self._differs(f"{function} is called where forward called {answer.function}")
        saved = answer.saved(tensors_in((args, kwargs)))
        if saved is None:
            return function(*args, **kwargs)
        self._fill(answer.first_slot, saved)
        if answer.random_state is not None:
            self._set_random_state(answer.random_state)
        return answer.result()


def _versions(tensors: list[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _source(tensor: Tensor, arguments: list[Tensor]) -> _FromArgument | None:
    """Where among the arguments of a call a tensor saved in it lies; None if nowhere."""
    layout, (start, stop) = Layout.of(tensor), span_bytes(tensor)
    for index, argument in enumerate(arguments):
        if argument.dtype != tensor.dtype or storage_address(argument) != storage_address(tensor):
            continue
        first, last = span_bytes(argument)  # arguments that share a storage now need not share it in recomputation
        if first <= start and stop <= last:
            return _FromArgument(index, layout._replace(offset=layout.offset - int(argument.storage_offset())))
    # What autocast has cast, once the activations are out of the question.
    cast = [i for i, argument in enumerate(arguments) if _is_shared_cast(argument) and argument.dtype != tensor.dtype]
    if len(cast) == 1 and tensor.numel() == arguments[cast[0]].numel() and _autocast_dtype(tensor) == tensor.dtype:
        return _FromArgument(cast[0], layout)
    return None


def _autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _is_shared_cast(tensor: Tensor) -> bool:
    """Whether autocast casts a tensor once for all calls: the leaves that want a gradient."""
    return tensor.is_leaf and tensor.requires_grad and tensor.dim() > 1


def _cast_activations(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast arguments as autocast is about to, but for those whose casts it shares."""
    if function not in _CAST or not all(map(storage_address, tensors_in((args, kwargs)))):
        return args, kwargs

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == torch.float64:
            return leaf
        dtype = _autocast_dtype(leaf)
        return leaf if dtype is None or (leaf.is_leaf and leaf.requires_grad) else leaf.to(dtype)

    return map_leaves(cast, (args, kwargs))  # type: ignore[no-any-return]


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _is_worth(function: Any, args: Sequence[Any], result: Any) -> bool:
    """Whether repeating a linear map is dearer than bringing its result back: by operations for each byte of it."""
    place = 1 if function is torch.addmm else 0  # behind the bias
    if len(args) <= place or not isinstance(args[place], Tensor) or not isinstance(result, Tensor):
        return False
    return 2 * int(args[place].shape[-1]) >= MIN_OPERATIONS_PER_BYTE * result.element_size()
