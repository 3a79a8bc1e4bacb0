"""Mathematical answers, boxed or plain, compared by math-verify.

What a model writes can keep math-verify busy for hours, so rlx calls this in reward processes only; math-verify's own
timeouts, which need the main thread and end no computation in C, are switched off.
"""

import logging
from typing import Any

from math_verify import parse, verify


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 when the boxed (else the plain) expression equals the reference, else 0.0.

    Of several boxes the last line's count; several on that line are a set.

    Args:
        data_source: not used; part of the signature all reward functions share.
        solution_str: the response.
        ground_truth: LaTeX or plain text of the expression, without `\\boxed`.
        extra_info: not used.

    Raises:
        ValueError: the ground truth cannot be read as mathematics.
    """
    gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"ground_truth is {str(ground_truth)!r}, expected an expression that math-verify can read")
    # math-verify joins the boxes of all steps into one set; the answer is what the last line with a box, or what follows, says.
    line_start = solution_str.rfind("\n", 0, max(0, solution_str.rfind("\\boxed"))) + 1
    answer = parse(solution_str[line_start:], parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


# It warns of every expression that it cannot read, and of absent timeouts.
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.ERROR)
compute_score("", "\\boxed{1}", "1")  # loads the rest of the libraries, which the first call need not wait for then
