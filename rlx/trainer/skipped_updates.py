"""End a run that trains nothing, because its gradients are not finite."""

import math
from collections.abc import Mapping

from rlx.errors import ExplainedError

MOST_SKIPPED = 5
"""Steps in a row without any update, after which a run ends: a single batch may overflow, but not one after the other."""


class UpdatesSkipped(ExplainedError, RuntimeError):
    """No update could be taken, so the run trains nothing."""


class SkippedUpdates:
    """Ends a run whose gradients are not finite. The trainer calls `judge` after each step and `end` after the last one."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._has_updated: set[str] = set()

    def judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count the steps in a row in which a role skipped all its updates.

        Raises:
            UpdatesSkipped: there are MOST_SKIPPED of them.
        """
        for role in ("actor", "critic"):
            norm = metrics.get(f"{role}/grad_norm")  # of the updates that were taken
            if norm is None:
                continue
            if math.isfinite(norm):
                self._has_updated.add(role)
                self._in_a_row[role] = 0
                continue
            self._in_a_row[role] = self._in_a_row.get(role, 0) + 1
            if self._in_a_row[role] == MOST_SKIPPED:
                raise self._error(role, f"all updates of steps {step - MOST_SKIPPED + 1} to {step} were skipped")

    def end(self) -> None:
        """Raise UpdatesSkipped if a role took no update in this run because each was skipped."""
        for role, count in self._in_a_row.items():
            if count and role not in self._has_updated:
                raise self._error(role, f"all updates of the run ({count} steps) were skipped")

    def _error(self, role: str, what: str) -> UpdatesSkipped:
        key = "critic" if role == "critic" else "actor_rollout_ref.actor"
        return UpdatesSkipped(
            f"{role}: {what}, because the gradient's norm was NaN or infinite, so nothing was trained; look for values that are not "
            f"finite in metrics.jsonl, lower {key}.optim.lr, or set {key}.fsdp_config.model_dtype=fp32, then begin at an earlier "
            "checkpoint"
        )
