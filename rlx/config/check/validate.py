"""Check whether a configuration can run on a machine; report all faults and warnings at once."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rlx.config.check.context import CheckContext
from rlx.config.check.declared import declared_limits_hold, declared_needs_are_met, unused_keys
from rlx.config.check.rules_algorithm import ALGORITHM_RULES, algorithm_warnings
from rlx.config.check.rules_correction import CORRECTION_RULES
from rlx.config.check.rules_machine import MACHINE_RULES
from rlx.config.check.rules_memory import memory_suffices, memory_warnings
from rlx.config.check.rules_offload import OFFLOAD_RULES, disk_warnings, offload_warnings
from rlx.config.check.rules_reward import REWARD_RULES
from rlx.config.check.rules_rollout import ROLLOUT_RULES, rollout_warnings
from rlx.config.check.rules_training import (
    TRAINING_RULES,
    checkpoint_warnings,
    context_warnings,
    moment_warnings,
    validation_warnings,
)
from rlx.config.compose.command_line import Composed
from rlx.config.faults import Fault
from rlx.config.machine import Machine, on_accelerator
from rlx.config.schema.roles import has_critic
from rlx.config.schema.tree import as_text
from rlx.config.secrets import without_secrets

RULES = (
    *(
        declared_limits_hold,
        declared_needs_are_met,
        *TRAINING_RULES,
        *ALGORITHM_RULES,
        *CORRECTION_RULES,
        *OFFLOAD_RULES,
    ),
    *(*ROLLOUT_RULES, *REWARD_RULES, *MACHINE_RULES),
)


class Verdict(NamedTuple):
    """Faults forbid the run, warnings do not."""

    faults: tuple[Fault, ...]
    warnings: tuple[str, ...]


def check(composed: Composed, machine: Machine, has_memory: bool = True) -> Verdict:
    """Apply every rule. A rule's fault about a key that could not be read is dropped, because that key already has a fault.

    Without `has_memory` the run is meant for another machine, so nothing is said of the memory of this one.
    """
    context, broken = CheckContext(composed.partial, composed.set_keys, machine), composed.broken
    faults = [fault for rule in RULES for fault in rule(context) if broken.isdisjoint(fault.keys)]
    warnings = [*_warnings(context, broken, composed.repeated)]
    if has_memory and not composed.faults:
        # A prediction needs every value.
        faults += memory_suffices(context)
        warnings += [*disk_warnings(context), *memory_warnings(context)]
    return Verdict((*composed.faults, *faults), tuple(warnings))


def _warnings(s: CheckContext, broken: frozenset[str], repeated: Mapping[str, str]) -> Iterator[str]:
    unused = {
        f"{key}={as_text(without_secrets(s.value(key)))}": why
        for key, why in unused_keys(s).items()
        if key not in broken
    }
    unused |= {text: f"{later} comes after it" for text, later in repeated.items()}
    if unused:
        yield "set without effect:" + "".join(f"\n    {text}: {why}" for text, why in unused.items())
    yield from algorithm_warnings(s)
    yield from offload_warnings(s)
    yield from rollout_warnings(s)
    yield from context_warnings(s)
    yield from moment_warnings(s)
    yield from checkpoint_warnings(s)
    yield from validation_warnings(s)
    if not s.config.actor_rollout_ref.rollout.calculate_log_probs:
        yield "the sampler's mismatch with the trainer is not measured: actor_rollout_ref.rollout.calculate_log_probs=False"
    if s.config.actor_rollout_ref.actor.use_kl_loss and s.config.algorithm.use_kl_in_reward:
        yield "the KL to the reference counts twice: actor.use_kl_loss and algorithm.use_kl_in_reward are both set"
    warmup, steps = s.config.trainer.critic_warmup, s.config.trainer.total_training_steps
    if has_critic(s.config) and steps is not None and warmup >= steps:
        yield f"the actor never learns: trainer.critic_warmup={warmup} of trainer.total_training_steps={steps} steps"
    per_machine = s.config.trainer.n_gpus_per_node
    if not on_accelerator(s.config, s.machine) and per_machine > s.machine.cpus:
        yield f"trainer.n_gpus_per_node={per_machine} processes share {s.machine.cpus} CPU cores: the run will be slow"
