"""What stands in for a module's forward, as an attribute of the instance."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class ForwardOverride:
    """Stands in for a module's forward; subclasses say in `__call__` what they do instead.

    It is entered inside `module.__call__`, after the module's own pre-hooks and before its hooks. So hooks run once a
    call, and under FSDP the parameters are gathered when it runs, in forward and again when backward comes to the module.

    Args:
        module: whose forward it takes the place of, from now on.
    """

    def __init__(self, module: nn.Module) -> None:
        self.__signature__ = inspect.signature(module.forward)
        self.own_forward = vars(module).get("forward")
        self.module = weakref.ref(module)  # the module holds this object
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's callers get."""
        raise NotImplementedError

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """The forward that this object stands in for, bound to a module."""
        if self.own_forward is not None:
            return self.own_forward  # type: ignore[no-any-return]
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Put the forward back, unless the module is gone or somebody else has taken this object's place."""
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
