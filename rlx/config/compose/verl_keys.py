"""Remedies for keys and values of verl that rlx does not have."""

from typing import NamedTuple

from rlx.config.schema.tree import is_key


class Renamed(NamedTuple):
    """What rlx calls a key or a value of verl.

    Args:
        to: the key, as far as its name differs: found beside verl's key, or in a group above it. After key=value the value.
        why: comes after the name.
        given: what becomes of the user's value.
    """

    to: str
    why: str = ""
    given: str = "={value}"

    def text(self, key: str, value: str = "") -> str:
        """Return the remedy for a value of this key of rlx, or without the value."""
        return f"use {key}{self.given.format(value=value) if value else ''}{self.why and f': {self.why}'}"


_NO_NEED = "remove it: rlx needs no such key"
_NO_PROFILER = "remove it: rlx starts no profiler; metrics have seconds and memory by phase"
_TEXT_ALONE = "remove it: rlx trains on text"
_PARTS_OF_A_SCORE = "the reward function weighs the parts of a score"
_READS_TEXTS = "remove it: the reward model reads texts if its tokenizer differs from the policy's"
_COVARIANCE = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
_NO_COVARIANCE = (
    "remove it: it picks tokens of a whole batch, and a micro-batch does not see the batch; raise "
    "actor_rollout_ref.actor.clip_ratio_high to keep entropy up"
)
_NO_MEGATRON = "rlx has no Megatron, and FSDP shards the weights among all processes"
_SAMPLER_GROUPS = "remove it: actor_rollout_ref.rollout.tensor_model_parallel_size alone says how many processes share the sampler's model"
_PER_PROCESS = "it counts the samples of one process"
_DIVIDED = "={value} divided by the number of processes"
_ONE_CHECKPOINT = "remove it; trainer.max_actor_ckpt_to_keep=1 keeps the newest checkpoint alone"
_WEIGHTS_STAY = "remove it: the sampler takes the weights inside the process that trains them"
_ALWAYS_SAMPLES = "remove it: every step samples; trainer.rollout_data_dir keeps the texts"
_WHOLE_SAMPLER = "remove it: the sampler's weights are not quantised; actor_rollout_ref.rollout.dtype is their type"
_OWN_LOSS = "write it as a function of your own, actor_rollout_ref.actor.policy_loss.path"
_OWN_ENVIRONMENT = "set environment.path to a Python file with a class of your own, docs/environments.md"

CHANGES_OF_SAMPLING = (
    *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "logit_bias"),
)

# A pattern matches a key (or key=value) that equals it, ends with `.pattern`, or lies below such a key.
REMEDIES: dict[str, str | Renamed] = {
    "use_fused_kernels": "remove it: rlx computes token log-probs in chunks, without whole logits if the model allows it",
    "fused_kernel_options": "remove it: rlx has no fused kernels to choose from",
    "param_dtype=fp16": Renamed("bf16", "rlx has no loss scaling, which fp16 needs"),
    "reduce_dtype=fp16": Renamed("fp32", "rlx has no loss scaling; bf16 works too"),
    "return_raw_chat": "remove it: rlx always keeps the messages of a prompt",
    "return_raw_input_ids": _NO_NEED,
    "return_full_prompt": "remove it: rlx always keeps the text of a prompt",
    "filter_overlong_prompts_workers": _NO_NEED,
    "dataloader_num_workers": "remove it: rlx starts no loader processes",
    "adv_estimator=grpo_vectorized": Renamed("grpo"),
    "adv_estimator=rloo_vectorized": Renamed("rloo"),
    "adv_estimator=gpg": "use algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False; for its correction of "
    "groups without a gradient add algorithm.filter_groups.enable=True",
    "loss_mode=gpg": Renamed("vanilla", "with one optimizer step per batch the gradient is the same"),
    **dict.fromkeys(("loss_mode=clip_cov", "loss_mode=kl_cov", *_COVARIANCE), _NO_COVARIANCE),
    "adv_estimator=dapo": "use algorithm.adv_estimator=grpo actor_rollout_ref.actor.clip_ratio_high=0.28 "
    "algorithm.filter_groups.enable=True reward.overlong_buffer.enable=True; DAPO's loss over tokens is the default",
    "adv_estimator=gdpo": Renamed("grpo", _PARTS_OF_A_SCORE),
    "reward_manager.name=gdpo": Renamed("naive", _PARTS_OF_A_SCORE),
    "gdpo_reward_keys": f"remove it: {_PARTS_OF_A_SCORE}",
    "adv_estimator=optimal_token_baseline": Renamed("opo", "its baseline is for whole responses"),
    "calculate_sum_pi_squared": "remove it: opo, which is for optimal_token_baseline, does not need it",
    "use_pf_ppo": "remove it: every sample is learned from, none is drawn again by its score",
    "pf_ppo": "remove it: every sample is learned from, none is drawn again by its score",
    "loss_agg_mode=token-sum": Renamed("seq-mean-token-sum", "it differs only by a constant factor"),
    "kl_loss_type=k2+": Renamed("k2", "it has the gradient of k2+"),
    "kl_loss_type=mse+": Renamed("mse", "it has the gradient of mse+"),
    "calculate_entropy": "remove it: entropy is always logged",
    "data_loader_seed": Renamed("trainer.seed"),
    "critic.enable": "remove it: only algorithm.adv_estimator=gae has a critic",
    "optim.clip_grad": Renamed("grad_clip"),
    "optim.optimizer_impl": "remove it: the key optimizer beside it names the implementation too",
    "loss_mode=dppo_tv": _OWN_LOSS,
    "loss_mode=dppo_kl": _OWN_LOSS,
    "loss_scale_factor": "remove it: seq-mean-token-sum-norm divides by data.max_response_length",
    "reward_model.overlong_buffer": Renamed("reward.overlong_buffer"),
    "reward_kwargs.overlong_buffer_cfg": Renamed("reward.overlong_buffer"),
    "rollout_correction.loss_type": "remove it: actor_rollout_ref.actor.policy_loss.loss_mode chooses the loss, with bypass_mode too",
    "rollout_correction.debug_rollout_actor_probs": "remove it: rlx logs the sampler's mismatch with bypass_mode too",
    "rollout_rs_threshold_lower": "write both bounds as low_high in algorithm.rollout_correction.rollout_rs_threshold",
    "rollout_is_threshold_lower": "write both bounds as low_high in algorithm.rollout_correction.rollout_is_threshold",
    "rollout_rs=token": Renamed("token_k1"),
    "rollout_rs=sequence": Renamed("seq_sum_k1"),
    "rollout_rs=geometric": Renamed("seq_mean_k1"),
    "rollout_is=geometric": "use algorithm.rollout_correction.rollout_rs=seq_mean_k1: a geometric mean rejects, it does not "
    "weigh",
    "algorithm.rollout_is": "use algorithm.rollout_correction.rollout_is=token in place of True, or sequence; remove it in place of False",
    "algorithm.rollout_is_level": Renamed("algorithm.rollout_correction.rollout_is"),
    "tis_imp_ratio_cap": Renamed(
        "algorithm.rollout_correction.rollout_is_threshold",
        "it is read with algorithm.rollout_correction.rollout_is=token",
    ),
    "ppo_micro_batch_size": Renamed("ppo_micro_batch_size_per_gpu", _PER_PROCESS, _DIVIDED),
    "log_prob_micro_batch_size": Renamed("log_prob_micro_batch_size_per_gpu", _PER_PROCESS, _DIVIDED),
    "forward_micro_batch_size": "remove it: values use critic.ppo_micro_batch_size_per_gpu",
    "forward_micro_batch_size_per_gpu": "remove it: values use critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu": "remove it: values use critic.ppo_max_token_len_per_gpu",
    "critic.model.fsdp_config": Renamed("critic.fsdp"),
    "critic.fsdp_config": Renamed("critic.fsdp"),
    "critic.model.tokenizer_path": "remove it: actor and critic read the same tokens",
    "critic.rollout_n": "remove it: actor_rollout_ref.rollout.n applies to the critic too",
    "fsdp_config.ulysses_sequence_parallel_size": Renamed("ulysses_sequence_parallel_size"),
    "fsdp_config.dtype": Renamed("fsdp_config.mixed_precision.param_dtype"),
    "fsdp_config.seed": Renamed("trainer.seed"),
    **dict.fromkeys(("fsdp_config.use_orig_params", "fsdp_config.forward_only", "grad_offload"), _NO_NEED),
    "strategy=fsdp_turbo": Renamed("fsdp2"),
    "turbo_config": "remove it: each transformer layer is one FSDP unit, which gradient checkpointing recomputes",
    "ref.use_torch_compile": "remove it: actor_rollout_ref.actor.use_torch_compile is for the actor alone",
    "policy_loss.tau_pos": Renamed("tau_pos"),
    "policy_loss.tau_neg": Renamed("tau_neg"),
    "wrap_policy": "remove it: each transformer layer is one FSDP unit",
    "hybrid_engine": "remove it: actor, reference and sampler always share their processes",
    "reward_model.reward_manager": Renamed("reward.reward_manager.name"),
    "reward_model.reward_manager.name": Renamed("reward.reward_manager.name"),
    "reward_model.micro_batch_size": Renamed("reward_model.micro_batch_size_per_gpu", _PER_PROCESS, _DIVIDED),
    "reward_model.max_length": "remove it: the reward model scores whole sequences",
    "reward_model.input_tokenizer": _READS_TEXTS,
    "reward_model.model.input_tokenizer": _READS_TEXTS,
    "launch_reward_fn_async": "remove it: reward functions always run in their own processes",
    "sandbox_fusion": "remove it: reward functions run in their own processes; see reward.memory_limit_gb",
    "reward.reward_model": Renamed("reward_model"),
    "reward.reward_model.model_path": Renamed("reward_model.model.path"),
    "reward.custom_reward_function": Renamed("custom_reward_function"),
    "reward_manager.name=prime": Renamed("naive", "reward functions always run in parallel processes"),
    "reward_manager.name=dapo": Renamed("naive", "DAPO's length penalty is reward.overlong_buffer.enable=True"),
    "ref.strategy": "remove it: the reference uses actor_rollout_ref.actor.strategy",
    **dict.fromkeys(("use_shm", "transfer_queue"), _NO_NEED),
    "megatron": f"remove it: {_NO_MEGATRON}; vLLM alone runs tensor-parallel",
    "strategy=megatron": Renamed("fsdp2", _NO_MEGATRON),
    **dict.fromkeys(("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"), _SAMPLER_GROUPS),
    "data.datagen": "remove it: a run makes no data; data.custom_cls.path and data.custom_cls.name choose a dataset class of your own",
    "data.sampler": "remove it: data.shuffle and data.seed choose the order of rows",
    "data.tokenizer": "remove it: the tokenizer is that of actor_rollout_ref.model.path",
    **dict.fromkeys(("profiler", "global_profiler", "trainer.profile_steps", "timeline_json_file"), _NO_PROFILER),
    "apply_chat_template_kwargs": "remove it: copy the model's folder and write the setting into the first line of its chat template "
    "(`chat_template.jinja` or `tokenizer_config.json`), such as `{% set enable_thinking = false %}`; Qwen3-8B and "
    "its like also read /no_think at the end of a prompt",
    **dict.fromkeys(("freeze_vision_tower", "image_key", "image_patch_size", "video_key"), _TEXT_ALONE),
    "distillation": "remove it: rlx learns from rewards, not from a teacher's log-probs",
    "data.trust_remote_code": Renamed("actor_rollout_ref.model.trust_remote_code", "it is for the tokenizer too"),
    **dict.fromkeys(("checkpoint_engine", "update_weights_bucket_megabytes"), _WEIGHTS_STAY),
    **dict.fromkeys(("use_legacy_worker_impl", "trainer.use_v1"), _NO_NEED),
    "use_reward_loop": _NO_NEED,
    "esi_redundant_time": "use trainer.save_on_sigterm_s=60: SIGTERM then lets the step end and saves, if that takes at most 60 s",
    "reward_model.num_workers": "remove it: the reward model runs in every process that trains; for functions use reward.num_workers",
    "reward_model.rollout": "remove it: the reward model scores a response in one forward and generates nothing",
    "reward_model.model.use_remove_padding": _NO_NEED,
    "logger=file": Renamed("jsonl", "it writes metrics.jsonl into the run's folder"),
    "rollout.name=sglang": Renamed("vllm", "rlx has vllm and hf"),
    "rollout.name=trtllm": Renamed("vllm", "rlx has vllm and hf"),
    "engine_kwargs.sglang": "use actor_rollout_ref.rollout.engine_kwargs.vllm with the options of vLLM",
    "engine_kwargs.trtllm": "use actor_rollout_ref.rollout.engine_kwargs.vllm with the options of vLLM",
    "multi_stage_wake_up": "remove it: vLLM always takes memory for weights first, for its cache after them",
    "nccl_timeout": Renamed("trainer.hang_timeout_s"),
    "entropy_from_logits_with_chunking": "remove it: entropy is always computed in chunks",
    "entropy_checkpointing": "remove it: entropy is always computed in chunks, and keeps no softmax for backward",
    "external_lib": "remove it: install a package that registers its model with transformers, or use "
    "actor_rollout_ref.model.trust_remote_code=True",
    "exclude_modules": "name the modules to adapt in actor_rollout_ref.model.target_modules",
    "lora.rank": Renamed("lora_rank"),
    "lora.alpha": Renamed("lora_alpha"),
    "lora.adapter_path": Renamed("lora_adapter_path"),
    "lora.target_modules": Renamed("target_modules"),
    "use_unpad": Renamed("model.use_remove_padding"),
    "use_prefix_grouper": Renamed("model.use_shared_prefix"),
    "rollout.swap_space": "remove it: vLLM has no swap space, and computes a sequence again whose cache it gave away",
    "rollout.mode": "remove it: rollout and training take turns",
    "rollout.load_format": "remove it: the actor's weights are sent before the first rollout",
    "rollout.layered_summon": "remove it: rlx always sends weights one by one",
    "rollout.max_model_len": "set data.max_prompt_length and data.max_response_length",
    "actor_rollout_ref.rollout.prompt_length": Renamed("data.max_prompt_length"),
    "actor_rollout_ref.rollout.response_length": Renamed("data.max_response_length"),
    "rollout.do_sample": "remove it: training rollouts are always sampled",
    **{
        f"rollout.{name}": "remove it: it changes what is sampled, but the loss would take the samples for the policy's own; in "
        f"validation it is actor_rollout_ref.rollout.val_kwargs.{name}"
        for name in CHANGES_OF_SAMPLING
    },
    "rollout.disable_log_stats": _NO_NEED,
    "multi_turn.enable": "remove it: environment.name or environment.path makes conversations",
    "multi_turn.tool_config_path": "set environment.path to a Python file, and environment.name to the list of its tools",
    "multi_turn.interaction_config_path": _OWN_ENVIRONMENT,
    "multi_turn.max_parallel_calls": "remove it: calls of a turn run one after the other",
    "multi_turn.use_inference_chat_template": "set actor_rollout_ref.rollout.multi_turn.on_rewritten_history",
    "multi_turn.tokenization_sanity_check_mode": "set actor_rollout_ref.rollout.multi_turn.on_rewritten_history: "
    "turns are never tokenised again",
    "multi_turn.num_repeat_rollouts": Renamed("actor_rollout_ref.rollout.n"),
    "multi_turn.completion_callback": _OWN_ENVIRONMENT,
    **dict.fromkeys(("rollout.skip", "skip_rollout", "skip_dump_dir"), _ALWAYS_SAMPLES),
    "rollout.trace": "remove it: trainer.rollout_data_dir=FOLDER writes all conversations there",
    "rollout.prometheus": "remove it: trainer.logger chooses where metrics go",
    **dict.fromkeys(("rollout.quantization", "rollout.quantization_config_file"), _WHOLE_SAMPLER),
    "rollout.agent.num_workers": "remove it; with an environment it is environment.processes",
    "rollout.agent": _OWN_ENVIRONMENT,
    "optim.total_training_steps": Renamed("trainer.total_training_steps"),
    "optim.warmup_style": Renamed("optim.lr_scheduler_type"),
    "optim.lr_warmup_steps_per_epoch": Renamed("optim.lr_warmup_steps", "it counts the steps of the run", ""),
    "checkpoint.load_contents": "remove it: rlx loads everything that the checkpoint holds",
    "checkpoint.contents": Renamed("checkpoint.save_contents"),
    "trainer.default_hdfs_dir": Renamed("trainer.default_local_dir", given=""),
    "trainer.remove_previous_ckpt_in_save": _ONE_CHECKPOINT,
    "trainer.del_local_ckpt_after_load": _ONE_CHECKPOINT,
    "trainer.ray_wait_register_center_timeout": _NO_NEED,
    "trainer.nproc_per_node": Renamed("trainer.n_gpus_per_node"),
    "trainer.val_generations_to_log_to_wandb": Renamed("trainer.log_val_generations"),
    "ray_init": Renamed("ray_kwargs.ray_init"),
}


def remedy_for(text: str) -> str | Renamed | None:
    """Return the remedy for a key, or key=value, of verl that rlx does not have, with rlx's whole key; None for any other."""
    padded = f".{text}."
    pattern = max((each for each in REMEDIES if f".{each}." in padded), key=len, default=None)
    if pattern is None:
        return None
    remedy = REMEDIES[pattern]
    if isinstance(remedy, str) or "=" in pattern:
        return remedy
    before, _, below = padded.partition(f".{pattern}.")
    return remedy._replace(to=_whole_key(before.strip("."), f"{remedy.to}.{below}".strip(".")))


def _whole_key(section: str, name: str) -> str:
    """Return the key of this name in the section, or in the nearest group above it; the name alone if there is none."""
    groups = section.split(".")
    keys = [".".join([*groups[:depth], name]) for depth in range(len(groups), 0, -1)]
    return next(filter(is_key, keys), name)
