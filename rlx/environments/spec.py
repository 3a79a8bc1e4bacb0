"""Name the configured environment, and load it in an environment process. Every such process loads this module: it imports little."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rlx.environments.protocol import Environment
from rlx.errors import did_you_mean
from rlx.user_code import UserCodeError, load_name, misfit

if TYPE_CHECKING:
    from rlx.config.schema import PPOConfig

BUILT_IN = {
    "endpoint": ("rlx.environments.agent", "agent"),
    "calculator": ("rlx.environments.built_in_tools", "Calculator"),
    "guessing": ("rlx.environments.guessing", "Guessing"),
    "python": ("rlx.environments.built_in_tools", "PythonTool"),
    "verifiers": ("rlx.environments.verifiers_agent", "verifiers_agent"),
}
"""Modules and classes of rlx's own environments, by the name in `environment.name`; of agents what makes their class."""

Factory = Callable[[], Environment]


@dataclass(frozen=True, eq=False)
class EnvironmentSpec:
    """An environment that a process loads."""

    # One of BUILT_IN; or with `path` the name there of a class, a function that is a tool, or a list of such functions
    name: str
    path: str | None = None  # a Python file; None: rlx's own
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the class by name, as JSON has them
    limit_s: float = 60.0  # longest `reset` or `step` [seconds]
    address: str = "loopback"  # where agents call the policy: there, or at the address of the node
    tool_format: str = "tags"  # how the model writes calls, of `rlx.environments.tool_calls.FORMATS`

    @property
    def has_agents(self) -> bool:
        """Whether samples are agents that call the policy's address."""
        return self.name in ("endpoint", "verifiers")

    @property
    def source(self) -> str:
        return self.path or BUILT_IN.get(self.name, (self.name,))[0]

    def load(self) -> Factory:
        """Import it and return a function that makes one conversation's environment. Raises UserCodeError."""
        if self.path is not None and not self.has_agents:
            return self._own()
        if self.name not in BUILT_IN:
            known = sorted(BUILT_IN)
            remedy = did_you_mean(self.name, known, "choose one, or set environment.path to a file with your own")
            raise UserCodeError(f"environment.name: got {self.name!r}, expected one of {known}; {remedy}")
        module, name = BUILT_IN[self.name]
        made = getattr(importlib.import_module(module), name)
        if self.has_agents:
            return made(self.path, self.kwargs)
        # Their calls have the run's format; an environment of a user's own chooses its own.
        takes_format = "tool_format" in inspect.signature(made).parameters
        kwargs = {"tool_format": self.tool_format, **self.kwargs} if takes_format else self.kwargs
        factory = self._bound(made, kwargs)
        if hasattr(made, "prepare"):
            made.prepare(**kwargs)
        return factory

    def _own(self) -> Factory:
        found = load_name(self.path or "", self.name, "environment")
        functions = [found] if inspect.isfunction(found) else found
        if isinstance(functions, list | tuple) and functions and all(map(callable, functions)):
            from rlx.environments.tools import ToolEnvironment, Tools

            if self.kwargs:
                raise UserCodeError(
                    f"environment.kwargs: got {self.kwargs}, expected none, because {self.name!r} are functions"
                )
            return partial(ToolEnvironment, Tools(functions), self.tool_format)
        methods = {method: getattr(found, method, None) for method in ("reset", "step")}
        missing = [name for name, method in methods.items() if not callable(method)]
        if not inspect.isclass(found) or missing:
            is_class = f"a class without {' and '.join(missing)}"
            got = is_class if inspect.isclass(found) else repr(found)
            raise UserCodeError(
                f"environment.name: {self.name!r} in {self.path} is {got}, expected a class with reset(row) and step(turn), or a list "
                "of functions that are tools"
            )
        for method in filter(None, methods.values()):
            fault = misfit(method, positional=("self", "argument"))
            if fault is not None:
                raise UserCodeError(
                    f"environment.name: {self.name}.{method.__name__}{inspect.signature(method)} in {self.path} cannot be called with one "
                    f"argument ({fault}); expected reset(self, row) and step(self, turn)"
                )
        return self._bound(found, self.kwargs)

    def _bound(self, made: Callable[..., Environment], kwargs: dict[str, Any]) -> Factory:
        fault = misfit(made, named=tuple(kwargs))
        if fault is not None:
            raise UserCodeError(
                f"environment.kwargs: {self.name}{inspect.signature(made)} cannot take {kwargs} ({fault}); correct the arguments"
            )
        return partial(made, **kwargs)


def environment_spec(config: "PPOConfig") -> EnvironmentSpec:
    own, turns = config.environment, config.actor_rollout_ref.rollout.multi_turn
    return EnvironmentSpec(own.name or "Environment", own.path, own.kwargs, own.timeout_s, own.address, turns.format)
