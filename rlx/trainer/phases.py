"""The phases of a step: how the console and the report show them, their calls of the workers, and the memory that these leave."""

from collections.abc import Iterable, Mapping, Sequence
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

OF_STEP = tuple(name for name in PHASES if name not in ("validate", "checkpoint"))
MEMORY_FIGURES = ("gb", "allocated_gb")


def memory_of(usage: Sequence[Mapping[str, float]], phases: Iterable[str] = OF_STEP) -> dict[str, float]:
    """Return the memory in use before and after phases, on the process where it was largest.

    Args:
        usage: of each process, as `Worker.usage` names it.
        phases: skipped unless the workers recorded calls of them since the last report.

    Returns:
        memory/<phase>_before_gb (the previous role is already offloaded) and memory/<phase>_after_gb [10^9 bytes]: all bytes in
        use on the device on CUDA, the process's resident size on CPU. On CUDA also memory/<phase>_before_allocated_gb and
        _after_allocated_gb, the bytes in torch's tensors.
    """
    found = {}
    for phase in phases:
        noted = [call for call in PHASES[phase].calls if f"memory/{call}_after_gb" in usage[0]]
        for moment, call in [("before", noted[0]), ("after", noted[-1])] if noted else []:
            for figure in MEMORY_FIGURES:
                name = f"memory/{call}_{moment}_{figure}"
                if name in usage[0]:
                    found[f"memory/{phase}_{moment}_{figure}"] = max(each[name] for each in usage)
    return found


def memory_on_host(usage: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return memory/host_<user>_gb and memory/host_reserved_gb, offloaded bytes in host memory, of the largest process."""
    names = [name for name in usage[0] if name.startswith("memory/host_")]
    return {name: max(each[name] for each in usage) for name in names}
