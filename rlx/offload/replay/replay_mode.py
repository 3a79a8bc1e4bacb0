"""Replay: in recomputation cached ops hand out their results instead of running.

In forward a recorder (`recorder.py`) sees each call of attention and of a linear map, and makes a `CachedOp` of those that are wanted.
In recomputation a `ReplayMode` sees the same calls in the same order. A cached op does not run: its slots are filled and its result is
handed out.

Note [when a cached op is right]
* The call ran as in plain autograd, with the kernel that was chosen. Its backward reads exactly the tensors that were saved:
  for fused attention the log-sum-exp and the random seed, bit for bit.
* A linear map is cached only if all tensors saved in it are views of its arguments. Recomputation has those anyway.
* Under autocast the casts of activations are made before the call, so that the casts are its arguments. Casts of weights
  are made again: autocast shares them between calls.
* If the layer writes to a result before its forward ends, the result is not cached: the offloaded bytes may be old or new.
  Nor is a result that `torch.unsafe_chunk` splits, since writes to the parts go unnoticed.
* Random numbers that the call drew are skipped: the generators are set to their state after the call.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlx.offload.recompute.ambient_state import autocast_dtype
from rlx.offload.recompute.saved_slots import Collector
from rlx.offload.replay.cached_op import CachedOp
from rlx.offload.runtime.pytree import map_leaves, tensors_in
from rlx.offload.storage.tensor_bytes import storage_address

# The functions that an OpMode sees, and whether they are attention; `register_attention` adds more.
_IS_ATTENTION: dict[Any, bool] = {
    F.linear: False,
    torch.addmm: False,
    torch.mm: False,
    F.scaled_dot_product_attention: True,
}
if hasattr(F, "grouped_mm"):
    _IS_ATTENTION[F.grouped_mm] = False
# Those of them whose arguments autocast casts.
_CAST: frozenset[Any] = frozenset({F.linear, torch.addmm, torch.mm, F.scaled_dot_product_attention})
# They return parts of a tensor with version counters of their own, so that a write to a part goes unnoticed.
_UNSAFE_SPLITS: frozenset[Any] = frozenset(
    getattr(home, name)
    for home in (torch, Tensor)
    for name in ("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
)
_WRAPPED: set[type] = set()  # autograd Functions whose `apply` asks for the active OpMode
# Modules with attention kernels that are an autograd Function and so no torch function: flash-attn 2, 3 and 4.
_KERNEL_MODULES = {"flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute.interface"}
_active = threading.local()


def register_attention(function: Any) -> None:
    """Let `save="attention"` cache calls of a custom attention kernel.

    Args:
        function: a function that torch dispatches (`torch.ops.<namespace>.<name>`, a function of `torch.nn.functional`), or a
            subclass of `torch.autograd.Function`, whose `apply` is wrapped for the life of the process; else ValueError. It
            returns a tensor or a tuple with tensors. The tensors that it saves must be arguments, outputs or small.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        packet = getattr(function, "overloadpacket", function)
        if not callable(packet) or type(packet).__name__ == "CustomOpDef":
            raise ValueError(
                f"register_attention: got {function!r}, expected a function that torch dispatches or a subclass of "
                "torch.autograd.Function; pass a custom operator as torch.ops.<namespace>.<name>"
            )
        # A call of an operator shows as one of its overload or of the packet of all overloads.
        for seen in (packet, *(getattr(packet, name) for name in getattr(packet, "overloads", list)())):
            _IS_ATTENTION[seen] = True
        return
    show_calls(function, is_attention=True)


def show_calls(function: Any, is_attention: bool) -> None:
    if function in _WRAPPED:
        return
    _WRAPPED.add(function)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(function, cls).apply
        mode: OpMode | None = getattr(_active, "mode", None)
        return run(*args, **kwargs) if mode is None else mode.run(run, args, kwargs, is_attention)

    function.apply = classmethod(apply)


def register_known_attention() -> None:
    for module in _KERNEL_MODULES & sys.modules.keys():
        for name in ("FlashAttnFunc", "FlashAttnVarlenFunc"):
            function = getattr(sys.modules[module], name, None)
            if function is not None:
                register_attention(function)


class OpMode(TorchFunctionMode):
    """Sees the calls of attention and linear maps on this thread. A call inside another one is part of it."""

    def __init__(self) -> None:
        super().__init__()
        self._is_inside = False

    def __enter__(self) -> Any:
        self._outer = getattr(_active, "mode", None)
        _active.mode = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        _active.mode = self._outer
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = _IS_ATTENTION.get(function)  # every operation of the layer comes here
        if is_attention is not None:
            return self.run(function, args, kwargs or {}, is_attention)
        if function in _UNSAFE_SPLITS:
            self.note_unsafe_split(tensors_in((args, kwargs)))
        return function(*args, **kwargs) if kwargs else function(*args)

    def note_unsafe_split(self, arguments: list[Tensor]) -> None:
        """A function of `_UNSAFE_SPLITS` is called."""

    def run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        if self._is_inside or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        self._is_inside = True
        try:
            # Autocast casts no arguments of a call with `out=`.
            if function in _CAST and kwargs.get("out") is None:
                args, kwargs = _cast_activations(args, kwargs)
            return self._run(function, args, kwargs, is_attention)
        finally:
            self._is_inside = False

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        raise NotImplementedError


def run_as_one_call(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function so that an `OpMode` on this thread sees one linear map of its first argument, not the calls inside."""
    mode: OpMode | None = getattr(_active, "mode", None)
    return function(*args) if mode is None else mode.run(function, args, {}, is_attention=False)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the calls in a block from an `OpMode` on this thread: a recomputation of the layer does not make them."""
    mode: OpMode | None = getattr(_active, "mode", None)
    if mode is None:
        yield
        return
    was, mode._is_inside = mode._is_inside, True
    try:
        yield
    finally:
        mode._is_inside = was


class ReplayMode(OpMode):
    """Replays cached ops while a layer is recomputed."""

    def __init__(self, cached_ops: Mapping[int, CachedOp | None], calls: int, recomputation: Collector) -> None:
        super().__init__()
        self._cached_ops = cached_ops
        self._calls = calls
        self._next_call = 0
        self._recomputation = recomputation

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        op = self._next_call
        if op >= self._calls:
            self._recomputation.fail(f"{function} is called once more than in forward")
        self._next_call += 1
        cached_op = self._cached_ops.get(op)
        if cached_op is None or not cached_op.is_whole:
            return function(*args, **kwargs)
        if cached_op.function != function:
            self._recomputation.fail(f"{function} is called where forward called {cached_op.function}")
        saved = cached_op.saved(tensors_in((args, kwargs)))
        if saved is None:  # its arguments have changed
            return function(*args, **kwargs)
        self._recomputation.fill(cached_op.first_slot, saved)
        if cached_op.random_state is not None:
            self._recomputation.skip_to(cached_op.random_state)
        return cached_op.result()


def _cast_activations(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast arguments as autocast is about to, except those whose casts it shares."""
    tensors = tensors_in((args, kwargs))
    dtype = autocast_dtype(tensors[0].device.type) if tensors else None
    if dtype is None or not all(map(storage_address, tensors)):
        return args, kwargs

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == torch.float64:
            return leaf
        return leaf if leaf.is_leaf and leaf.requires_grad else leaf.to(dtype)

    return map_leaves(cast, (args, kwargs))  # type: ignore[no-any-return]
