"""The phases of a step: how the console and the report show them, and which calls of the workers they make."""

from typing import NamedTuple


class StepPhase(NamedTuple):
    """One phase; its name is that of its metrics."""

    label: str  # short, for a row of the console
    color: str  # in the report
    calls: tuple[str, ...] = ()  # of the workers, in their order


PHASES = {
    "rollout": StepPhase("roll", "#2563eb", ("rollout.generate",)),
    "reward": StepPhase("rew", "#93b4f5", ("reward.scores",)),
    "old_log_prob": StepPhase("old", "#f4b942", ("actor.log_probs",)),
    "ref": StepPhase("ref", "#ea7317", ("ref.log_probs", "actor.ref_log_probs")),
    "values": StepPhase("value", "#a78bda", ("critic.values",)),
    "advantages": StepPhase("adv", "#cbd2d9"),
    "update_critic": StepPhase("critic", "#6d3fb0", ("critic.update",)),
    "update_actor": StepPhase("actor", "#16966b", ("actor.update",)),
    "sync": StepPhase("sync", "#8fd3bb", ("rollout.sync",)),
    "validate": StepPhase("val", "#c8324a", ("rollout.generate",)),
    "checkpoint": StepPhase("save", "#52606d", ("actor.begin_save", "critic.begin_save")),
}
"""In the order of a step; the last two follow only some steps."""
