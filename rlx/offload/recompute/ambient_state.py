"""The state around a layer's forward: random generators, autocast, default dtype and device, allowed attention kernels.

A recomputation must see the same state, but runs on autograd's threads, outside of the context managers around forward.

Note [generators of Python and NumPy]
The states of `random` and `numpy.random` are read before and after each forward, and set for a recomputation if they differ. They
are left alone otherwise: a thread that loads data may draw from them at any time, and its numbers must not repeat.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pickle
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import has_torch_function

_SEVERAL_THREADS = (
    "a recomputed layer draws random numbers while another thread runs one: torch has one generator per device, so "
    "that the numbers cannot be repeated. Run the threads one at a time, turn dropout off, or use "
    "enable_ckpt=False"
)
_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)


# The state of the CPU's generator, then of the accelerators', as bytes: bytes compare fast.
RandomState = tuple[bytes, ...]
_latest: RandomState = ()  # layers and steps share this object while nothing is drawn; a state takes 5 KB
# Takes a tenth of the time of Tensor.numpy, and works under modes that accept only tensors of their own.
_bytes_at = ctypes.string_at
_ANYTHING, _CPU = (None,), torch.device("cpu")

# The flags also apply to the CPU's kernels. These functions have no type annotations.
_cuda: Any = torch.backends.cuda
_flash, _mem_efficient = _cuda.flash_sdp_enabled, _cuda.mem_efficient_sdp_enabled
_cudnn, _math = _cuda.cudnn_sdp_enabled, _cuda.math_sdp_enabled
_is_autocast, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_default_dtype = torch.get_default_dtype


# The states of `random` and `numpy.random`; None for NumPy's while it is not imported.
HostStates = tuple[Any, Any]
_latest_python: Any = None  # calls share it while nothing is drawn
_latest_numpy: tuple[bytes, Any] = (b"", None)  # the words of the generator, and its state


def _host_states() -> HostStates:
    global _latest_python
    python = random.getstate()
    if python == _latest_python:
        python = _latest_python
    _latest_python = python
    numpy = sys.modules.get("numpy.random")
    return python, None if numpy is None else _numpy_state(numpy)


def _numpy_state(numpy: Any) -> Any:
    global _latest_numpy
    # The words of a Mersenne twister tell all but whether half of a pair of normal numbers is left, and are read 30 times as fast.
    generator, (latest_words, latest) = numpy.get_bit_generator(), _latest_numpy
    words = _bytes_at(generator.ctypes.state_address, 625 * 4) if type(generator) is numpy.MT19937 else b""
    if words and words == latest_words and not latest["has_gauss"]:
        return latest
    state = numpy.get_state(legacy=False)
    if pickle.dumps(state) == pickle.dumps(latest):  # it holds an array
        state = latest
    _latest_numpy = words, state
    return state


def _set_host_states(states: HostStates) -> None:
    python, numpy = states
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy.random"].set_state(numpy)


class _Sections:
    """Sections of code whose random numbers must be repeatable: forwards, and recomputations of layers that drew numbers.

    A device has one generator for all threads, so each section notes whether another thread ran a section meanwhile. A section may
    end twice: Ctrl-C may interrupt the end, and an open section would forbid random numbers on other threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, set[object]] = {}  # owners of open sections, by thread
        self._last_thread = 0  # the thread that began the last section
        self._switches = 0  # how often another thread than the last one began a section
        self._sets = 0  # how often a generator's state was set; after setting it back, it looks as if nothing was drawn

    def begin(self, owner: object) -> tuple[bool, int, int]:
        thread, running = threading.get_ident(), self._running
        with self._lock:
            if thread != self._last_thread:
                self._last_thread = thread
                self._switches += 1
            running.setdefault(thread, set()).add(owner)
            return len(running) == 1, self._switches, self._sets

    def end(self, owner: object, begun: tuple[bool, int, int]) -> tuple[bool, bool]:
        """End a section; return whether no other thread ran one meanwhile, and whether no state was set meanwhile."""
        was_alone, switches, sets = begun
        thread, running = threading.get_ident(), self._running
        with self._lock:
            mine = running.get(thread, set())
            mine.discard(owner)
            if not mine:
                running.pop(thread, None)
            return was_alone and self._switches == switches, self._sets == sets

    def is_another_thread_inside(self) -> bool:
        with self._lock:
            return any(thread != threading.get_ident() for thread in self._running)

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """Enclose a block that sets the state of generators, and count it."""
        with self._lock:
            self._sets += 1
            yield


_sections = _Sections()
_NOT_BEGUN = (False, 0, 0)


class AmbientState:
    """The state at the start of a layer's forward: the CPU's, and that of accelerators."""

    _section = _NOT_BEGUN
    _random: RandomState = ()
    _is_drawn = True
    _host: HostStates | None = None  # states of the generators of Python and NumPy; None: forward drew from neither

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = tuple(devices)
        self._kinds: tuple[str, ...] = ()
        if self._devices:
            self._kinds = tuple({device.type for device in self._devices if has_autocast(device.type)})
        self._surroundings = _surroundings(self._kinds)

    def begin_forward(self) -> None:
        self._section = _sections.begin(self)
        self._random, self._host = self.random_state(), _host_states()

    def leave_forward(self) -> None:
        """An exception has ended forward, or interrupted its beginning or `end_forward`."""
        _sections.end(self, self._section)

    def end_forward(self) -> None:
        """Forward has ended. Note whether it drew random numbers; RuntimeError if so while another thread ran a section."""
        try:
            is_same = self._random == self.random_state()
            python, numpy = _host_states()
            if self._host is not None and python == self._host[0] and numpy is self._host[1]:
                self._host = None
        finally:
            is_alone, is_unset = _sections.end(self, self._section)
        self._is_drawn = not (is_same and (is_alone or is_unset))
        if (self._is_drawn or self._host is not None) and not is_alone:
            raise RuntimeError(_SEVERAL_THREADS)

    def restored(self) -> contextlib.AbstractContextManager[None] | None:
        """Return a context with the state of forward, which restores the caller's state at its end; None if both are equal."""
        redraws = self._is_drawn or self._may_be_drawn(self._random)
        if not redraws and self._host is None and self._surroundings == _surroundings(self._kinds):
            return None
        return self._restored(redraws)

    def _may_be_drawn(self, state: RandomState) -> bool:
        """Return whether forward may have drawn inside `torch.random.fork_rng`; no other thread's generators must change."""
        return state != self.random_state() and not _sections.is_another_thread_inside()

    @contextlib.contextmanager
    def _restored(self, redraws: bool) -> Iterator[None]:
        dtype, device, kernels, cache_enabled, *autocasts = self._surroundings
        dtype_now, device_now, kernels_now, cache_enabled_now, *autocasts_now = _surroundings(self._kinds)
        with contextlib.ExitStack() as stack:
            for i, kind in enumerate(("cpu", *self._kinds)):
                (enabled, cast_to), now = autocasts[i], autocasts_now[i]
                differs = (enabled, cast_to, cache_enabled) != (*now, cache_enabled_now)
                if differs and (enabled or now[0]):
                    stack.enter_context(torch.autocast(kind, cast_to, enabled=enabled, cache_enabled=cache_enabled))
            if dtype != dtype_now:
                stack.callback(torch.set_default_dtype, dtype_now)
                torch.set_default_dtype(dtype)
            if device != device_now:
                stack.enter_context(device)
            if kernels != kernels_now:
                allowed = [kernel for kernel, is_on in zip(_KERNELS, kernels, strict=True) if is_on]
                stack.enter_context(sdpa_kernel(allowed))
            if redraws:
                stack.enter_context(self._redrawing())
            if self._host is not None:
                stack.callback(_set_host_states, _host_states())
                _set_host_states(self._host)
            yield

    @contextlib.contextmanager
    def _redrawing(self) -> Iterator[None]:
        owner, section = object(), _NOT_BEGUN
        try:
            section = _sections.begin(owner)
            before = self.random_state()
            self._set_random_state(self._random)
            try:
                yield
            finally:
                self._set_random_state(before)
        finally:
            is_alone, _ = _sections.end(owner, section)
        if self._is_drawn and not is_alone:
            raise RuntimeError(_SEVERAL_THREADS)

    def skip_to(self, random_state: RandomState) -> None:
        if self._is_drawn or self._may_be_drawn(random_state):
            self._set_random_state(random_state)

    def random_state(self) -> RandomState:
        global _latest
        state = torch.default_generator.get_state()
        found: RandomState = (_bytes_at(state.data_ptr(), state.nbytes),)
        if self._devices:
            states = [_backend(device.type).get_rng_state(device) for device in self._devices]
            found += tuple([_bytes_at(state.data_ptr(), state.nbytes) for state in states])
        if found == _latest:
            return _latest
        _latest = found
        return found

    def _set_random_state(self, random_state: RandomState) -> None:
        states = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in random_state]
        with _sections.setting():
            torch.default_generator.set_state(states[0])
            for device, state in zip(self._devices, states[1:], strict=True):
                _backend(device.type).set_rng_state(state, device)


def _surroundings(kinds: tuple[str, ...]) -> tuple[Any, ...]:
    return (
        _default_dtype(),
        # Only a mode changes the default device, per thread. An empty tensor is 5 times as fast as torch.get_default_device.
        torch.empty(0).device if has_torch_function(_ANYTHING) else _CPU,
        (_flash(), _mem_efficient(), _cudnn(), _math()),
        torch.is_autocast_cache_enabled(),
        (_is_autocast("cpu"), _autocast_dtype("cpu")),
        *([(_is_autocast(kind), _autocast_dtype(kind)) for kind in kinds] if kinds else ()),
    )


def accelerators_of(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    return tuple(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu and not tensor.is_meta))


@functools.cache
def has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    is_on = has_autocast(device_type) and _is_autocast(device_type)
    return _autocast_dtype(device_type) if is_on else None


@functools.cache
def _backend(device_type: str) -> ModuleType:
    module: ModuleType = torch.get_device_module(device_type)
    return module
