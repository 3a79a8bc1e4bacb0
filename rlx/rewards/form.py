"""The form of a response: whether it is laid out as asked, whatever it says."""

import re
from typing import Any

FORM_PATTERNS = {
    "tags": r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)+</answer>\s*",
    "hashes": r".*####[ \t]*\S[^\n#]*\s*",
    "boxed": r".*\\boxed\{\s*[^\s}].*\}.*",
}
"""Regular expressions by the names that `reward.format` knows."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    form: str = "hashes",
) -> float:
    """1.0 when the whole response matches, else 0.0.

    Args:
        data_source, ground_truth, extra_info: not used; part of the signature all reward functions share.
        solution_str: the response.
        form: one of FORMS, or a regular expression, in which `.` stands for line ends too.
    """
    return float(re.fullmatch(FORM_PATTERNS.get(form, form), solution_str, re.DOTALL) is not None)
