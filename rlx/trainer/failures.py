"""Conversations that failed: what the run says of them, and when it stops because none is left to train on."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.config.schema import EnvironmentConfig
from rlx.data.batch import Batch
from rlx.environments.running import TEMPLATE_REASON, EnvironmentFailed
from rlx.errors import cause_of
from rlx.trainer import conversations
from rlx.trainer.progress import Progress

MOST_SHOWN = 5
"""Tracebacks to show in a run: calls that take too long may end in another line each time."""
FRAME = re.compile(r'^  File ".*', re.MULTILINE)
REMEDIES = {
    "timeout": "make it faster or raise environment.timeout_s",
    "memory": "let it take less memory or raise environment.memory_limit_gb",
    TEMPLATE_REASON: "begin with shorter messages or raise data.max_prompt_length",
}
"""What to do by kind of failure; for others correct the environment."""


class FailedConversations:
    """Tells of failed conversations, batch by batch.

    Args:
        config: names the environment.
        progress: where it tells.
    """

    def __init__(self, config: EnvironmentConfig, progress: Progress):
        self._name, self._progress = config.path or config.name, progress
        self._shown: set[tuple[str, ...]] = set()

    def judge(self, batch: Batch) -> None:
        """Tell how many conversations of a batch failed and why, with the traceback of each place at its first time in the run.

        Raises:
            EnvironmentFailed: no conversation of the batch is left to train on, and environments are to blame.
        """
        text = conversations.failures(batch)
        if not text:
            return
        records = batch.info[conversations.CONVERSATION]
        failed = [record for record in records if record["failed"]]
        if len(failed) == len(records) > 1 and all(map(_leaves_nothing, failed)):
            raise self._stop(text, next((each for each in failed if each["traceback"]), failed[0]))
        self._progress.notice(text)
        for trace in dict.fromkeys(record["traceback"] for record in failed):
            self._show(trace)

    def _stop(self, text: str, shown: Mapping[str, Any]) -> EnvironmentFailed:
        kind = shown["reason"].partition(":")[0]
        remedy = REMEDIES.get(kind, "correct it")
        error = EnvironmentFailed(
            f"environment {self._name}: {text}; {remedy}. A run stops where all conversations of a batch fail, also with "
            "environment.on_failure=end_row"
        )
        error.__cause__ = cause_of(shown["traceback"])
        return error

    def _show(self, trace: str) -> None:
        place = tuple(FRAME.findall(trace))  # not its message, which may differ in each conversation
        if place and place not in self._shown and len(self._shown) < MOST_SHOWN:
            self._shown.add(place)
            self._progress.remark(trace.rstrip())


def _leaves_nothing(record: Mapping[str, Any]) -> bool:
    """Whether the environment failed, or the first prompt did; a template that refuses a later message leaves turns to train on."""
    turns: Sequence[Any] = record["turns"]
    return not record["reason"].startswith(f"{TEMPLATE_REASON}:") or not turns
