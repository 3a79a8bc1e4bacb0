"""Mathematical answers, boxed or plain, compared by math-verify in processes of their own.

What a model writes can keep math-verify busy for hours, and its own timeouts work in the main thread only. So each
grading runs in a child process under an alarm: see Note [how a grading ends in time] in `math_worker`. Threads may call
in parallel; each call takes an idle child or starts one.
"""

import json
import os
import queue
import subprocess
import sys
from typing import Any

SOURCES = (
    *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "HuggingFaceH4/aime_2024"),
    *("math", "math_dapo", "math_dapo_reasoning", "aime24", "aime25"),
)
LIMIT_S = 5.0


class _Child:
    """One grading process: it ends when this object, or the parent, does."""

    def __init__(self) -> None:
        # The same import path as ours, however we came by it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
        command = [sys.executable, "-m", "rlx.rewards.math_worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The child's answer; None if it was ended by a signal, its alarm or the system's.

        Raises:
            RuntimeError: it ended in any other way.
        """
        assert self._process.stdin is not None and self._process.stdout is not None, "both pipes were asked for"
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:  # it ended before it read the request
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        if code < 0:
            return None
        raise RuntimeError(f"the grading process ended with exit code {code}; its own message is on stderr")


PARALLEL = min(16, os.cpu_count() or 1)
"""Threads that may usefully call at once."""

_idle: "queue.SimpleQueue[_Child]" = queue.SimpleQueue()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    limit_s: float = LIMIT_S,
) -> dict[str, float]:
    """1.0 when the boxed (else the plain) expression equals the reference, else 0.0.

    Of several boxes the last line's count; several on that line are a set.

    Args:
        data_source: not used; part of the signature all reward functions share.
        solution_str: the response.
        ground_truth: LaTeX or plain text of the expression, without `\\boxed`.
        extra_info: not used.
        limit_s: a grading that takes longer scores 0.0 [seconds].

    Returns:
        `score` and `math_timeout`, 1.0 where the limit ended the grading.

    Raises:
        ValueError: the ground truth cannot be read as mathematics.
        RuntimeError: the grading process cannot be started.
    """
    try:
        child = _idle.get_nowait()
    except queue.Empty:
        child = _Child()
    answer = child.ask({"solution": solution_str, "ground_truth": str(ground_truth), "limit_s": limit_s})
    if answer is None:
        return {"score": 0.0, "math_timeout": 1.0}
    _idle.put(child)
    if "error" in answer:
        raise ValueError(answer["error"])
    return {"score": answer["score"], "math_timeout": 0.0}
