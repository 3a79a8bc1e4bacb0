"""Replacement of a module's forward by an attribute of the instance, and runs with other parameters than its own."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class ForwardOverride:
    """Replaces a module's forward from now on; subclasses define `__call__`, and `_run` for what no compiler should trace.

    `module.__call__` calls it between the module's hooks, so that they run once per call, and FSDP has gathered the parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        with contextlib.suppress(ValueError):  # a forward that torch.jit.trace made has none
            self.__signature__ = inspect.signature(module.forward)
        self.own_forward = vars(module).get("forward")
        self.module = weakref.ref(module)  # the module holds this object
        module.forward = self
        self._run_uncompiled = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def original(self, module: nn.Module) -> Callable[..., Any]:
        if self.own_forward is not None:
            return self.own_forward  # type: ignore[no-any-return]
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Restore the forward, unless the module is gone or another forward has replaced this one."""
        module = self.module()
        if module is None or vars(module).get("forward") is not self:
            return
        if self.own_forward is not None:
            module.forward = self.own_forward
        else:
            del module.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copied module runs its own forward on its own weights.
        module = self.module()
        copied = memo.get(id(module))
        if copied is None:
            raise TypeError("the forward of an enabled module cannot be copied without the module")
        if self.own_forward is not None:
            return copy.deepcopy(self.own_forward, memo)
        return type(copied).forward.__get__(copied)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model with activation offloading or tiling enabled cannot be pickled; call handle.disable() first, or save "
            "its state_dict, which is unchanged"
        )


_LOCK = threading.RLock()


class _Around(nn.Module):
    """Wraps the module, so that `functional_call` replaces its tensors and calls neither its hooks nor its forward."""

    def __init__(self, module: nn.Module, run: Callable[[], None]) -> None:
        super().__init__()
        self.module = module
        self._run = run

    def forward(self) -> None:
        self._run()


def run_with(module: nn.Module, tensors: Mapping[str, Tensor], run: Callable[[], None], *, tied: bool = False) -> None:
    """Call `run` while these tensors, if `tied` also for those tied to them, are registered in the module. Threads take turns."""
    named = {f"module.{name}": tensor for name, tensor in tensors.items()}
    with _LOCK:
        torch.func.functional_call(_Around(module, run), named, (), tie_weights=tied)
