#!/usr/bin/env bash
# GRPO on GSM8K with LoRA adapters of a 7B model on one GPU of 80 GB.
#
#   python -m rlx.data.gsm8k --out data/gsm8k        # from the Hugging Face hub, or from files: see --help
#   examples/lora_1gpu.sh [key=value ...]
#
# The base is in bf16, the adapters in fp32. vLLM keeps the base and takes the adapters. The reference of the KL is the policy with
# its adapters off. MODEL names another model, DATA the folder of train.parquet and test.parquet, PYTHON the interpreter that has rlx.
# docs/lora.md has more.
set -euo pipefail
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-data/gsm8k}

"${PYTHON:-python}" -m rlx.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/train.parquet" \
  data.val_files="$DATA/test.parquet" \
  data.train_batch_size=64 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.lora_rank=16 \
  actor_rollout_ref.model.lora_alpha=32 \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.model.enable_activation_offload=True \
  actor_rollout_ref.actor.optim.lr=2e-5 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.fsdp_config.model_dtype=bf16 \
  actor_rollout_ref.actor.fsdp_config.param_offload=True \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.n=8 \
  trainer.n_gpus_per_node=1 \
  trainer.logger="['console','tensorboard']" \
  trainer.project_name=gsm8k \
  trainer.experiment_name=lora_1gpu \
  trainer.test_freq=10 \
  trainer.total_epochs=3 \
  "$@"
