"""Score the form of a response, regardless of its contents."""

import re
from typing import Any

FORM_PATTERNS = {
    "tags": r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)+</answer>\s*",
    "hashes": r".*####[ \t]*\S[^\n#]*\s*",
    "boxed": r".*\\boxed\{\s*[^\s}].*\}.*",
}
"""Regular expressions by the names in `reward.format`."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    form: str = "hashes",
) -> float:
    """Return 1.0 if the whole response matches, else 0.0; the other arguments of reward functions are not used.

    The form is a name in FORM_PATTERNS, or a regular expression in which `.` also matches line ends.
    """
    return float(re.fullmatch(FORM_PATTERNS.get(form, form), solution_str, re.DOTALL) is not None)
