"""Rules about batches, optimizers, sharding and resuming."""

import math
from collections.abc import Iterator

from rlx.config.check.context import CheckContext, Faults
from rlx.config.forecast.decoders import positions_of
from rlx.config.machine import processes
from rlx.config.schema import ARITHMETIC
from rlx.config.schema.roles import (
    ULYSSES,
    ModelRole,
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


def micro_batch_has_a_size(s: CheckContext) -> Faults:
    """Micro-batches are cut by samples or by tokens; tokens win. Only the actor must choose; the other roles follow it."""
    key, rows, flag = MICRO_KEYS[0]
    keys = (f"{key}.{rows}", f"{key}.{flag}")
    if not s.value(keys[1]) and s.value(keys[0]) is None:
        remedy = f"set {keys[0]}=4, say, or {keys[1]}=True"
        yield s.fault(f"{key} sets no way of cutting micro-batches", "one of the two", remedy, *keys)


def shared_sequences_are_packed(s: CheckContext) -> Faults:
    """Processes that share sequences pack them. The model's heads are checked when it is loaded."""
    for role in sharded_roles(s.config):
        key = f"{role.key}.{ULYSSES}"
        if role.sequence_parallel_size > 1:
            yield from _is_packed(s, role, key, f"{key} shares packed sequences, in rlx's own attention")


def prefixes_are_shared_in_packed_rows(s: CheckContext) -> Faults:
    """A prompt is computed once for several responses in rlx's own attention over packed rows."""
    for role in sharded_roles(s.config):
        key = f"{role.model_key}.use_shared_prefix"
        if role.model.use_shared_prefix is True:
            what = f"{key}=True computes prompts once in packed rows, in rlx's own attention"
            yield from _is_packed(s, role, key, what)


def _is_packed(s: CheckContext, role: ModelRole, key: str, what: str) -> Faults:
    """A role's rows are packed and go through rlx's own attention, as the key needs."""
    if not (role.model.use_remove_padding and role.model.attn_implementation == "sdpa"):
        padding, kernel = f"{role.model_key}.use_remove_padding", f"{role.model_key}.attn_implementation"
        got = f"{padding}={role.model.use_remove_padding}, {kernel}={role.model.attn_implementation}"
        expected, remedy = "use_remove_padding=True and sdpa", f"set {padding}=True and {kernel}=sdpa"
        yield s.fault(what, expected, remedy, padding, kernel, key, got=got)


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


def validation_samples_at_a_temperature(s: CheckContext) -> Faults:
    """Sampling needs a temperature above 0."""
    val, key = s.config.actor_rollout_ref.rollout.val_kwargs, "actor_rollout_ref.rollout.val_kwargs"
    if val.do_sample and val.temperature == 0:
        keys = (f"{key}.do_sample", f"{key}.temperature")
        remedy = f"set {keys[1]}=1.0, say, or {keys[0]}=False for greedy validation"
        yield s.fault("validation samples at temperature 0", "> 0", remedy, *keys)


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


def torchao_can_do_it(s: CheckContext) -> Faults:
    """torchao's optimizers step bf16 weights on the device; 8-bit moments fit neither FSDP2's DTensors nor a checkpoint."""
    for role in trained_roles(s.config):
        key, fsdp = f"{role.key}.optim.optimizer", role.fsdp_key
        name = s.value(key)
        if name == "AdamW":
            continue
        places = [f"{fsdp}.{n}" for n in ("optimizer_offload", "optimizer_state", "offload_policy")]
        dtype, rank, saved = (
            f"{fsdp}.model_dtype",
            f"{role.model_key}.lora_rank",
            f"{role.key}.checkpoint.save_contents",
        )
        fits = "fsdp" if name == "AdamW8bit" else "fsdp2"
        what, either = f"torchao's {name} cannot be used here", f"or {key}=AdamW"
        if role.fsdp.model_dtype != "bf16":
            yield s.fault(what, "bf16 weights", f"set {dtype}=bf16, {either}", key, dtype)
        if role.strategy != fits:
            yield s.fault(what, fits, f"set {role.strategy_key}={fits}, {either}", key, role.strategy_key)
        if role.model.lora_rank > 0:
            yield s.fault(what, "no adapters, because they are fp32", f"set {rank}=0, {either}", key, rank)
        if role.fsdp.offload_policy or role.fsdp.device_state_bytes < math.inf:
            remedy = f"set {places[1]}=device and the other two to False, {either}"
            yield s.fault(what, "its state on the device", remedy, key, *places)
        if name == "AdamW8bit" and "optimizer" in s.value(saved):
            remedy = f"set {saved}=[model,extra]: a resumed run then begins with new moments, {either}"
            yield s.fault(what, "no optimizer in checkpoints", remedy, key, saved)


def adapters_have_a_rank(s: CheckContext) -> Faults:
    """Adapters to start from are of the configured rank."""
    for role in trained_roles(s.config):
        path, rank = f"{role.model_key}.lora_adapter_path", f"{role.model_key}.lora_rank"
        if role.model.lora_adapter_path is not None and role.model.lora_rank == 0:
            remedy = f"set {rank} and the other keys of LoRA as in the folder's adapter_config.json, or {path}=null"
            yield s.fault("there are adapters to start from, but no rank", f"{rank} of at least 1", remedy, path, rank)


# Sharding


def one_way_to_the_host(s: CheckContext) -> Faults:
    """FSDP's own CPU offload and rlx's offload exclude each other, as do two places of the optimizer's state."""
    for role in sharded_roles(s.config):
        own = [name for name in ("param_offload", "optimizer_offload") if getattr(role.fsdp, name)]
        own += ["optimizer_state"] * (role.fsdp.optimizer_state is not None)
        if role.fsdp.optimizer_offload and role.fsdp.optimizer_state not in (None, "host"):
            keys = tuple(f"{role.fsdp_key}.{name}" for name in ("optimizer_offload", "optimizer_state"))
            remedy = f"set {keys[0]}=False, or {keys[1]}=host"
            yield s.fault("the optimizer's state has two places", "one of the two, or host", remedy, *keys)
        if role.fsdp.offload_policy and own:
            keys = (f"{role.fsdp_key}.offload_policy", *(f"{role.fsdp_key}.{name}" for name in own))
            remedy = f"set {keys[0]}=False, or leave out {' and '.join(keys[1:])}"
            yield s.fault("parameters cannot be offloaded in two ways at once", "one of them", remedy, *keys)


def fsdp1_can_do_it(s: CheckContext) -> Faults:
    """The configuration uses nothing that FSDP1 computes wrongly with gradient accumulation."""
    world = processes(s.config)
    for role in sharded_roles(s.config):
        fsdp, key = role.fsdp, role.fsdp_key
        if role.strategy != "fsdp":
            continue
        remedy = f"set {role.strategy_key}=fsdp2"
        if fsdp.offload_policy:
            policy = f"{key}.offload_policy"
            either = f"{remedy}, or use {key}.param_offload"
            yield s.fault("FSDP1 loses gradients with its CPU offload", "FSDP2", either, policy)
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


def checkpoints_hold_weights(s: CheckContext) -> Faults:
    """A checkpoint holds the weights, in one of two forms; without them it serves for nothing."""
    for role in trained_roles(s.config) if may_save(s.config) else ():
        key = f"{role.key}.checkpoint.save_contents"
        if not {"model", "hf_model"} & set(s.value(key)):
            expected = "model, from which a run can be resumed, or hf_model, a folder for from_pretrained"
            yield s.fault("checkpoints would have no weights", expected, f"set {key}=[model,optimizer,extra]", key)


def checkpoint_warnings(s: CheckContext) -> Iterator[str]:
    """Warn of checkpoints from which no run goes on."""
    for role in trained_roles(s.config) if may_save(s.config) else ():
        key = f"{role.key}.checkpoint.save_contents"
        if "model" not in (contents := s.value(key)) and "hf_model" in contents:
            yield f"{key}={as_text(contents)} has no model: no run can be resumed from these checkpoints"


def resume_path_is_given(s: CheckContext) -> Faults:
    """resume_mode=resume_path needs a path."""
    trainer = s.config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        keys = ("trainer.resume_mode", "trainer.resume_from_path")
        remedy = f"set {keys[1]} to a folder .../global_step_N, or {keys[0]}=auto for the newest"
        yield s.fault("there is no checkpoint to resume from", "a checkpoint folder", remedy, *keys)


def validation_has_a_model(s: CheckContext) -> Faults:
    """A run that only validates needs a trained model."""
    if s.config.trainer.val_only and is_tiny(s.config) and s.config.trainer.resume_mode == "disable":
        keys = ("trainer.val_only", "actor_rollout_ref.model.path", "trainer.resume_mode")
        remedy = f"set {keys[1]} to an exported model, or {keys[2]}=auto to validate the newest checkpoint"
        yield s.fault("trainer.val_only has nothing to load", "a trained model", remedy, *keys)


TRAINING_RULES = (
    micro_batch_has_a_size,
    shared_sequences_are_packed,
    prefixes_are_shared_in_packed_rows,
    tokens_hold_the_longest_row,
    validation_samples_at_a_temperature,
    updates_survive_rounding,
    torchao_can_do_it,
    adapters_have_a_rank,
    one_way_to_the_host,
    fsdp1_can_do_it,
    checkpoints_hold_weights,
    resume_path_is_given,
    own_rewards_fit_the_validation,
    validation_has_a_model,
)
