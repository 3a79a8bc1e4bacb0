"""The state around a layer's forward that its recomputation must see again: randomness, autocast, default device,
which kernels attention may use.

Backward runs on autograd's threads, outside of every context manager that was entered around forward.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import has_torch_function

_SEVERAL_THREADS = (
    "a layer that is recomputed draws random numbers while another thread runs one: torch has one generator per device, so "
    "that the numbers cannot be repeated. Let the threads run one after the other, switch dropout off, or use "
    "enable_ckpt=False"
)
_KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


# Of the CPU's generator, then of accelerators. As bytes, for these compare in no time.
RandomState = tuple[bytes, ...]
_latest: RandomState = ()  # mostly the same for all layers and steps that are alive, 5 KB for each that is not
# Takes a tenth of the time of Tensor.numpy, and is possible under modes that take no other tensors than their own.
_bytes_at = ctypes.string_at
_ANYTHING, _CPU = (None,), torch.device("cpu")

# The flags hold for the CPU's kernels as well. These functions carry no types.
_cuda: Any = torch.backends.cuda
_flash, _mem_efficient = _cuda.flash_sdp_enabled, _cuda.mem_efficient_sdp_enabled
_cudnn, _math = _cuda.cudnn_sdp_enabled, _cuda.math_sdp_enabled
_is_autocast, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype


class _Sections:
    """Stretches of code whose random numbers have to be repeatable: forwards of layers, and recomputations of those that drew.

    A device has one generator for all threads. Numbers that two threads draw from it at once interleave, and neither's
    can be repeated; so each section knows whether one of another thread has run in its time. Sections of the same thread
    lie inside each other, and are no matter.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}  # how many, by thread
        self._last_thread = 0  # that began one
        self._switches = 0  # from one thread to another
        self._sets = 0  # of a generator's state, which may look as if nothing had been drawn

    def begin(self) -> tuple[bool, int, int]:
        """Begin a section; returns what `end` takes."""
        thread, running = threading.get_ident(), self._running
        with self._lock:
            if thread != self._last_thread:
                self._last_thread = thread
                self._switches += 1
            mine = running.get(thread, 0)
            running[thread] = mine + 1
            return len(running) == 1, self._switches, self._sets

    def end(self, begun: tuple[bool, int, int]) -> tuple[bool, bool]:
        """End a section; returns whether no other thread has run one meanwhile, and whether no state was set meanwhile."""
        was_alone, switches, sets = begun
        thread, running = threading.get_ident(), self._running
        with self._lock:
            running[thread] -= 1
            if not running[thread]:
                del running[thread]
            return was_alone and self._switches == switches, self._sets == sets

    def is_anyone_elses(self) -> bool:
        """Whether another thread runs one now."""
        with self._lock:
            return any(thread != threading.get_ident() for thread in self._running)

    @contextlib.contextmanager
    def setting(self) -> Iterator[None]:
        """Set the state of generators in a block."""
        with self._lock:
            self._sets += 1
            yield


_sections = _Sections()


class AmbientState:
    """State taken at the start of a layer's forward.

    Args:
        devices: the accelerators that the layer's inputs are on; the CPU's state is always taken.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = tuple(devices)
        self._kinds: tuple[str, ...] = ()
        if self._devices:
            self._kinds = tuple({device.type for device in self._devices if has_autocast(device.type)})
        self._surroundings = _surroundings(self._kinds)
        self._is_drawn = True
        self._section = _sections.begin()
        try:
            self._random = self.random_state()
        except BaseException:
            _sections.end(self._section)
            raise

    def leave_forward(self) -> None:
        """Note that an exception has ended forward."""
        _sections.end(self._section)

    def end_forward(self) -> None:
        """Note that forward has ended, and whether it drew random numbers, as far as can be seen.

        Raises:
            RuntimeError: if it drew while another thread ran a section.
        """
        try:
            is_same = self._random == self.random_state()
        finally:
            is_alone, is_unset = _sections.end(self._section)
        self._is_drawn = not (is_same and (is_alone or is_unset))
        if self._is_drawn and not is_alone:
            raise RuntimeError(_SEVERAL_THREADS)

    def restored(self) -> contextlib.AbstractContextManager[None] | None:
        """Run a block as forward ran; the caller's state comes back after it. None where nothing has to be restored."""
        redraws = self._is_drawn or self._may_be_drawn(self._random)
        if not redraws and self._surroundings == _surroundings(self._kinds):
            return None
        return self._restored(redraws)

    def _may_be_drawn(self, state: RandomState) -> bool:
        """Whether generators must be set to `state` for a forward that drew unseen, within `torch.random.fork_rng`.

        With another thread in a section they are left alone: they would be taken away from that one.
        """
        return state != self.random_state() and not _sections.is_anyone_elses()

    @contextlib.contextmanager
    def _restored(self, redraws: bool) -> Iterator[None]:
        device, kernels, cache_enabled, *autocasts = self._surroundings
        device_now, kernels_now, cache_enabled_now, *autocasts_now = _surroundings(self._kinds)
        with contextlib.ExitStack() as stack:
            for i, kind in enumerate(("cpu", *self._kinds)):
                (enabled, dtype), now = autocasts[i], autocasts_now[i]
                differs = (enabled, dtype, cache_enabled) != (*now, cache_enabled_now)
                if differs and (enabled or now[0]):
                    stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=cache_enabled))
            if device != device_now:
                stack.enter_context(device)
            if kernels != kernels_now:
                allowed = [kernel for kernel, is_on in zip(_KERNELS, kernels, strict=True) if is_on]
                stack.enter_context(sdpa_kernel(allowed))
            if redraws:
                stack.enter_context(self._redrawing())
            yield

    @contextlib.contextmanager
    def _redrawing(self) -> Iterator[None]:
        section = _sections.begin()
        try:
            before = self.random_state()
            self._set_random_state(self._random)
            try:
                yield
            finally:
                self._set_random_state(before)
        finally:
            is_alone, _ = _sections.end(section)
        if self._is_drawn and not is_alone:
            raise RuntimeError(_SEVERAL_THREADS)

    def skip_to(self, random_state: RandomState) -> None:
        """Within `restored`: go on from a random state that forward had."""
        if self._is_drawn or self._may_be_drawn(random_state):
            self._set_random_state(random_state)

    def random_state(self) -> RandomState:
        """The state of the generators on this thread now."""
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
    """Default device, kernels of attention, autocast's cache, then autocast's state on the CPU and on other devices.

    Read twice for each layer and step, hence the plain tuple.
    """
    return (
        # Set by a mode only, thread by thread. An empty tensor takes a fifth of the time of torch.get_default_device.
        torch.empty(0).device if has_torch_function(_ANYTHING) else _CPU,
        (_flash(), _mem_efficient(), _cudnn(), _math()),
        torch.is_autocast_cache_enabled(),
        (_is_autocast("cpu"), _autocast_dtype("cpu")),
        *([(_is_autocast(kind), _autocast_dtype(kind)) for kind in kinds] if kinds else ()),
    )


def accelerators_of(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """The devices of tensors, without the CPU and what has no memory."""
    return tuple(dict.fromkeys(tensor.device for tensor in tensors if not tensor.is_cpu and not tensor.is_meta))


@functools.cache
def has_autocast(device_type: str) -> bool:
    """Whether autocast knows a type of device."""
    return torch.amp.is_autocast_available(device_type)


@functools.cache
def _backend(device_type: str) -> ModuleType:
    module: ModuleType = torch.get_device_module(device_type)
    return module
