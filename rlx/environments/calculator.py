"""A calculator as a tool."""

import ast
import math
import operator
from functools import cache

from rlx.environments.tools import ToolEnvironment, Tools

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
