"""Score by GSM8K's rule: compare the number after the last `####` with the reference."""

import re
from decimal import Decimal
from typing import Any

SOURCES = ("openai/gsm8k", "rlx/arithmetic")
TAIL_CHARACTERS = 300
"""The answer must be this close to the end, as in verl's rule for GSM8K."""

_NUMBER = r"(?P<minus>-?)[ \t]*\$?[ \t]*(?P<minus_after>-?)(?P<digits>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
# The next characters must not continue the number or an expression: `3/4` and `3+4` do not answer 3.
_ANSWER = re.compile(r"####[ \t]*" + _NUMBER + r"(?![0-9]|[.,][0-9]|[ \t]*[-+*/^=][ \t]*[0-9])")
_WHOLE = re.compile(r"\s*" + _NUMBER + r"\s*%?\.?\s*")


def _value(match: re.Match[str]) -> Decimal:
    size = Decimal(match["digits"].replace(",", ""))
    return -size if match["minus"] or match["minus_after"] else size


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    format_score: float = 0.0,
) -> float:
    """Return 1.0 for the right number, `format_score` for another number after `####`, else 0.0.

    The ground truth is a number, or text that is one ("1,200", "$18"); anything else raises ValueError. data_source and
    extra_info are not used.
    """
    want = _WHOLE.fullmatch(str(ground_truth))
    if want is None:
        raise ValueError(f"ground_truth is {ground_truth!r}, expected a number such as '72' or '1,200'")
    answers = list(_ANSWER.finditer(solution_str[-TAIL_CHARACTERS:]))
    if not answers:
        return 0.0
    return 1.0 if _value(answers[-1]) == _value(want) else format_score
