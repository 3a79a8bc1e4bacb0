"""The state around a layer's forward that its recomputation must see again: randomness, autocast, default device,
which kernels attention may use.

Backward runs on autograd's threads, outside of every context manager that was entered around forward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_KERNELS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


class Autocast(NamedTuple):
    """Autocast's state for one type of device."""

    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        """The state on this thread."""
        return cls(
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )


class Ambient:
    """State taken at the start of a layer's forward.

    Args:
        devices: the accelerators that the layer's inputs are on; the CPU's state is always taken.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = tuple(devices)
        self._random: tuple[Tensor, ...] | None = self.random_state()
        self._default_device = torch.get_default_device()
        self._attention_kernels = _attention_kernels()
        kinds = {"cpu", *(device.type for device in self._devices)}
        self._autocast = {kind: Autocast.now(kind) for kind in kinds if torch.amp.is_autocast_available(kind)}

    def end_forward(self) -> None:
        """Forget the random state where forward drew no numbers: there is nothing to repeat then."""
        assert self._random is not None
        if all(map(torch.equal, self._random, self.random_state())):
            self._random = None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run a block as forward ran; the caller's state comes back after it, also after an exception."""
        with contextlib.ExitStack() as stack:
            for kind, state in self._autocast.items():
                now = Autocast.now(kind)
                if state != now and (state.enabled or now.enabled):
                    stack.enter_context(
                        torch.autocast(kind, state.dtype, enabled=state.enabled, cache_enabled=state.cache_enabled)
                    )
            if self._default_device != torch.get_default_device():
                stack.enter_context(self._default_device)
            if self._attention_kernels != _attention_kernels():
                allowed = [kernel for kernel, is_on in zip(_KERNELS, self._attention_kernels, strict=True) if is_on]
                stack.enter_context(sdpa_kernel(allowed))
            if self._random is not None:
                stack.callback(self._set_random_state, self.random_state())
                self._set_random_state(self._random)
            yield

    def skip_to(self, random_state: tuple[Tensor, ...]) -> None:
        """Within `restored`: go on from a random state that forward had; nothing to do where it drew no numbers."""
        if self._random is not None:
            self._set_random_state(random_state)

    def random_state(self) -> tuple[Tensor, ...]:
        """The state of the generators on this thread now."""
        states = [_backend(device.type).get_rng_state(device) for device in self._devices]
        return (torch.get_rng_state(), *states)

    def _set_random_state(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            _backend(device.type).set_rng_state(state, device)


def _attention_kernels() -> tuple[bool, ...]:
    """Which of `_KERNELS` may be chosen now; the flags hold for the CPU's kernels as well."""
    cuda: Any = torch.backends.cuda  # whose functions carry no types
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


@functools.cache
def _backend(device_type: str) -> ModuleType:
    module: ModuleType = torch.get_device_module(device_type)
    return module
