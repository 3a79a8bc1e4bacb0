"""Name a reward function in the driver, load it in a reward process, and describe the outcome of a call.

Every reward process starts with this module, so it imports very little.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlx.processes.calls import LONGEST_TEXT, in_short, own_traceback
from rlx.user_code import UserCodeError, load_name, misfit

if TYPE_CHECKING:
    from rlx.config.schema import CustomRewardConfig, RewardConfig

KEY, JUDGE = "custom_reward_function", "rlx.rewards.judge"
SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCHED = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The parameters of a function that scores one sample, and of one that scores a list; all are passed by name."""

LARGEST_SCORE = 3.4e38
"""Scores are stored in fp32."""


@dataclass(frozen=True, eq=False)
class Function:
    """A reward function that a process loads and calls."""

    source: str  # path of a user's Python file, or a module of rlx
    name: str  # of the function in it
    limit_s: float  # longest call [seconds]
    batched: bool = False  # one call scores a list of samples
    options: dict[str, Any] = field(default_factory=dict)  # further arguments by name
    # The process itself interrupts a longer call, and continues [seconds of the processor]; 0: never
    cpu_limit_s: float = 0
    key: str = KEY  # the configuration group of a user's own

    @property
    def is_own(self) -> bool:
        return self.source.endswith(".py")

    @property
    def is_judge(self) -> bool:
        return self.source == JUDGE

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of a sample's arguments, all passed by name."""
        return BATCHED if self.batched else (*SINGLE, "prompt") if self.is_judge else SINGLE

    def load(self) -> Callable[..., Any]:
        """Import the file and return the function. Raises UserCodeError if it cannot be loaded, or called as a reward."""
        if not self.is_own:
            module = importlib.import_module(self.source)
            if self.is_judge:
                part = self.options["part"]
                module.prepare(self.key, part["template"], part["api_key_var"], part["request"])
            return getattr(module, self.name)  # type: ignore[no-any-return]
        function = load_name(self.source, self.name, self.key)
        if not callable(function):
            raise UserCodeError(
                f"{self.key}.name: {self.name!r} in {self.source} is {function!r}, expected a function "
                f"f({', '.join(self.parameters)})"
            )
        own, other = (BATCHED, SINGLE) if self.batched else (SINGLE, BATCHED)
        if taken := [name for name in own if name in self.options]:
            raise UserCodeError(
                f"{self.key}.reward_kwargs: got {', '.join(taken)}, which each sample has; expected further arguments"
            )
        fault = misfit(function, named=(*own, *self.options))
        if fault is not None:
            remedy = f"rename its parameters or add **kwargs; {self.key}.reward_kwargs are {self.options}"
            if misfit(function, named=(*other, *self.options)) is None:
                other_manager = "naive" if self.batched else "batch"
                remedy = f"set reward.reward_manager.name={other_manager}, whose parameters it has"
            raise UserCodeError(
                f"{self.key}: {self.name}{inspect.signature(function)} in {self.source} cannot take the arguments "
                f"{', '.join((*own, *self.options))} ({fault}); {remedy}"
            )
        return function  # type: ignore[no-any-return]


class Part(NamedTuple):
    """A part of the score, which is a weighted sum."""

    name: str  # of its metric; empty: the only function, whose numbers keep their names
    weight: float
    function: Function | None  # None: rlx's own, of the sample's data source


def own_parts(reward: "RewardConfig", custom: "CustomRewardConfig") -> list[Part]:
    """Return the parts that the user configured, none if rlx's own functions score everything."""

    def of_file(path: str, name: str, options: dict[str, Any], key: str) -> Function:
        source, is_batched = str(Path(path).expanduser().absolute()), reward.reward_manager.name == "batch"
        return Function(source, name, reward.timeout_s, is_batched, options, key=key)

    if custom.path is not None:
        return [Part("", 1.0, of_file(custom.path, custom.name, custom.reward_kwargs, KEY))]
    found = []
    for place, part in enumerate(custom.parts):
        function, key = None, f"{KEY}.parts[{place}]"
        if part.path is not None:
            function = of_file(part.path, part.name, part.reward_kwargs, key)
        elif part.model is not None:
            function = Function(JUDGE, "compute_score", reward.timeout_s, options={"part": vars(part)}, key=key)
        found.append(Part(part.label, part.weight, function))
    return found


Numbers = dict[str, float]
Kind = Literal["", "error", "timeout", "crash"]


class Outcome(NamedTuple):
    """The end of a call."""

    # For each sample the numbers reported, including `score`, or a message if the report is wrong
    answers: list[Numbers | str]
    # The reason for no answers: the call raised (or returned no list), took too long, or ended its process
    kind: Kind = ""
    fault: str = ""  # the same reason in words
    traceback: str = ""  # of the error that the call raised


def raised(fault: BaseException, callers: Collection[str] = ()) -> Outcome:
    """Return the outcome of a call that raised; frames of the files `callers` are not in its traceback."""
    what = f"raised {type(fault).__name__}: {fault}"
    return Outcome([], "error", what[:LONGEST_TEXT], own_traceback(fault, callers))


def outcome_of(function: Function, result: Any, samples: int) -> Outcome:
    """Reduce a call's result to numbers; text, lists and objects stay in the process."""
    if not function.batched:
        return Outcome([_numbers(result)])
    if isinstance(result, str | dict) or not hasattr(result, "__len__") or len(result) != samples:
        what = f"returned {in_short(result)}, expected a list of {samples} numbers or dicts, one for each sample"
        return Outcome([], "error", what)
    return Outcome([_numbers(report) for report in result])


def _numbers(result: Any) -> Numbers | str:
    report, numbers = result if isinstance(result, dict) else {"score": result}, Numbers()
    for name, value in report.items():
        # Scalars and arrays of one number, of numpy or torch; this process may have imported neither.
        plain = value.item() if math.prod(getattr(value, "shape", (2,))) == 1 else value
        if isinstance(plain, Real):
            # Names become metrics and columns, which half a surrogate pair could not be written to.
            numbers[str(name).encode("utf-8", "backslashreplace").decode()] = float(plain)
    if abs(numbers.get("score", math.nan)) <= LARGEST_SCORE:
        return numbers
    return f"returned {in_short(result)}, expected a finite number or a dict whose `score` is one (in fp32)"
