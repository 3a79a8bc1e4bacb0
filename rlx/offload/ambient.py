"""The state around a layer's forward that its recomputation must see again: randomness, autocast, default device,
which kernels attention may use.

Backward runs on autograd's threads, outside of every context manager that was entered around forward.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


class _Drawing:
    """Who draws random numbers in this process: a device has one generator for all threads.

    Forwards that draw from it at once interleave, and neither's numbers can be repeated.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.forwards = 0  # that are running
        self.changes = 0  # of a generator: by a forward that drew, or by a recomputation


_drawing = _Drawing()


class Ambient:
    """State taken at the start of a layer's forward.

    Args:
        devices: the accelerators that the layer's inputs are on; the CPU's state is always taken.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = tuple(devices)
        self._kinds = tuple({device.type for device in self._devices if has_autocast(device.type)})
        self._surroundings = _surroundings(self._kinds)
        with _drawing.lock:
            _drawing.forwards += 1
            self._is_alone = _drawing.forwards == 1
            self._changes = _drawing.changes
        self._random: tuple[Tensor, ...] | None = self.random_state()

    def leave_forward(self) -> None:
        """Note that forward has ended, also by an exception."""
        with _drawing.lock:
            self._is_alone = self._is_alone and _drawing.forwards == 1
            _drawing.forwards -= 1

    def end_forward(self) -> None:
        """Forget the random state where forward drew no numbers: there is nothing to repeat then.

        Raises:
            RuntimeError: if it drew while another thread did.
        """
        assert self._random is not None
        if all(map(_is_same, self._random, self.random_state())):
            self._random = None
            return
        with _drawing.lock:
            is_alone = self._is_alone and self._changes == _drawing.changes
            _drawing.changes += 1
        if not is_alone:
            raise RuntimeError(_SEVERAL_THREADS)

    def restored(self) -> contextlib.AbstractContextManager[None]:
        """Run a block as forward ran; the caller's state comes back after it, also after an exception."""
        if self._random is None and self._surroundings == _surroundings(self._kinds):
            return contextlib.nullcontext()
        return self._restored()

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
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
            if self._random is not None:
                stack.callback(self._set_random_state, self.random_state())
                self._set_random_state(self._random)
            yield
            if self._random is not None and _drawing.forwards:
                raise RuntimeError(_SEVERAL_THREADS)

    def skip_to(self, random_state: tuple[Tensor, ...]) -> None:
        """Within `restored`: go on from a random state that forward had; nothing to do where it drew no numbers."""
        if self._random is not None:
            self._set_random_state(random_state)

    def random_state(self) -> tuple[Tensor, ...]:
        """The state of the generators on this thread now."""
        states = [_backend(device.type).get_rng_state(device) for device in self._devices]
        return (torch.default_generator.get_state(), *states)

    def _set_random_state(self, states: tuple[Tensor, ...]) -> None:
        with _drawing.lock:
            _drawing.changes += 1
        torch.default_generator.set_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            _backend(device.type).set_rng_state(state, device)


def _surroundings(kinds: tuple[str, ...]) -> tuple[Any, ...]:
    """Default device, kernels of attention, autocast's cache, then autocast's state on the CPU and on other devices.

    Read twice for each layer and step, hence the plain tuple.
    """
    cuda: Any = torch.backends.cuda  # whose functions carry no types; the flags hold for the CPU's kernels as well
    return (
        torch.empty(0).device,  # a fifth of the time of torch.get_default_device
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled(), cuda.math_sdp_enabled()),
        torch.is_autocast_cache_enabled(),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        *[(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
    )


def _is_same(state: Tensor, other: Tensor) -> bool:
    try:
        return torch.equal(state, other)
    except AssertionError:  # under a mode that takes no other tensors than its own, such as FakeTensorMode
        return False


@functools.cache
def has_autocast(device_type: str) -> bool:
    """Whether autocast knows a type of device."""
    return torch.amp.is_autocast_available(device_type)


@functools.cache
def _backend(device_type: str) -> ModuleType:
    module: ModuleType = torch.get_device_module(device_type)
    return module
