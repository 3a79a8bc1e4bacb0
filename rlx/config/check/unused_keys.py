"""A table of keys that have no effect under some options, with the reason."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from rlx.config.check.context import CheckContext
from rlx.config.machine import on_accelerator, processes
from rlx.config.schema import ARITHMETIC, GAMMA, LAM, LOSS_MODES, NORM_BY_STD
from rlx.config.schema.roles import TINY, has_critic, has_reference, has_reward_model, is_tiny
from rlx.offload.runtime.options import UNREAD_OPTIONS, OffloadOptions, UnreadOptions


class UnusedKey(NamedTuple):
    """Keys (patterns; `*` matches anything) without effect if `when` is true, and the reason in words."""

    keys: tuple[str, ...]
    when: Callable[[CheckContext], bool]
    why: str


ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
JUDGE, OWN = "reward_model", "custom_reward_function"
OF_FUNCTIONS = (
    *("reward.reward_manager.*", "reward.format*", "reward.num_workers", "reward.timeout_s", "reward.max_concurrent"),
    *("reward.memory_limit_gb", "reward.on_*"),
)
FSDP = (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.fsdp", f"{JUDGE}.model.fsdp_config")
CORRECTION = "algorithm.rollout_correction"
VLLM_ONLY = (
    *("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager", "free_cache_engine"),
    *("enable_chunked_prefill", "enable_prefix_caching", "engine_kwargs.vllm", "seed_requests"),
)


def _below(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def _is_off(key: str) -> Callable[[CheckContext], bool]:
    """Whether the value of a key is False, None, 0 or empty."""
    return lambda s: not s.value(key)


def _is_set(key: str) -> Callable[[CheckContext], bool]:
    """Whether a number is given; null and -1 mean that it is not."""
    return lambda s: s.value(key) not in (None, -1)


def _is(key: str, value: object) -> Callable[[CheckContext], bool]:
    return lambda s: s.value(key) == value


def _no_files_of_the_task(s: CheckContext) -> bool:
    return ARITHMETIC not in (*s.config.data.train_files, *s.config.data.val_files)


def _loss_without(*readers: str) -> Callable[[CheckContext], bool]:
    """Whether rlx's policy loss is none of `readers` and so ignores a key; a user's own loss may read any key."""
    loss = f"{ACTOR}.policy_loss"
    return lambda s: s.value(f"{loss}.path") is None and s.value(f"{loss}.loss_mode") not in readers


def _does_not_estimate_with(name: str) -> Callable[[CheckContext], bool]:
    return lambda s: not s.config.algorithm.needs(name)


def _never_validates(s: CheckContext) -> bool:
    trainer = s.config.trainer
    return trainer.test_freq <= 0 and not trainer.val_before_train and not trainer.val_only


def _own_function_scores_all(s: CheckContext) -> bool:
    custom = s.config.custom_reward_function
    return custom.path is not None and not custom.data_sources


def _only_a_model_scores(s: CheckContext) -> bool:
    return has_reward_model(s.config) and s.config.reward_model.rule_weight == 0


def _engine_reads_not(unread: UnreadOptions, offload: str, s: CheckContext) -> bool:
    options = OffloadOptions.unchecked(**vars(s.value(offload)))
    return unread.when(options, on_accelerator(s.config, s.machine))


def _on_cpu(s: CheckContext) -> bool:
    return not on_accelerator(s.config, s.machine)


def _flagged(flag: str, *keys: str) -> UnusedKey:
    """Return the row of keys that are only read with a flag."""
    return UnusedKey(keys, _is_off(flag), f"{flag} is not set")


def _of_trained_model(role: str, model: str) -> tuple[UnusedKey, ...]:
    """Return the rows of the actor or the critic, whose keys are below `role` and `model`."""
    offload, optim = f"{model}.activation_offload", f"{role}.optim"
    return (
        _flagged(f"{model}.enable_activation_offload", f"{offload}.*"),
        *(
            UnusedKey(_below(offload, *unread.options), partial(_engine_reads_not, unread, offload), unread.why)
            for unread in UNREAD_OPTIONS
        ),
        _flagged(f"{model}.lora_rank", f"{model}.lora_alpha", f"{model}.target_modules"),
        _flagged(f"{role}.use_dynamic_bsz", f"{role}.ppo_max_token_len_per_gpu"),
        UnusedKey((f"{optim}.min_lr_ratio",), _is(f"{optim}.lr_scheduler_type", "constant"), "lr is constant"),
        UnusedKey((f"{optim}.lr_warmup_steps_ratio",), _is_set(f"{optim}.lr_warmup_steps"), "lr_warmup_steps is set"),
    )


UNUSED_KEYS = (
    # Data and models
    UnusedKey(("data.truncation",), _is("data.filter_overlong_prompts", True), "overlong prompts are dropped, not cut"),
    UnusedKey(("data.arithmetic.*",), _no_files_of_the_task, f"no data file is {ARITHMETIC}"),
    _flagged("data.shuffle", "data.seed"),
    UnusedKey((f"{MODEL}.tiny.*", "warm_start.*"), lambda s: not is_tiny(s.config), f"{MODEL}.path is not {TINY}"),
    UnusedKey(("critic.model.tiny.*",), lambda s: True, f"the critic has the policy's shape, {MODEL}.tiny"),
    UnusedKey(
        (f"{MODEL}.use_shared_prefix", "critic.model.use_shared_prefix"),
        _is(f"{ROLLOUT}.n", 1),
        f"{ROLLOUT}.n is 1: each prompt has one response",
    ),
    *_of_trained_model(ACTOR, MODEL),
    *_of_trained_model("critic", "critic.model"),
    # Updates
    _flagged(f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"),
    _flagged(f"{REF}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_max_token_len_per_gpu"),
    _flagged(f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"),
    UnusedKey((f"{REF}.*",), lambda s: not has_reference(s.config), "neither use_kl_loss nor use_kl_in_reward is set"),
    UnusedKey(
        (f"{ACTOR}.clip_ratio",),
        lambda s: None not in (s.value(f"{ACTOR}.clip_ratio_low"), s.value(f"{ACTOR}.clip_ratio_high")),
        "clip_ratio_low and clip_ratio_high are both set",
    ),
    UnusedKey(
        _below(ACTOR, "clip_ratio*"),
        _loss_without(*(mode for mode in LOSS_MODES if mode != "sapo")),
        "sapo has no clip",
    ),
    UnusedKey((f"{ACTOR}.clip_ratio_c",), _loss_without("vanilla"), "only the vanilla loss has a dual clip"),
    UnusedKey(_below(ACTOR, "tau_pos", "tau_neg"), _loss_without("sapo"), "policy_loss.loss_mode is not sapo"),
    UnusedKey((f"{ACTOR}.policy_loss.loss_mode",), _is_set(f"{ACTOR}.policy_loss.path"), "policy_loss.path is set"),
    _flagged(f"{ACTOR}.policy_loss.path", f"{ACTOR}.policy_loss.name"),
    UnusedKey(
        tuple(f"{fsdp}.{name}" for fsdp in FSDP for name in ("param_offload", "optimizer_offload")),
        _on_cpu,
        "on CPU bytes only move within host memory",
    ),
    UnusedKey(tuple(f"{fsdp}.offload_policy" for fsdp in FSDP), _on_cpu, "on CPU everything is in host memory"),
    UnusedKey((f"{REF}.fsdp_config.optimizer_offload",), lambda s: True, "the reference has no optimizer"),
    UnusedKey(
        ("trainer.balance_batch", *(f"{fsdp}.forward_prefetch" for fsdp in FSDP)),
        lambda s: processes(s.config) == 1,
        "there is one process",
    ),
    # Generation
    UnusedKey(_below(ROLLOUT, *VLLM_ONLY), _is(f"{ROLLOUT}.name", "hf"), f"{ROLLOUT}.name is hf"),
    UnusedKey(
        _below(f"{ROLLOUT}.val_kwargs", "temperature", "top_p", "top_k", "n"),
        _is_off(f"{ROLLOUT}.val_kwargs.do_sample"),
        "validation is greedy: val_kwargs.do_sample is not set",
    ),
    # Rewards and algorithm
    _flagged(f"{JUDGE}.enable", f"{JUDGE}.*"),
    _flagged(f"{JUDGE}.use_dynamic_bsz", f"{JUDGE}.forward_max_token_len_per_gpu"),
    UnusedKey((f"{JUDGE}.model.fsdp_config.optimizer_offload",), lambda s: True, "a reward model has no optimizer"),
    UnusedKey((f"{OWN}.*", *OF_FUNCTIONS), _only_a_model_scores, f"{JUDGE}.rule_weight is 0: a model alone scores"),
    _flagged(
        f"{OWN}.path",
        *_below(OWN, "name", "reward_kwargs", "data_sources"),
        *("reward.reward_manager.name", "reward.max_concurrent"),
    ),
    UnusedKey(("reward.format_score",), _own_function_scores_all, "a custom_reward_function scores all"),
    _flagged("reward.format", "reward.format_weight"),
    _flagged("algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl.*"),
    UnusedKey(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        _is("algorithm.kl_ctrl.type", "fixed"),
        "algorithm.kl_ctrl.type is fixed",
    ),
    UnusedKey(
        _below(CORRECTION, "rollout_is_threshold", "rollout_is_batch_normalize"),
        _is(f"{CORRECTION}.rollout_is", None),
        f"{CORRECTION}.rollout_is is null",
    ),
    UnusedKey((f"{CORRECTION}.rollout_rs_threshold",), _is_off(f"{CORRECTION}.rollout_rs"), "rollout_rs is null"),
    UnusedKey(
        (f"{ROLLOUT}.log_prob_*",),
        lambda s: s.config.algorithm.rollout_correction.bypass_mode,
        "bypass_mode leaves the phase of the old log-probs out",
    ),
    *(
        UnusedKey((f"algorithm.{name}",), _does_not_estimate_with(name), "adv_estimator does not read it")
        for name in (GAMMA, LAM, NORM_BY_STD)
    ),
    _flagged("algorithm.filter_groups.enable", "algorithm.filter_groups.*", "data.gen_batch_size"),
    _flagged("reward.overlong_buffer.enable", "reward.overlong_buffer.*"),
    UnusedKey(
        ("trainer.critic_warmup", "trainer.max_critic_ckpt_to_keep"),
        lambda s: not has_critic(s.config),
        "adv_estimator has no critic",
    ),
    # The loop
    UnusedKey(
        ("trainer.total_epochs",), _is_set("trainer.total_training_steps"), "trainer.total_training_steps is set"
    ),
    UnusedKey(
        ("trainer.resume_from_path",),
        lambda s: s.config.trainer.resume_mode != "resume_path",
        "resume_mode is not resume_path",
    ),
    UnusedKey(
        ("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep", "*.checkpoint.save_contents"),
        lambda s: s.config.trainer.save_freq <= 0,
        "trainer.save_freq is not set: nothing is saved",
    ),
    UnusedKey(
        (
            "data.val_batch_size",
            f"{ROLLOUT}.val_kwargs.*",
            *_below("trainer", "validation_data_dir", "log_val_generations"),
        ),
        _never_validates,
        "the run never validates",
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
