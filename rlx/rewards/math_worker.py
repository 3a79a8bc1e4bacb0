"""The process that grades mathematics: one JSON line in, one out, until stdin ends. Started by `rlx.rewards.math`.

Note [how a grading ends in time]: a process alarm with its default action ends this process, even inside a long
computation of the interpreter's own (9**9**9), where a handler written in Python would never run. The parent sees the
end of stdout, counts a timeout, and starts the next process.
"""

import json
import logging
import os
import signal
import sys
from typing import Any


def grade(solution: str, ground_truth: str) -> dict[str, Any]:
    """{"score": 1.0 or 0.0}, or {"error": …} when the ground truth cannot be read as mathematics."""
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    if not gold:
        return {"error": f"ground_truth is {ground_truth!r}, expected an expression that math-verify can read"}
    # math-verify joins the boxes of all steps into one set; the answer is what the last line with a box, or what follows, says.
    line_start = solution.rfind("\n", 0, max(0, solution.rfind("\\boxed"))) + 1
    answer = parse(solution[line_start:], parsing_timeout=None)
    return {"score": float(verify(gold, answer, timeout_seconds=None))}


def main() -> None:
    """Answers requests {"solution", "ground_truth", "limit_s"}; a request that takes longer ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; this ends when stdin does.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library that prints must not break the protocol
    logging.disable(logging.WARNING)  # math-verify warns of every expression it cannot read, and of absent timeouts
    grade("\\boxed{1}", "1")  # loads the libraries before the first alarm is set
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])
        answer = grade(request["solution"], request["ground_truth"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
