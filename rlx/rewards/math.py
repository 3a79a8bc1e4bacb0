"""Score mathematical answers, boxed or plain, with math-verify.

A response can keep math-verify busy for hours, so rlx calls it in reward processes only. math-verify's own timeouts are off,
because they need the main thread and cannot end a computation in C.
"""

import logging
from typing import Any

from math_verify import parse, verify

NO_ANSWERS = {"", "nan", "inf", "-inf", "infinity", "-infinity", "n/a", "none", "null", "true", "false"}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    r"""Return 1.0 if the boxed (else the plain) expression equals the reference, else 0.0.

    Only boxes on the last line with a box count; several boxes on that line form a set. The ground truth is LaTeX or plain text
    without `\boxed`; ValueError if math-verify cannot read it. data_source and extra_info are not used.
    """
    # math-verify takes any word for a product of variables.
    if not isinstance(ground_truth, str | int | float) or str(ground_truth).strip().lower() in NO_ANSWERS:
        raise ValueError(f"ground_truth is {ground_truth!r}, expected an expression or a number")
    gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"ground_truth is {str(ground_truth)!r}, expected an expression that math-verify can read")
    # math-verify would join the boxes of all steps into one set; the answer begins at the last line with a box.
    line_start = solution_str.rfind("\n", 0, max(0, solution_str.rfind("\\boxed"))) + 1
    answer = parse(solution_str[line_start:], parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


# math-verify warns of every expression that it cannot read, and of missing timeouts.
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.ERROR)
compute_score("", "\\boxed{1}", "1")  # loads the rest of the libraries before the first call needs them
