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

ENVIRONMENT_KEY = "environment"
AGENTS = "endpoint"
VERIFIERS = "verifiers"
OWN_NAME = "Environment"
"""The class in `environment.path` if `environment.name` names none."""
BUILT_IN = {
    "endpoint": ("rlx.environments.agent", "Agent"),
    "calculator": ("rlx.environments.built_in_tools", "Calculator"),
    "guessing": ("rlx.environments.guessing", "Guessing"),
    "python": ("rlx.environments.built_in_tools", "PythonTool"),
    "verifiers": ("rlx.environments.verifiers_agent", "Agent"),
}
"""Modules and classes of rlx's own environments, by the name in `environment.name`."""

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
        return self.name in (AGENTS, VERIFIERS)

    @property
    def source(self) -> str:
        return self.path or BUILT_IN.get(self.name, (self.name,))[0]

    def load(self) -> Factory:
        """Import it and return a function that makes one conversation's environment. Raises UserCodeError."""
        if self.has_agents:
            if self.name == VERIFIERS:
                from rlx.environments.verifiers_agent import verifiers_agent

                return verifiers_agent(self.path, self.kwargs)
            from rlx.environments.agent import agent  # takes a second

            return agent(self.path, self.kwargs)
        return self._own() if self.path is not None else self._built_in()

    def _built_in(self) -> Factory:
        if self.name not in BUILT_IN:
            remedy = did_you_mean(
                self.name, sorted(BUILT_IN), f"choose one, or set {ENVIRONMENT_KEY}.path to a file with your own"
            )
            raise UserCodeError(
                f"{ENVIRONMENT_KEY}.name: got {self.name!r}, expected one of {sorted(BUILT_IN)}; {remedy}"
            )
        module, name = BUILT_IN[self.name]
        made = getattr(importlib.import_module(module), name)
        # Their calls have the run's format; an environment of a user's own chooses its own.
        takes_format = "tool_format" in inspect.signature(made).parameters
        kwargs = {"tool_format": self.tool_format, **self.kwargs} if takes_format else self.kwargs
        factory = self._bound(made, kwargs)
        if hasattr(made, "prepare"):
            made.prepare(**kwargs)
        return factory

    def _own(self) -> Factory:
        found = load_name(self.path or "", self.name, ENVIRONMENT_KEY)
        functions = [found] if inspect.isfunction(found) else found
        if isinstance(functions, list | tuple) and functions and all(map(callable, functions)):
            from rlx.environments.tools import ToolEnvironment, Tools

            if self.kwargs:
                raise UserCodeError(
                    f"{ENVIRONMENT_KEY}.kwargs: got {self.kwargs}, expected none, because {self.name!r} are functions"
                )
            return partial(ToolEnvironment, Tools(functions), self.tool_format)
        methods = {method: getattr(found, method, None) for method in ("reset", "step")}
        missing = [name for name, method in methods.items() if not callable(method)]
        if not inspect.isclass(found) or missing:
            is_class = f"a class without {' and '.join(missing)}"
            got = is_class if inspect.isclass(found) else repr(found)
            raise UserCodeError(
                f"{ENVIRONMENT_KEY}.name: {self.name!r} in {self.path} is {got}, expected a class with reset(row) and step(turn), or a list "
                "of functions that are tools"
            )
        for method in filter(None, methods.values()):
            fault = misfit(method, positional=("self", "argument"))
            if fault is not None:
                raise UserCodeError(
                    f"{ENVIRONMENT_KEY}.name: {self.name}.{method.__name__}{inspect.signature(method)} in {self.path} cannot be called with one "
                    f"argument ({fault}); expected reset(self, row) and step(self, turn)"
                )
        return self._bound(found, self.kwargs)

    def _bound(self, made: Callable[..., Environment], kwargs: dict[str, Any]) -> Factory:
        fault = misfit(made, named=tuple(kwargs))
        if fault is not None:
            raise UserCodeError(
                f"{ENVIRONMENT_KEY}.kwargs: {self.name}{inspect.signature(made)} cannot take {kwargs} ({fault}); correct the arguments"
            )
        return partial(made, **kwargs)


def environment_spec(config: "PPOConfig") -> EnvironmentSpec:
    own, turns = config.environment, config.actor_rollout_ref.rollout.multi_turn
    return EnvironmentSpec(own.name or OWN_NAME, own.path, own.kwargs, own.timeout_s, own.address, turns.format)
