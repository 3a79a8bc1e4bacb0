"""Rules about batches, optimizers, sharding and resuming."""

import math
from collections.abc import Iterator

from rlx.config.check.context import CheckContext, Faults
from rlx.config.forecast.decoders import positions_of
from rlx.config.machine import processes
from rlx.config.schema import ARITHMETIC
from rlx.config.schema.roles import (
    ULYSSES,
    has_critic,
    has_environment,
    is_tiny,
    may_save,
    sharded_roles,
    trained_roles,
    validates,
)
from rlx.config.schema.tree import as_text

MICRO_KEYS = (
    ("actor_rollout_ref.actor", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
    ("critic", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz"),
    ("actor_rollout_ref.rollout", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
    ("actor_rollout_ref.ref", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
)
OTHER_TASKS = f"validation is on generated problems, {ARITHMETIC}, not on rows like those of data.train_files"
OTHER_TASKS_REMEDY = "set data.val_files=held_out.jsonl, say, or trainer.val_before_train=False trainer.test_freq=-1"
TYPICAL_WEIGHT = 0.02  # standard deviation of the weights of most models
HALF_DISTANCE = 2.0**-14  # between two bf16 numbers there
# Half the distance between two bf16 numbers is at most 2^-8 of them; smaller decays may be rounded away.
LARGEST_BF16_BETA = 1 - 2.0**-8


# Batches


def tokens_hold_the_longest_row(s: CheckContext) -> Faults:
    """A micro-batch cut by tokens holds at least the longest row, which a group of processes may share."""
    lengths = ("data.max_prompt_length", "data.max_response_length")
    longest = sum(map(s.value, lengths))
    sizes = {role.key: role.sequence_parallel_size for role in sharded_roles(s.config)}
    sizes["actor_rollout_ref.rollout"] = sizes["actor_rollout_ref.actor"]
    for key, rows, flag in MICRO_KEYS:
        tokens, sharing = f"{key}.{rows.replace('micro_batch_size', 'max_token_len')}", sizes.get(key, 1)
        limit = s.value(tokens) * sharing
        if s.value(f"{key}.{flag}") and limit < longest and (key != "critic" or has_critic(s.config)):
            got = f"{limit} tokens; the longest row has {longest} ({' + '.join(lengths)})"
            remedy = f"set {tokens}={-(-longest // sharing)}, or lower {' or '.join(lengths)}"
            what, expected = f"{tokens} is less than one row", f"at least {longest}"
            shared = (f"{key}.{ULYSSES}", f"actor_rollout_ref.actor.{ULYSSES}")  # a null means the actor's
            yield s.fault(what, expected, remedy, tokens, f"{key}.{flag}", *lengths, *shared, got=got)


def context_warnings(s: CheckContext) -> Iterator[str]:
    """Warn of sequences beyond the model's positions: a table ends there, and rotary embeddings were not trained there."""
    data = s.config.data
    longest = data.max_prompt_length + data.max_response_length
    told = set()
    for role in trained_roles(s.config):
        known = positions_of(role.model)
        model = role.model.path, known  # actor and critic often share it
        if known is not None and known < longest and model not in told:
            told.add(model)
            yield (
                f"sequences of up to {longest:,} tokens are longer than the {known:,} positions of the {role.name}'s model "
                "(max_position_embeddings in its config.json): lower data.max_response_length, or stretch its rotary embeddings by "
                f"{role.model_key}.override_config (rope_parameters with rope_type yarn, say)"
            )


def validation_warnings(s: CheckContext) -> Iterator[str]:
    """Warn if a run on the user's rows is validated on generated problems."""
    if _validates_on_other_tasks(s) and not _own_function_scores_it(s):
        yield f"{OTHER_TASKS}: {OTHER_TASKS_REMEDY}"


def own_rewards_fit_the_validation(s: CheckContext) -> Faults:
    """Refuse to score generated problems with a function for other rows."""
    if _validates_on_other_tasks(s) and _own_function_scores_it(s):
        keys = ("data.val_files", "custom_reward_function.path")
        expected = "rows like those of data.train_files"
        yield s.fault(f"{OTHER_TASKS}, scored by a function for your rows", expected, OTHER_TASKS_REMEDY, *keys)


def _validates_on_other_tasks(s: CheckContext) -> bool:
    data = s.config.data
    return validates(s.config) and ARITHMETIC in data.val_files and ARITHMETIC not in data.train_files


def _own_function_scores_it(s: CheckContext) -> bool:
    """Whether the user's function scores all rows, and nobody said that it scores these."""
    custom = s.config.custom_reward_function
    scores_all = custom.path is not None and not custom.data_sources and not has_environment(s.config)
    return scores_all and "data.val_files" not in s.set_keys


# Sampling, optimizer, model


def moving_share(lr: float) -> float:
    """Return the share of bf16 weights of standard deviation 0.02 that a step of `lr` moves, if rounded to nearest.

    AdamW moves a weight by about lr. A bf16 number in [2^e, 2^(e+1)) has a neighbour 2^(e-7) away, so it moves if lr >= 2^(e-8).
    Example: lr=1e-6 moves weights below 2^-11, 1.9 % of them.
    """
    below = 2.0 ** (math.floor(math.log2(lr)) + 9)
    return math.erf(below / (TYPICAL_WEIGHT * math.sqrt(2)))


def updates_survive_rounding(s: CheckContext) -> Faults:
    """A step of bf16 weights without masters is not smaller than half the distance to the next number at a typical weight."""
    for role in trained_roles(s.config):
        lr, masters, lossy = (f"{role.key}.optim.{name}" for name in ("lr", "master_weights", "allow_lossy_updates"))
        rounds_stochastically = s.value(f"{role.key}.optim.optimizer") != "AdamW"
        keeps_fp32 = s.value(masters) or role.model.lora_rank or rounds_stochastically
        is_lossy = role.fsdp.model_dtype == "bf16" and not keeps_fp32
        if is_lossy and not s.value(lossy) and 0 < s.value(lr) < HALF_DISTANCE:
            what = f"bf16 weights lose most updates: one step moves {moving_share(s.value(lr)):.1%} of them, rounding hides the rest"
            remedy = f"set {masters}=True, or {role.fsdp_key}.model_dtype=fp32, or {lossy}=True to train anyway"
            keys = (f"{role.fsdp_key}.model_dtype", masters, lr, lossy)
            yield s.fault(what, f"fp32 masters, or a learning rate of {HALF_DISTANCE:.0e} or more", remedy, *keys)


def moment_warnings(s: CheckContext) -> Iterator[str]:
    """Warn of a second moment in bf16 whose decay per step is rounded away, so that it never shrinks as gradients do."""
    for role in trained_roles(s.config):
        optim = f"{role.key}.optim"
        if s.value(f"{optim}.optimizer") == "_AdamW" and s.value(f"{optim}.betas")[1] > LARGEST_BF16_BETA:
            yield (
                f"{optim}.optimizer=_AdamW keeps its second moment in bf16, which a decay of "
                f"{1 - s.value(f'{optim}.betas')[1]:.1%} a step cannot make smaller: once gradients shrink, steps are too short. Set "
                f"{optim}.betas=[0.9,0.99], say"
            )


# Sharding


def fsdp1_can_do_it(s: CheckContext) -> Faults:
    """The configuration uses nothing that FSDP1 computes wrongly with gradient accumulation."""
    world = processes(s.config)
    for role in sharded_roles(s.config):
        fsdp, key = role.fsdp, role.fsdp_key
        if role.strategy != "fsdp":
            continue
        remedy = f"set {role.strategy_key}=fsdp2"
        if world == 1 and role.trained and role.model.lora_rank > 0:
            rank = f"{role.model_key}.lora_rank"
            got, either = f"{rank}={role.model.lora_rank}, 1 process", f"{remedy}, or {rank}=0"
            yield s.fault("FSDP1 cannot train adapters in a single process", "FSDP2", either, rank, got=got)
        elif fsdp.model_dtype == "bf16" and role.trained and role.model.lora_rank > 0:
            rank, dtype = f"{role.model_key}.lora_rank", f"{key}.model_dtype"
            got, either = f"fp32 adapters ({rank}={role.model.lora_rank}), {dtype}=bf16", f"{remedy}, or {dtype}=fp32"
            yield s.fault("FSDP1 keeps a layer's parameters in one type", "FSDP2", either, dtype, rank, got=got)
        if 0 < fsdp.fsdp_size < world and (fsdp.fsdp_size == 1 or not fsdp.reshards(world)):
            keys = (f"{key}.fsdp_size", f"{key}.reshard_after_forward")
            expected = "groups of 2 or more processes that reshard after forward"
            either = f"{remedy}, or {keys[0]}=-1"
            yield s.fault("FSDP1 cannot replicate these sharding groups", expected, either, *keys)


# Checkpoints and resuming


def checkpoint_warnings(s: CheckContext) -> Iterator[str]:
    """Warn of checkpoints from which no run goes on."""
    for role in trained_roles(s.config) if may_save(s.config) else ():
        key = f"{role.key}.checkpoint.save_contents"
        if "model" not in (contents := s.value(key)) and "hf_model" in contents:
            yield f"{key}={as_text(contents)} has no model: no run can be resumed from these checkpoints"


def validation_has_a_model(s: CheckContext) -> Faults:
    """A run that only validates needs a trained model."""
    if s.config.trainer.val_only and is_tiny(s.config) and s.config.trainer.resume_mode == "disable":
        keys = ("trainer.val_only", "actor_rollout_ref.model.path", "trainer.resume_mode")
        remedy = f"set {keys[1]} to an exported model, or {keys[2]}=auto to validate the newest checkpoint"
        yield s.fault("trainer.val_only has nothing to load", "a trained model", remedy, *keys)


TRAINING_RULES = (
    tokens_hold_the_longest_row,
    updates_survive_rounding,
    fsdp1_can_do_it,
    own_rewards_fit_the_validation,
    validation_has_a_model,
)
