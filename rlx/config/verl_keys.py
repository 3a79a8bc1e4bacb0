"""Keys and values of verl that rlx does not have, and what to do instead."""

_NO_NEED = "remove it: rlx needs no such key"

# A pattern matches a key (or key=value) that equals it, ends with `.pattern`, or lies below such a key.
REMEDIES: dict[str, str] = {
    "use_fused_kernels": "remove it: token log-probs are always computed in chunks, without a copy of the logits in fp32",
    "fused_kernel_options": "remove it: rlx has no fused kernels to choose from",
    "param_dtype=fp16": "use bf16, which needs no loss scaling; rlx has none",
    "reduce_dtype=fp16": "use fp32 or bf16: rlx has no loss scaling",
    "ulysses_sequence_parallel_size": "remove it: rlx has no sequence parallelism yet; activation offloading "
    "(model.enable_activation_offload) is what makes long sequences fit",
    "return_raw_chat": "remove it: the messages always stay with the prompt",
    "return_raw_input_ids": _NO_NEED,
    "return_full_prompt": "remove it: the prompt's text always stays with it",
    "filter_overlong_prompts_workers": _NO_NEED,
    "adv_estimator=grpo_vectorized": "use grpo",
    "adv_estimator=rloo_vectorized": "use rloo",
    "adv_estimator=gpg": "use grpo with norm_adv_by_std_in_grpo=False, and filter_groups for its correction of groups "
    "without a gradient",
    "loss_mode=gpg": "use vanilla: with one optimizer step per batch its gradient is the same",
    "loss_mode=clip_cov": "remove it: it picks tokens of a whole batch, which a micro-batch does not see; to keep entropy up "
    "raise actor.clip_ratio_high",
    "loss_mode=kl_cov": "remove it: it picks tokens of a whole batch, which a micro-batch does not see; to keep entropy up "
    "raise actor.clip_ratio_high",
    "loss_mode=dppo_tv": "write it as a function of your own, actor.policy_loss.path",
    "loss_mode=dppo_kl": "write it as a function of your own, actor.policy_loss.path",
    "loss_scale_factor": "remove it: seq-mean-token-sum-norm divides by data.max_response_length",
    "reward_model.overlong_buffer": "use reward.overlong_buffer",
    "reward_kwargs.overlong_buffer_cfg": "use reward.overlong_buffer",
    "rollout_correction.loss_type": "remove it: the loss is PPO's clipped one, with bypass_mode too",
    "rollout_correction.debug_rollout_actor_probs": "remove it: the sampler's mismatch is logged with bypass_mode too",
    "rollout_rs_threshold_lower": "write both bounds as low_high in algorithm.rollout_correction.rollout_rs_threshold",
    "rollout_is_threshold_lower": "write both bounds as low_high in algorithm.rollout_correction.rollout_is_threshold",
    "rollout_rs=token": "use token_k1",
    "rollout_rs=sequence": "use seq_sum_k1",
    "rollout_rs=geometric": "use seq_mean_k1",
    "rollout_is=geometric": "use rollout_rs=seq_mean_k1: a geometric mean rejects, it does not weigh",
    "tis_imp_ratio_cap": "use algorithm.rollout_correction.rollout_is=token with rollout_is_threshold",
    "ppo_micro_batch_size": "use ppo_micro_batch_size_per_gpu: it counts the samples of one process",
    "log_prob_micro_batch_size": "use log_prob_micro_batch_size_per_gpu: it counts the samples of one process",
    "forward_micro_batch_size": "remove it: values use critic.ppo_micro_batch_size_per_gpu",
    "forward_micro_batch_size_per_gpu": "remove it: values use critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu": "remove it: values use critic.ppo_max_token_len_per_gpu",
    "critic.model.fsdp_config": "use critic.fsdp",
    "critic.fsdp_config": "use critic.fsdp",
    "critic.model.tokenizer_path": "remove it: actor and critic read the same tokens",
    "critic.rollout_n": "remove it: actor_rollout_ref.rollout.n holds for the critic too",
    "wrap_policy": "remove it: each transformer layer is one FSDP unit",
    "hybrid_engine": "remove it: actor, reference and sampler always share their processes",
    "reward_model.reward_manager": "use reward.reward_manager.name",
    "reward_model.micro_batch_size": "use reward_model.micro_batch_size_per_gpu: it counts the samples of one process",
    "reward_model.max_length": "remove it: whole sequences are scored",
    "reward_model.input_tokenizer": "remove it: where the reward model's tokenizer differs from the policy's, it reads texts",
    "reward_model.model.input_tokenizer": "remove it: where the reward model's tokenizer differs from the policy's, it reads "
    "texts",
    "launch_reward_fn_async": "remove it: reward functions run in processes of their own",
    "sandbox_fusion": "remove it: reward functions run in processes of their own, see reward.memory_limit_gb",
    "reward.reward_model": "use reward_model.enable and reward_model.model.path",
    "reward.custom_reward_function": "use custom_reward_function.path and .name",
    "reward_manager.name=prime": "use naive: reward functions always run side by side in processes",
    "reward_manager.name=dapo": "use naive, with reward.overlong_buffer",
    "ref.strategy": "remove it: the reference uses actor_rollout_ref.actor.strategy",
    "use_shm": _NO_NEED,
    "external_lib": "remove it: install a package that registers its model with transformers, or use trust_remote_code",
    "exclude_modules": "name the modules to adapt in actor_rollout_ref.model.target_modules",
    "use_unpad": "remove it: rows are cut to the longest of a micro-batch",
    "rollout.mode": "remove it: rollout and training take turns",
    "rollout.load_format": "remove it: the actor's weights are sent before the first rollout",
    "rollout.layered_summon": "remove it: weights are always sent one by one",
    "rollout.max_model_len": "set data.max_prompt_length and data.max_response_length",
    "rollout.prompt_length": "set data.max_prompt_length",
    "rollout.response_length": "set data.max_response_length",
    "rollout.do_sample": "remove it: training rollouts are always sampled",
    "rollout.ignore_eos": "remove it: a response ends at EOS",
    "rollout.disable_log_stats": _NO_NEED,
    "rollout.multi_turn": "remove it: rollouts have one turn",
    "rollout.agent": "remove it: rollouts have one turn",
    "optim.total_training_steps": "set trainer.total_training_steps",
    "optim.warmup_style": "use lr_scheduler_type",
    "optim.lr_warmup_steps_per_epoch": "use lr_warmup_steps or lr_warmup_steps_ratio",
    "checkpoint.load_contents": "remove it: what the checkpoint holds is loaded",
    "checkpoint.contents": "use checkpoint.save_contents",
    "checkpoint.async_save": "remove it: checkpoints are written before the next step",
    "trainer.default_hdfs_dir": "use trainer.default_local_dir",
    "trainer.remove_previous_ckpt_in_save": "use trainer.max_actor_ckpt_to_keep",
    "trainer.del_local_ckpt_after_load": "use trainer.max_actor_ckpt_to_keep",
    "trainer.ray_wait_register_center_timeout": _NO_NEED,
    "trainer.nproc_per_node": "use trainer.n_gpus_per_node",
    "trainer.val_generations_to_log_to_wandb": "use trainer.log_val_generations",
    "ray_init": "use ray_kwargs.ray_init",
}


def remedy_for(key: str) -> str | None:
    """What to do about a key, or key=value, of verl that rlx does not have; None for any other."""
    padded = f".{key}."
    found = [pattern for pattern in REMEDIES if f".{pattern}." in padded]
    return REMEDIES[max(found, key=len)] if found else None
