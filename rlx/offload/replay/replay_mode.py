"""Operations whose results are kept, so that recomputation answers them instead of running them.

In forward a watch sees each call of attention and of a linear map and what autograd saved in it. Of a call that can be
answered there remains an `CachedOp`: its result, and for each tensor that autograd saved either where in the arguments it
lies or its bytes off the device. In recomputation a `ReplayMode` sees the same calls in the same order; one with an answer
does not run: its slots are filled and its result is handed out.

Which calls leave one is said in `rlx.offload.replay.recorder`: with `save="attention"` attention, the linear maps before it (the q, k
and v projections), the first one behind it (the output projection), and the layer's last linear map, if something behind it
makes recomputation pass through it; with `save="auto"` those that the plan names, and what is kept of these may stay.

Note [what makes an answer right]
The forward of an answered call ran as in plain autograd, gradient mode on, whichever kernel was chosen: what its backward
reads is what it saved (the log-sum-exp of fused attention, its random seed), bit for bit. A linear map is answered only if
everything that autograd saved in it looks at its arguments, whose values recomputation has anyway. Under autocast the casts
of activations are made before the call, so that they are its arguments; those of weights are left to autocast, which
shares them between calls, and are made again. A result that the layer writes to before its forward ends is not answered, for the bytes that left
may be those before or after the write. Random numbers that the call drew are skipped by setting the state behind it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlx.offload.recompute.ambient_state import RandomState
from rlx.offload.replay.cached_op import CachedOp, DeadOp, autocast_dtype
from rlx.offload.replay.dataflow import GETTER, known_name
from rlx.offload.runtime.pytree import map_leaves, tensors_in
from rlx.offload.storage.regions import storage_address

# The functions that are watched, and whether they are attention; attention is added by `register_attention`.
_IS_ATTENTION: dict[Any, bool] = {
    F.linear: False,
    torch.addmm: False,
    torch.mm: False,
    F.scaled_dot_product_attention: True,
}
if hasattr(F, "grouped_mm"):
    _IS_ATTENTION[F.grouped_mm] = False
# Of these, the ones whose arguments autocast casts.
_CAST: frozenset[Any] = frozenset({F.linear, torch.addmm, torch.mm, F.scaled_dot_product_attention})
_WATCHED: set[type] = set()  # autograd Functions whose `apply` looks for a watch
# Where known attention kernels stand that are an autograd Function and thus no torch function: flash-attn 2, 3 and 4.
_FUNCTIONS = {
    "flash_attn.flash_attn_interface": ("FlashAttnFunc", "FlashAttnVarlenFunc"),
    "flash_attn_interface": ("FlashAttnFunc", "FlashAttnVarlenFunc"),
    "flash_attn.cute.interface": ("FlashAttnFunc", "FlashAttnVarlenFunc"),
}
_active = threading.local()


def register_attention(function: Any) -> None:
    """Let `save="attention"` answer calls of an attention kernel of one's own.

    Args:
        function: a function that torch dispatches (`torch.ops.<namespace>.<name>`, a function of `torch.nn.functional`),
            or a subclass of `torch.autograd.Function`, whose `apply` is wrapped once and for all. Its output may be a
            tensor or a tuple with tensors; what it saves for backward must be among arguments and output, or small.

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
        for watched in (packet, *(getattr(packet, name) for name in getattr(packet, "overloads", list)())):
            _IS_ATTENTION[watched] = True
        return
    if function in _WATCHED:
        return
    _WATCHED.add(function)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(function, cls).apply
        watch: OpMode | None = getattr(_active, "watch", None)
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


class OpMode(TorchFunctionMode):
    """Sees the calls of attention and linear maps on this thread; a call inside another one is part of it."""

    sees_all = False  # all other functions as well

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
        is_attention = _IS_ATTENTION.get(function)  # every operation of the layer comes here
        if is_attention is not None:
            return self.run(function, args, kwargs or {}, is_attention)
        if not self.sees_all or self._is_inside or type(function) is GETTER or torch.compiler.is_compiling():
            return function(*args, **kwargs) if kwargs else function(*args)
        return self.run_other(function, args, kwargs or {})

    def run_other(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run or answer what is neither attention nor a linear map; only where `sees_all`."""
        raise NotImplementedError

    def run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        """Run a call or answer it."""
        if self._is_inside or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        self._is_inside = True
        try:
            # What goes into a given tensor autocast leaves alone, and that tensor too.
            if function in _CAST and kwargs.get("out") is None:
                args, kwargs = _cast_activations(args, kwargs)
            return self._run(function, args, kwargs, is_attention)
        finally:
            self._is_inside = False

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """See nothing of a block."""
        was, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = was

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        raise NotImplementedError


def run_as_one_call(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function so that a watch on this thread sees one linear map, its first argument, instead of what is called inside."""
    watch: OpMode | None = getattr(_active, "watch", None)
    return function(*args) if watch is None else watch.run(function, args, {}, is_attention=False)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the calls in a block from a watch on this thread: they are not made when the layer is recomputed."""
    watch: OpMode | None = getattr(_active, "watch", None)
    with contextlib.nullcontext() if watch is None else watch.looking_away():
        yield


class DeadOpNeededError(BaseException):
    """What was to be answered has to run after all, with operations left out that it needs. Recomputation begins anew."""


class ReplayMode(OpMode):
    """Answers calls while a layer is recomputed.

    Args:
        answers: by places, of what does not run again.
        calls: how many calls forward made.
        fill: fills the slots from a given one on; may end the recomputation by an exception.
        set_random_state: sets the state of the random generators.
        fail: raises the error for a forward that is not the same as it was.
        leaves_out: also what nobody reads does not run again.
        poisons: what nobody reads is full of NaN.
    """

    def __init__(
        self,
        answers: Mapping[int, CachedOp | None],
        calls: int,
        fill: Callable[[int, list[Tensor]], None],
        set_random_state: Callable[[RandomState], None],
        fail: Callable[[str], NoReturn],
        leaves_out: bool = False,
        poisons: bool = False,
    ) -> None:
        super().__init__()
        self._answers = answers
        self._calls = calls
        self._next_call, self._next_other = 0, -1
        self._leaves_out, self._poisons = leaves_out, poisons
        self.sees_all = min(answers, default=0) < 0
        self._fill = fill
        self._set_random_state = set_random_state
        self._fail = fail

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        place = self._next_call
        if place >= self._calls:
            self._fail(f"{function} is called once more than in forward")
        self._next_call += 1
        return self._answered(place, function, args, kwargs)

    def run_other(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See `OpMode.run_other`."""
        if known_name(function, kwargs) is None:
            return function(*args, **kwargs)
        place = self._next_other
        self._next_other -= 1
        return self._answered(place, function, args, kwargs)

    def _answered(self, place: int, function: Any, args: Any, kwargs: Any) -> Any:
        answer = self._answers.get(place)
        if answer is None:
            return function(*args, **kwargs)
        if isinstance(answer, DeadOp) and not self._leaves_out:
            return function(*args, **kwargs)
        if not answer.is_whole:
            return self._run_again(function, args, kwargs)
        if answer.function != function:
            self._fail(f"{function} is called where forward called {answer.function}")
        saved = answer.saved(tensors_in((args, kwargs)))
        if saved is None:
            return self._run_again(function, args, kwargs)
        self._fill(answer.first_slot, saved)
        if answer.random_state is not None:
            self._set_random_state(answer.random_state)
        return answer.result(poison=True) if isinstance(answer, DeadOp) and self._poisons else answer.result()

    def _run_again(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self._leaves_out:
            raise DeadOpNeededError  # what it is to work on may be what was left out
        return function(*args, **kwargs)


def _cast_activations(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast arguments as autocast is about to, but for those whose casts it shares."""
    tensors = tensors_in((args, kwargs))
    dtype = autocast_dtype(tensors[0].device.type) if tensors else None
    if dtype is None or not all(map(storage_address, tensors)):
        return args, kwargs

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == torch.float64:
            return leaf
        return leaf if leaf.is_leaf and leaf.requires_grad else leaf.to(dtype)

    return map_leaves(cast, (args, kwargs))  # type: ignore[no-any-return]
