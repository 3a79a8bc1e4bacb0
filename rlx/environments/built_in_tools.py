"""rlx's own tools: a calculator, and Python in the sandbox of `rlx.environments.sandbox`."""

import ast
import math
import operator
from dataclasses import fields
from functools import cache
from typing import Any

from rlx.environments.sandbox import SandboxLimits, check_isolation, run_python
from rlx.environments.tools import ToolEnvironment, Tools
from rlx.user_code import UserCodeError

LONGEST_EXPRESSION = 200  # characters
MOST_BITS = 4096  # of a whole number
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
Number = int | float


def calc(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, parentheses and + - * / // % **, such as (3+4)*5.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters, expected at most {LONGEST_EXPRESSION}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    value = _value(tree.body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.expr) -> Number:
    """Compute a tree of numbers and operators; it holds no names and calls nothing, so no code runs."""
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return _bounded(value)
        case ast.UnaryOp(sign, operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left, sign, right) if type(sign) in _BINARY:
            first, second = _value(left), _value(right)
            if isinstance(sign, ast.Pow) and abs(second) * math.log2(abs(first) + 1) > MOST_BITS:
                raise ValueError("the result is too large")
            result = _BINARY[type(sign)](first, second)
            if isinstance(result, int | float):  # a root of a negative number is complex
                return _bounded(result)
    raise ValueError("expected numbers, parentheses and + - * / // % ** alone")


def _bounded(value: Number) -> Number:
    if (isinstance(value, int) and value.bit_length() > MOST_BITS) or not math.isfinite(value):
        raise ValueError("the result is too large")
    return value


@cache
def _tools() -> Tools:
    return Tools([calc])


class Calculator(ToolEnvironment):
    """A conversation with a calculator, `calc`. In the format `tags` a call is `<calc>3+4</calc>`."""

    def __init__(self, tool_format: str = "tags"):
        super().__init__(_tools(), tool_format)


def program_limits(kwargs: dict[str, Any]) -> SandboxLimits:
    """Return the limits among the arguments of PythonTool. Raises UserCodeError for other arguments or values."""
    known = {field.name for field in fields(SandboxLimits)}
    unknown = kwargs.keys() - known - {"tool_format"}
    if unknown:
        gone = "; programs run isolated or not at all: remove require_isolation" * ("require_isolation" in unknown)
        raise UserCodeError(
            f"environment.kwargs: got {', '.join(sorted(unknown))}, expected of {', '.join(sorted(known))}{gone}"
        )
    return SandboxLimits(**{name: value for name, value in kwargs.items() if name in known})


class PythonTool(ToolEnvironment):
    """A conversation with the tool `python`, which runs a program and returns what it prints. Each call starts a new process.

    `limits` are those of `rlx.environments.sandbox.SandboxLimits`, by name.
    """

    def __init__(self, tool_format: str = "tags", **limits: Any):
        bounds = SandboxLimits(**limits)

        async def python(code: str) -> str:
            """Run a Python program and return what it prints.

            Args:
                code: The program. It has no network, and begins without what earlier programs have made.
            """
            output, fault = await run_python(code, bounds)
            if fault:
                raise ProgramFailed(f"{fault}\n{output}".rstrip())
            return output

        super().__init__(Tools([python]), tool_format)

    @staticmethod
    def prepare(**kwargs: Any) -> None:
        """Check the arguments and the sandbox once in a process. Raises UserCodeError."""
        check_isolation(program_limits(kwargs))


class ProgramFailed(Exception):
    """The model's program failed; the text has what it printed."""
