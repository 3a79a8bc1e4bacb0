"""Keys that are set without effect: one warning lists them all, defaults are silent."""

from functools import cache
from pathlib import Path

import pytest

from rlx.config.check.declared import CheckContext, conditions, unused_keys
from rlx.config.compose.command_line import compose
from rlx.config.machine import Machine
from rlx.config.schema.tree import LEAVES

ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
CORRECTION = "algorithm.rollout_correction"
GAE = "algorithm.adv_estimator=gae"
JUDGE = "reward_model.enable=True reward_model.model.path=org/judge"
OVERLONG = ["reward.overlong_buffer.len", "reward.overlong_buffer.penalty_factor"]

# (command line, the keys in it that have no effect)
CASES = [
    ("data.filter_overlong_prompts=True data.truncation=left", ["data.truncation"]),
    ("data.train_files=a.jsonl data.val_files=a.jsonl data.arithmetic.difficulty=2", ["data.arithmetic.difficulty"]),
    ("data.shuffle=False data.seed=4", ["data.seed"]),
    (f"experiment=arithmetic {MODEL}.path=o/m {MODEL}.tiny.hidden_size=64", [f"{MODEL}.tiny.hidden_size"]),
    (f"experiment=arithmetic {MODEL}.path=o/m warm_start.lr=0.1", ["warm_start.lr"]),
    (f"{GAE} critic.model.tiny.hidden_size=64", ["critic.model.tiny.hidden_size"]),
    (
        f"{MODEL}.enable_activation_offload=False {MODEL}.activation_offload.prefetch_layers=2",
        [f"{MODEL}.activation_offload.prefetch_layers"],
    ),
    (
        f"{GAE} critic.model.enable_activation_offload=False critic.model.activation_offload.prefetch_layers=2",
        ["critic.model.activation_offload.prefetch_layers"],
    ),
    (f"{MODEL}.activation_offload.directory=/tmp", [f"{MODEL}.activation_offload.directory"]),
    (f"{GAE} critic.model.activation_offload.directory=/tmp", ["critic.model.activation_offload.directory"]),
    (f"{MODEL}.activation_offload.max_device_bytes=9", [f"{MODEL}.activation_offload.max_device_bytes"]),
    (
        f"{MODEL}.activation_offload.pin_memory=False {MODEL}.activation_offload.use_streams=False",
        [f"{MODEL}.activation_offload.pin_memory", f"{MODEL}.activation_offload.use_streams"],
    ),
    *(
        (f"{GAE} critic.model.{key}", [f"critic.model.{key.split('=')[0]}"])
        for key in ("activation_offload.max_device_bytes=9", "activation_offload.pin_memory=False")
    ),
    (f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_micro_batch_size_per_gpu=2", [f"{ACTOR}.ppo_micro_batch_size_per_gpu"]),
    (
        f"{GAE} critic.use_dynamic_bsz=True critic.ppo_micro_batch_size_per_gpu=2",
        ["critic.ppo_micro_batch_size_per_gpu"],
    ),
    *(
        (
            f"{role}.log_prob_use_dynamic_bsz=True {role}.log_prob_micro_batch_size_per_gpu=2 {ACTOR}.use_kl_loss=True",
            [f"{role}.log_prob_micro_batch_size_per_gpu"],
        )
        for role in (ROLLOUT, REF)
    ),
    (
        f"{JUDGE} reward_model.use_dynamic_bsz=True reward_model.micro_batch_size_per_gpu=2",
        ["reward_model.micro_batch_size_per_gpu"],
    ),
    (f"{ROLLOUT}.n=1 {MODEL}.use_shared_prefix=True", [f"{MODEL}.use_shared_prefix"]),
    (f"{ACTOR}.optim.master_weights=False", [f"{ACTOR}.optim.master_weights"]),
    (
        f"{ACTOR}.optim.optimizer=_AdamW {ACTOR}.fsdp_config.model_dtype=bf16 {ACTOR}.optim.master_weights=False",
        [f"{ACTOR}.optim.master_weights"],
    ),
    (
        f"{GAE} critic.optim.optimizer=_AdamW critic.fsdp.model_dtype=bf16 critic.optim.master_weights=False",
        ["critic.optim.master_weights"],
    ),
    (f"{GAE} critic.optim.allow_lossy_updates=True", ["critic.optim.allow_lossy_updates"]),
    (f"{MODEL}.lora_alpha=32 {MODEL}.lora.merge=True", [f"{MODEL}.lora_alpha", f"{MODEL}.lora.merge"]),
    (
        f"{MODEL}.lora_rank=4 {ACTOR}.fsdp_config.model_dtype=bf16 {ACTOR}.optim.master_weights=False",
        [f"{ACTOR}.optim.master_weights"],
    ),
    (
        f"{GAE} critic.model.lora_rank=4 critic.fsdp.model_dtype=bf16 critic.optim.master_weights=False "
        "critic.model.lora.merge=True",
        ["critic.model.lora.merge", "critic.optim.master_weights"],
    ),
    (
        f"{MODEL}.lora_rank=4 {ACTOR}.use_kl_loss=True {REF}.fsdp_config.model_dtype=bf16 "
        f"{REF}.log_prob_micro_batch_size_per_gpu=4",
        [f"{REF}.fsdp_config.model_dtype"],
    ),
    (f"{GAE} critic.model.target_modules=q_proj", ["critic.model.target_modules"]),
    (f"{ACTOR}.ppo_max_token_len_per_gpu=9", [f"{ACTOR}.ppo_max_token_len_per_gpu"]),
    (f"{GAE} critic.ppo_max_token_len_per_gpu=9", ["critic.ppo_max_token_len_per_gpu"]),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu=9", [f"{ROLLOUT}.log_prob_max_token_len_per_gpu"]),
    (f"{ACTOR}.use_kl_loss=True {REF}.log_prob_max_token_len_per_gpu=9", [f"{REF}.log_prob_max_token_len_per_gpu"]),
    (f"{ACTOR}.kl_loss_coef=0.1 {ACTOR}.kl_loss_type=mse", [f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"]),
    (f"{REF}.log_prob_micro_batch_size_per_gpu=4", [f"{REF}.log_prob_micro_batch_size_per_gpu"]),
    (f"{ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_low=0.0 {ACTOR}.clip_ratio_high=0.3", [f"{ACTOR}.clip_ratio"]),
    (f"{ACTOR}.optim.lr_scheduler_type=constant {ACTOR}.optim.min_lr_ratio=0.1", [f"{ACTOR}.optim.min_lr_ratio"]),
    (f"{GAE} critic.optim.lr_scheduler_type=constant critic.optim.min_lr_ratio=0.1", ["critic.optim.min_lr_ratio"]),
    (
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1 {ACTOR}.optim.lr_warmup_steps=0",
        [f"{ACTOR}.optim.lr_warmup_steps_ratio"],
    ),
    (
        f"{GAE} critic.optim.lr_warmup_steps_ratio=0.1 critic.optim.lr_warmup_steps=1",
        ["critic.optim.lr_warmup_steps_ratio"],
    ),
    (f"{ACTOR}.fsdp_config.param_offload=True", [f"{ACTOR}.fsdp_config.param_offload"]),
    (f"{ACTOR}.fsdp_config.offload_policy=True", [f"{ACTOR}.fsdp_config.offload_policy"]),
    (
        f"trainer.device=cuda {ACTOR}.use_kl_loss=True {REF}.fsdp_config.optimizer_offload=True",
        [f"{REF}.fsdp_config.optimizer_offload"],
    ),
    ("trainer.balance_batch=False", ["trainer.balance_batch"]),
    (f"{ROLLOUT}.enforce_eager=True", [f"{ROLLOUT}.enforce_eager"]),
    (f"{ROLLOUT}.engine_kwargs.vllm.seed=1", [f"{ROLLOUT}.engine_kwargs.vllm"]),
    (f"{ROLLOUT}.val_kwargs.n=4", [f"{ROLLOUT}.val_kwargs.n"]),
    (f"{ROLLOUT}.include_stop_str_in_output=True", [f"{ROLLOUT}.include_stop_str_in_output"]),
    (f"{ROLLOUT}.stop=x {ROLLOUT}.include_stop_str_in_output=True", []),
    ("custom_reward_function.name=f", ["custom_reward_function.name"]),
    (
        f"environment.timeout_s=9 {ROLLOUT}.multi_turn.max_assistant_turns=3",
        [f"{ROLLOUT}.multi_turn.max_assistant_turns", "environment.timeout_s"],
    ),
    ("environment.name=calculator environment.rewards=replace reward.timeout_s=9", ["reward.timeout_s"]),
    ("algorithm.adv_estimator=grpo algorithm.time_step=turn", ["algorithm.time_step"]),
    (f"custom_reward_function.path={__file__} reward.format_score=0.1", ["reward.format_score"]),
    (f"custom_reward_function.path={__file__} custom_reward_function.data_sources=[a] reward.format_score=0.1", []),
    ("reward.reward_manager.name=batch", ["reward.reward_manager.name"]),
    ("reward.format_weight=1", ["reward.format_weight"]),
    ("reward_model.rule_weight=1", ["reward_model.rule_weight"]),
    (f"{JUDGE} reward.timeout_s=9 reward.on_error=zero", ["reward.timeout_s", "reward.on_error"]),
    (f"{JUDGE} reward_model.rule_weight=1 reward.timeout_s=9 reward.overlong_buffer.enable=True", []),
    (f"{JUDGE} reward_model.forward_max_token_len_per_gpu=9", ["reward_model.forward_max_token_len_per_gpu"]),
    (
        f"{JUDGE} trainer.device=cuda reward_model.model.fsdp_config.optimizer_offload=True",
        ["reward_model.model.fsdp_config.optimizer_offload"],
    ),
    ("algorithm.kl_penalty=k3 algorithm.kl_ctrl.kl_coef=1", ["algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"]),
    ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.horizon=3", ["algorithm.kl_ctrl.horizon"]),
    ("algorithm.gamma=0.9", ["algorithm.gamma"]),
    (
        f"{CORRECTION}.rollout_is_threshold=3 {CORRECTION}.rollout_is_batch_normalize=True",
        [f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_is_batch_normalize"],
    ),
    (f"{CORRECTION}.rollout_rs_threshold=3", [f"{CORRECTION}.rollout_rs_threshold"]),
    (
        f"{CORRECTION}.bypass_mode=True {ROLLOUT}.log_prob_micro_batch_size_per_gpu=2",
        [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"],
    ),
    (
        f"{CORRECTION}.bypass_mode=True {ROLLOUT}.enable_rollout_routing_replay=True",
        [f"{ROLLOUT}.enable_rollout_routing_replay"],
    ),
    (f"{GAE} algorithm.norm_adv_by_std_in_grpo=False", ["algorithm.norm_adv_by_std_in_grpo"]),
    (
        "algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9 algorithm.lam=0.9 trainer.critic_warmup=2",
        ["algorithm.lam", "trainer.critic_warmup"],
    ),
    (
        "algorithm.filter_groups.metric=score algorithm.filter_groups.max_num_gen_batches=3 data.gen_batch_size=9",
        ["data.gen_batch_size", "algorithm.filter_groups.metric", "algorithm.filter_groups.max_num_gen_batches"],
    ),
    ("reward.overlong_buffer.len=9 reward.overlong_buffer.penalty_factor=2", OVERLONG),
    ("reward.overlong_buffer.len=9 reward.overlong_buffer.enable=True", []),
    (f"{ACTOR}.tau_pos=2 {ACTOR}.policy_loss.name=f", [f"{ACTOR}.tau_pos", f"{ACTOR}.policy_loss.name"]),
    (
        f"{ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.tau_neg=2 {ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_c=4",
        [f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_c"],
    ),
    (f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_c=4", [f"{ACTOR}.clip_ratio_c"]),
    (
        f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.policy_loss.path={__file__} {ACTOR}.clip_ratio_c=4 {ACTOR}.tau_pos=2",
        [f"{ACTOR}.policy_loss.loss_mode"],
    ),
    ("reward.max_concurrent=3", ["reward.max_concurrent"]),
    (f"{ROLLOUT}.seed_requests=False", [f"{ROLLOUT}.seed_requests"]),
    (f"{ACTOR}.use_kl_loss=True {REF}.fsdp_config.forward_prefetch=True", [f"{REF}.fsdp_config.forward_prefetch"]),
    ("trainer.critic_warmup=3", ["trainer.critic_warmup"]),
    ("trainer.total_epochs=3", ["trainer.total_epochs"]),
    ("trainer.resume_from_path=/c/global_step_1", ["trainer.resume_from_path"]),
    (
        f"trainer.save_last=False trainer.max_actor_ckpt_to_keep=1 {ACTOR}.checkpoint.save_contents=[model]",
        [f"{ACTOR}.checkpoint.save_contents", "trainer.max_actor_ckpt_to_keep"],
    ),
    ("trainer.save_freq=2 trainer.max_critic_ckpt_to_keep=1", ["trainer.max_critic_ckpt_to_keep"]),
    ("trainer.save_every_minutes=9 trainer.max_actor_ckpt_to_keep=1", []),
    (f"trainer.save_on_sigterm_s=9 {ACTOR}.checkpoint.save_contents=[model]", []),
    (
        f"trainer.test_freq=-1 trainer.val_before_train=False trainer.log_val_generations=2 data.val_batch_size=8 "
        f"{ROLLOUT}.val_kwargs.do_sample=True {ROLLOUT}.val_kwargs.temperature=1",
        [
            "data.val_batch_size",
            f"{ROLLOUT}.val_kwargs.temperature",
            f"{ROLLOUT}.val_kwargs.do_sample",
            "trainer.log_val_generations",
        ],
    ),
]


@cache
def setting(command: str, machine: Machine) -> CheckContext:
    composed = compose(command.split())
    assert composed.faults == ()
    return CheckContext(composed.config, composed.set_keys, machine)


@pytest.mark.parametrize(("command", "keys"), CASES, ids=[case[0] for case in CASES])
def test_keys_without_effect_are_found_and_no_others(cpu_machine: Machine, command: str, keys: list[str]):
    found = unused_keys(setting(command, cpu_machine))
    assert list(found) == [key for key in LEAVES if key in keys]
    assert all(found.values())


def test_every_declared_condition_has_a_case(cpu_machine: Machine):
    reached = set()
    for command, keys in CASES:
        s = setting(command, cpu_machine)
        reached |= {each.why for key in keys for each in conditions()[key] if each.holds(s)}
    assert {each.why for found in conditions().values() for each in found} - reached == set()


@pytest.mark.parametrize(
    "command",
    [
        "",
        f"{ROLLOUT}.enforce_eager=False {ROLLOUT}.gpu_memory_utilization=0.5 algorithm.gamma=1 trainer.critic_warmup=0",
        f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.1 {REF}.log_prob_micro_batch_size_per_gpu=4",
        f"{GAE} trainer.critic_warmup=3 algorithm.lam=0.9",
        "trainer.save_freq=5 trainer.max_actor_ckpt_to_keep=1",
    ],
)
def test_defaults_and_keys_with_effect_are_silent(verdict, command: str):
    assert verdict(command.split()).warnings == ()


def test_values_of_packaged_files_are_not_the_users(verdict):
    # The experiment sets the reference's param_offload; on CPU it has no effect.
    assert not any("without effect" in warning for warning in verdict(["experiment=gsm8k_grpo_8gpu"]).warnings)


def test_one_warning_lists_all_keys(verdict):
    (warning,) = verdict(["algorithm.gamma=0.5", "trainer.critic_warmup=2", f"{ROLLOUT}.enforce_eager=True"]).warnings
    assert [line.split("=")[0].strip() for line in warning.splitlines()[1:]] == [
        f"{ROLLOUT}.enforce_eager",
        "algorithm.gamma",
        "trainer.critic_warmup",
    ]


def test_other_warnings(verdict):
    twice = [f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True", "algorithm.adv_estimator=rloo"]
    assert any("counts twice" in warning for warning in verdict(twice).warnings)
    assert "share 4 CPU cores" in verdict(["trainer.n_gpus_per_node=8"]).warnings[0]
    warmed_up = ["trainer.critic_warmup=3", "algorithm.adv_estimator=gae"]
    assert "never learns" in verdict([*warmed_up, "trainer.total_training_steps=3"]).warnings[0]
    for enough in ("trainer.total_training_steps=4", "trainer.total_training_steps=null"):
        assert verdict([*warmed_up, enough]).warnings == ()


def test_own_rows_are_not_validated_on_generated_problems_without_a_word(verdict, tmp_path: Path):
    (tmp_path / "mine.jsonl").write_text("{}")
    own = [f"data.train_files={tmp_path}/mine.jsonl", "data.answer_key=answer"]
    for recipe in ([], ["experiment=qwen2.5_0.5b_1x24gb"]):
        assert any("validation is on generated problems" in each for each in verdict([*recipe, *own]).warnings)
    for enough in (
        ["trainer.val_before_train=False", "trainer.test_freq=-1"],
        [f"data.val_files={tmp_path}/mine.jsonl"],
    ):
        assert not any("generated problems" in each for each in verdict([*own, *enough]).warnings)


def test_a_key_that_could_not_be_read_is_not_warned_of(verdict):
    assert verdict(["algorithm.gamma=3", "trainer.critic_warmup=x"]).warnings == ()
