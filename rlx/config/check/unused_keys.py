"""A table of keys that have no effect under some options, with the reason."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from rlx.config.check.context import CheckContext
from rlx.config.machine import processes
from rlx.config.schema import ARITHMETIC, GAMMA, LAM, LOSS_MODES, NORM_BY_STD, TIME_STEP
from rlx.config.schema.roles import (
    TINY,
    has_critic,
    has_environment,
    has_reference,
    has_reference_model,
    is_tiny,
    may_save,
    only_environment_scores,
    validates,
)
from rlx.config.schema.tree import as_text
from rlx.offload.runtime.options import UNREAD_OPTIONS, OffloadOptions, UnreadOptions


class UnusedKey(NamedTuple):
    """Keys (patterns; `*` matches anything) without effect if `when` is true, and the reason in words."""

    why: str
    when: Callable[[CheckContext], bool]
    keys: tuple[str, ...]


ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
JUDGE, OWN = "reward_model", "custom_reward_function"
OF_FUNCTIONS = (
    *("reward.reward_manager.*", "reward.format*", "reward.num_workers", "reward.timeout_s", "reward.max_concurrent"),
    *("reward.memory_limit_gb", "reward.on_*"),
)
FSDP = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp", f"{JUDGE}.model.fsdp_config")
CORRECTION = "algorithm.rollout_correction"
_OF_BF16 = ("master_weights", "allow_lossy_updates")
_OF_OPTIMIZER = ("optimizer_offload", "optimizer_state")
VLLM_ONLY = (
    *("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager", "free_cache_engine"),
    *("enable_chunked_prefill", "enable_prefix_caching", "engine_kwargs.vllm", "seed_requests"),
)


def _below(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def _row(why: str, when: Callable[[CheckContext], bool], *keys: str) -> UnusedKey:
    return UnusedKey(why, when, keys)


def _without(flag: str, *keys: str) -> UnusedKey:
    """Return the row of keys that are only read if another key is not False, null, 0 or empty."""
    return _row(f"{flag} is not set", lambda s: not s.value(flag), *keys)


def _with(number: str, *keys: str) -> UnusedKey:
    """Return the row of keys that another key replaces if it is neither null nor -1."""
    return _row(f"{number} is set", lambda s: s.value(number) not in (None, -1), *keys)


def _if(key: str, value: object, *keys: str) -> UnusedKey:
    """Return the row of keys that are not read while another one has this value."""
    return _row(f"{key} is {as_text(value)}", lambda s: s.value(key) == value, *keys)


def _of_sizes(flag: str, by_tokens: str, by_rows: str) -> tuple[UnusedKey, UnusedKey]:
    """Return the rows of the two sizes of a micro-batch, of which the flag beside them chooses the one by tokens."""
    section = flag.rpartition(".")[0]
    return _without(flag, f"{section}.{by_tokens}_per_gpu"), _if(flag, True, f"{section}.{by_rows}_per_gpu")


def _loss_without(*readers: str) -> Callable[[CheckContext], bool]:
    """Whether rlx's policy loss is none of `readers` and so ignores a key; a user's own loss may read any key."""
    loss = f"{ACTOR}.policy_loss"
    return lambda s: s.value(f"{loss}.path") is None and s.value(f"{loss}.loss_mode") not in readers


def _does_not_estimate_with(name: str) -> Callable[[CheckContext], bool]:
    return lambda s: not s.config.algorithm.needs(name)


def _never_validates(s: CheckContext) -> bool:
    return not validates(s.config)


def _engine_reads_not(unread: UnreadOptions, offload: str, s: CheckContext) -> bool:
    options = OffloadOptions.unchecked(**vars(s.value(offload)))
    return unread.when(options, s.on_accelerator)


def _always(s: CheckContext) -> bool:
    return True


def _of_trained_model(role: str, model: str) -> tuple[UnusedKey, ...]:
    """Return the rows of the actor or the critic, whose keys are below `role` and `model`."""
    offload, optim = f"{model}.activation_offload", f"{role}.optim"
    dtype = f"{role}.{'fsdp' if role == 'critic' else 'fsdp_config'}.model_dtype"
    return (
        _without(f"{model}.enable_activation_offload", f"{offload}.*"),
        *(
            _row(unread.why, partial(_engine_reads_not, unread, offload), *_below(offload, *unread.options))
            for unread in UNREAD_OPTIONS
        ),
        _without(f"{model}.lora_rank", f"{model}.lora_alpha", f"{model}.target_modules", f"{model}.lora.*"),
        _row("adapters are fp32", lambda s: s.value(f"{model}.lora_rank") > 0, *_below(optim, *_OF_BF16)),
        *_of_sizes(f"{role}.use_dynamic_bsz", "ppo_max_token_len", "ppo_micro_batch_size"),
        _if(f"{optim}.lr_scheduler_type", "constant", f"{optim}.min_lr_ratio"),
        _with(f"{optim}.lr_warmup_steps", f"{optim}.lr_warmup_steps_ratio"),
        # Masters would be copies of the weights.
        _row(f"{dtype} is not bf16", lambda s: s.value(dtype) != "bf16", *_below(optim, *_OF_BF16)),
        _row(
            "torchao's AdamW has no masters",
            lambda s: s.value(f"{optim}.optimizer") != "AdamW",
            f"{optim}.master_weights",
        ),
    )


UNUSED_KEYS = (
    # Data and models
    _row("overlong prompts are dropped, not cut", lambda s: s.config.data.filter_overlong_prompts, "data.truncation"),
    _row(
        f"no data file is {ARITHMETIC}",
        lambda s: ARITHMETIC not in (*s.value("data.train_files"), *s.value("data.val_files")),
        "data.arithmetic.*",
    ),
    _without("data.shuffle", "data.seed"),
    _row(f"{MODEL}.path is not {TINY}", lambda s: not is_tiny(s.config), f"{MODEL}.tiny.*", "warm_start.*"),
    _row(f"the critic has the policy's shape, {MODEL}.tiny", _always, "critic.model.tiny.*"),
    _if(f"{ROLLOUT}.n", 1, f"{MODEL}.use_shared_prefix", "critic.model.use_shared_prefix"),
    *_of_trained_model(ACTOR, MODEL),
    *_of_trained_model("critic", "critic.model"),
    # Updates
    *_of_sizes(f"{ROLLOUT}.log_prob_use_dynamic_bsz", "log_prob_max_token_len", "log_prob_micro_batch_size"),
    *_of_sizes(f"{REF}.log_prob_use_dynamic_bsz", "log_prob_max_token_len", "log_prob_micro_batch_size"),
    _without(f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
    _row("neither use_kl_loss nor use_kl_in_reward is set", lambda s: not has_reference(s.config), f"{REF}.*"),
    _row(
        f"{MODEL}.lora_rank is set: the reference is the actor with its adapters off",
        lambda s: not has_reference_model(s.config),
        *(f"{REF}.fsdp_config.*", f"{REF}.ulysses_sequence_parallel_size"),
    ),
    _row("the critic has no sampler", _always, "critic.model.lora.merge"),
    _row(
        "clip_ratio_low and clip_ratio_high are both set",
        lambda s: None not in map(s.value, _below(ACTOR, "clip_ratio_low", "clip_ratio_high")),
        f"{ACTOR}.clip_ratio",
    ),
    _row("sapo has no clip", _loss_without(*(set(LOSS_MODES) - {"sapo"})), f"{ACTOR}.clip_ratio*"),
    _row("only the vanilla loss has a dual clip", _loss_without("vanilla"), f"{ACTOR}.clip_ratio_c"),
    _row("policy_loss.loss_mode is not sapo", _loss_without("sapo"), f"{ACTOR}.tau_pos", f"{ACTOR}.tau_neg"),
    _with(f"{ACTOR}.policy_loss.path", f"{ACTOR}.policy_loss.loss_mode"),
    _without(f"{ACTOR}.policy_loss.path", f"{ACTOR}.policy_loss.name"),
    _row(
        "on CPU everything is in host memory",
        lambda s: not s.on_accelerator,
        *(key for fsdp in FSDP for key in _below(fsdp, "param_offload", *_OF_OPTIMIZER, "offload_policy")),
    ),
    _row("the reference has no optimizer", _always, *_below(f"{REF}.fsdp_config", *_OF_OPTIMIZER)),
    _row(
        "there is one process",
        lambda s: processes(s.config) == 1,
        "trainer.balance_batch",
        *(f"{fsdp}.forward_prefetch" for fsdp in FSDP),
    ),
    # Generation
    _if(f"{ROLLOUT}.name", "hf", *_below(ROLLOUT, *VLLM_ONLY)),
    _without(
        f"{ROLLOUT}.val_kwargs.do_sample",
        *_below(f"{ROLLOUT}.val_kwargs", "temperature", "top_p", "top_k", "min_p", "n"),
    ),
    _without(f"{ROLLOUT}.stop", f"{ROLLOUT}.include_stop_str_in_output"),
    # Conversations
    _row(
        "neither environment.name nor environment.path is set",
        lambda s: not has_environment(s.config),
        *("environment.*", f"{ROLLOUT}.multi_turn.*"),
    ),
    _row("environment.rewards is replace", lambda s: only_environment_scores(s.config), f"{OWN}.*", *OF_FUNCTIONS),
    # Rewards and algorithm
    _without(f"{JUDGE}.enable", f"{JUDGE}.*"),
    *_of_sizes(f"{JUDGE}.use_dynamic_bsz", "forward_max_token_len", "micro_batch_size"),
    _row(
        "a reward model has no optimizer",
        _always,
        *_below(f"{JUDGE}.model.fsdp_config", *_OF_OPTIMIZER),
    ),
    _row(
        f"{JUDGE}.rule_weight is 0: a model alone scores",
        lambda s: s.value(f"{JUDGE}.enable") and s.value(f"{JUDGE}.rule_weight") == 0,
        *(f"{OWN}.*", *OF_FUNCTIONS),
    ),
    _without(
        f"{OWN}.path",
        *_below(OWN, "name", "reward_kwargs", "data_sources"),
        *("reward.reward_manager.name", "reward.max_concurrent"),
    ),
    _row(
        "a custom_reward_function scores all",
        lambda s: s.value(f"{OWN}.path") is not None and not s.value(f"{OWN}.data_sources"),
        "reward.format_score",
    ),
    _without("reward.format", "reward.format_weight"),
    _without("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
    _if("algorithm.kl_ctrl.type", "fixed", "algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
    _if(f"{CORRECTION}.rollout_is", None, *_below(CORRECTION, "rollout_is_threshold", "rollout_is_batch_normalize")),
    _without(f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"),
    _if(f"{CORRECTION}.bypass_mode", True, f"{ROLLOUT}.log_prob_*"),
    _row(
        "bypass_mode compares no experts, and router_replay.mode replays none",
        lambda s: s.value(f"{CORRECTION}.bypass_mode") and s.value(f"{ACTOR}.router_replay.mode") == "disabled",
        f"{ROLLOUT}.enable_rollout_routing_replay",
    ),
    *(
        _row("adv_estimator does not read it", _does_not_estimate_with(name), f"algorithm.{name}")
        for name in (GAMMA, LAM, NORM_BY_STD, TIME_STEP)
    ),
    _without("algorithm.filter_groups.enable", "algorithm.filter_groups.*", "data.gen_batch_size"),
    _without("reward.overlong_buffer.enable", "reward.overlong_buffer.*"),
    _row(
        "adv_estimator has no critic",
        lambda s: not has_critic(s.config),
        *("trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"),
    ),
    # The loop
    _with("trainer.total_training_steps", "trainer.total_epochs"),
    _row(
        "resume_mode is not resume_path",
        lambda s: s.config.trainer.resume_mode != "resume_path",
        "trainer.resume_from_path",
    ),
    _row(
        "neither trainer.save_freq nor trainer.save_every_minutes is set: nothing is saved",
        lambda s: not may_save(s.config),
        *("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep", "*.checkpoint.*"),
    ),
    _row(
        "the run never validates",
        _never_validates,
        *("data.val_batch_size", f"{ROLLOUT}.val_kwargs.*"),
        *("trainer.validation_data_dir", "trainer.log_val_generations"),
    ),
)


def unused_keys(s: CheckContext) -> dict[str, str]:
    """Return the keys that the user changed without effect, each with the reason."""
    found: dict[str, str] = {}
    for key in s.changed_keys:
        if key.startswith("critic.") and not has_critic(s.config):
            continue  # another rule reports it
        for row in UNUSED_KEYS:
            if any(fnmatchcase(key, pattern) for pattern in row.keys) and row.when(s):
                found[key] = row.why
                break
    return found
