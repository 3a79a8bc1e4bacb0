"""Check whether a configuration can run on a machine; report all faults and warnings at once."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rlx.config.check import declared, rules
from rlx.config.check.rules_machine import MACHINE_RULES
from rlx.config.check.rules_memory import disk_warnings, judge_memory
from rlx.config.compose.command_line import Composed
from rlx.config.faults import Fault
from rlx.config.forecast.decoders import positions_of
from rlx.config.machine import Machine
from rlx.config.schema import NORM_BY_STD
from rlx.config.schema.roles import has_critic, may_save, model_scores_alone, sharded_roles, trained_roles
from rlx.config.schema.tree import as_text
from rlx.config.secrets import without_secrets

RULES = (
    declared.declared_limits_hold,
    declared.declared_needs_are_met,
    declared.list_entries_agree,
    *rules.COMBINATION_RULES,
    *MACHINE_RULES,
)
# Half the distance between two bf16 numbers is at most 2^-8 of them; smaller decays may be rounded away.
LARGEST_BF16_BETA = 1 - 2.0**-8


class Verdict(NamedTuple):
    """Faults forbid the run, warnings do not."""

    faults: tuple[Fault, ...]
    warnings: tuple[str, ...]


def check(composed: Composed, machine: Machine) -> Verdict:
    """Apply every rule. A rule's fault about a key that could not be read is dropped, because that key already has a fault."""
    context, broken = declared.CheckContext(composed.partial, composed.set_keys, machine), composed.broken
    faults = [fault for rule in RULES for fault in rule(context) if broken.isdisjoint(fault.keys)]
    warnings = [*_without_effect(context, broken, composed.repeated), *_surprises(context), *_of_trained_roles(context)]
    if not composed.faults:  # a prediction needs every value
        of_memory, memory_warnings = judge_memory(context)
        faults += of_memory
        warnings += [*disk_warnings(context), *memory_warnings]
    return Verdict((*composed.faults, *faults), tuple(warnings))


def _without_effect(s: declared.CheckContext, broken: frozenset[str], repeated: Mapping[str, str]) -> Iterator[str]:
    found = {key: why for key, why in declared.unused_keys(s).items() if key not in broken}
    unused = {f"{key}={as_text(without_secrets(s.value(key)))}": why for key, why in found.items()}
    unused |= {text: f"{later} comes after it" for text, later in repeated.items()}
    if unused:
        yield "set without effect:" + "".join(f"\n    {text}: {why}" for text, why in unused.items())


def _surprises(s: declared.CheckContext) -> Iterator[str]:
    """Warn of what works, but differs from its paper or from a user's likely intent."""
    actor, algorithm, trainer = s.config.actor_rollout_ref.actor, s.config.algorithm, s.config.trainer
    rollout, mode = s.config.actor_rollout_ref.rollout, actor.policy_loss.loss_mode
    is_of_sequences = mode in ("gspo", "geo_mean", "sapo") and actor.policy_loss.path is None
    if is_of_sequences and actor.loss_agg_mode != "seq-mean-token-mean":
        yield f"{mode} is defined as a mean over sequences: {rules.ACTOR}.loss_agg_mode={actor.loss_agg_mode}, not seq-mean-token-mean"
    if algorithm.use_kl_in_reward and algorithm.needs(NORM_BY_STD) and algorithm.norm_adv_by_std_in_grpo:
        yield (
            f"{algorithm.adv_estimator} divides by the standard deviation of rewards with the KL in them: if a prompt's "
            "scores are equal, differences of the KL count as much as right and wrong for other prompts; use "
            "actor.use_kl_loss, or algorithm.norm_adv_by_std_in_grpo=False"
        )
    control = algorithm.kl_ctrl
    if algorithm.use_kl_in_reward and control.type == "adaptive" and control.kl_coef == 0:
        yield "algorithm.kl_ctrl.kl_coef=0 stays 0 with type=adaptive, which multiplies it: set a first coefficient"
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield f"the gradient of kl_loss_type={actor.kl_loss_type} is 0 on average: use {actor.kl_loss_type}+, k2 or k3"
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield "the KL to the reference counts twice: actor.use_kl_loss and algorithm.use_kl_in_reward are both set"
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric == "acc" and model_scores_alone(s.config):
        yield (
            f"{rules.METRIC}=acc tests whether a score is at least 1, which means little for a reward model: let a function score "
            "too with reward_model.rule_weight"
        )
    if algorithm.filter_groups.enable and trainer.total_training_steps is None:
        yield (
            "with algorithm.filter_groups a step may take several batches of prompts, so the run makes more passes over them "
            f"than trainer.total_epochs={trainer.total_epochs}: set trainer.total_training_steps to choose its end"
        )
    if rollout.name == "vllm" and rollout.dtype == "fp32" and s.on_accelerator:
        yield f"{rules.ROLLOUT}.dtype=fp32: vLLM decodes at a fraction of its speed in bf16"
    if not rollout.calculate_log_probs:
        yield f"the sampler's mismatch with the trainer is not measured: {rules.ROLLOUT}.calculate_log_probs=False"
    if rules.validates_on_other_tasks(s) and not rules.own_function_scores_them(s):
        yield f"{rules.OTHER_TASKS}: {rules.OTHER_TASKS_REMEDY}"
    warmup, steps = trainer.critic_warmup, trainer.total_training_steps
    if has_critic(s.config) and steps is not None and warmup >= steps:
        yield f"the actor never learns: trainer.critic_warmup={warmup} of trainer.total_training_steps={steps} steps"
    if trainer.n_rollout_gpus and not rollout.partial.max_staleness and not trainer.val_only:
        yield (
            f"trainer.n_rollout_gpus={trainer.n_rollout_gpus} with {rules.STALENESS}=0: sampler and trainer take turns; with "
            f"{rules.STALENESS}=1 algorithm.rollout_correction.rollout_is=token they work at the same time"
        )
    if not s.on_accelerator and trainer.processes_per_node > s.machine.cpus:
        own = f" and trainer.n_rollout_gpus={trainer.n_rollout_gpus}" * (trainer.n_rollout_gpus > 0)
        yield f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}{own} processes share {s.machine.cpus} CPU cores: the run will be slow"


def _of_trained_roles(s: declared.CheckContext) -> Iterator[str]:
    """Warn of offloading that does less than it seems to, of long sequences, lost moments, and checkpoints without a model."""
    for role in sharded_roles(s.config):
        if role.model.layer_offload_directory is not None and not role.model.layer_offload:
            yield f"{role.model_key}.layer_offload_directory has no effect without {role.model_key}.layer_offload=True"
    for role in rules.offloading_roles(s):
        options, prefix = rules.offload_options(role.model), f"{role.model_key}.activation_offload"
        if options.save == "attention" and role.model.attn_implementation == "eager":
            yield (
                f"{prefix}.save=attention finds nothing to keep in {role.model_key}.attn_implementation=eager, which is no "
                "fused kernel: its layers are offloaded as with boundary; use sdpa or flash_attention_2"
            )
        if options.max_host_bytes == 0 and not options.uses_disk:
            yield f"{prefix}.max_host_bytes=0 keeps every activation on the device: nothing is offloaded"
    longest, told = s.config.data.max_prompt_length + s.config.data.max_response_length, set()
    for role in trained_roles(s.config):
        known, optim, saved = positions_of(role.model), f"{role.key}.optim", f"{role.key}.checkpoint.save_contents"
        model = role.model.path, known  # actor and critic often share it
        # A table of positions ends there, and rotary embeddings were not trained beyond.
        if known is not None and known < longest and model not in told:
            told.add(model)
            yield (
                f"sequences of up to {longest:,} tokens are longer than the {known:,} positions of the {role.name}'s model "
                "(max_position_embeddings in its config.json): lower data.max_response_length, or stretch its rotary embeddings by "
                f"{role.model_key}.override_config (rope_parameters with rope_type yarn, say)"
            )
        decay = s.value(f"{optim}.betas")[1]
        if s.value(f"{optim}.optimizer") == "_AdamW" and decay > LARGEST_BF16_BETA:  # the moment would never shrink
            yield (
                f"{optim}.optimizer=_AdamW keeps its second moment in bf16, which a decay of {1 - decay:.1%} a step cannot make "
                f"smaller: once gradients shrink, steps are too short. Set {optim}.betas=[0.9,0.99], say"
            )
        if may_save(s.config) and "model" not in (contents := s.value(saved)) and "hf_model" in contents:
            yield f"{saved}={as_text(contents)} has no model: no run can be resumed from these checkpoints"
