from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from rlx.config.schema import (
    ActivationOffloadConfig,
    ActorConfig,
    ActorRolloutRefConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PPOConfig,
    RolloutConfig,
    TinyModelConfig,
    TrainerConfig,
)
from rlx.config.schema.roles import critic_settings
from rlx.data.batch import Batch
from rlx.models.tiny import make_tiny

PROMPT_TOKENS, RESPONSE_TOKENS = 9, 6


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a worker finds in the process that Ray made for it: one rank of one."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    shape = TinyModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    model, tokenizer = make_tiny(shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def config(model_folder) -> PPOConfig:
    """The tree of a tiny run whose activations leave the device."""
    model = ModelConfig(
        path=model_folder, enable_activation_offload=True, activation_offload=ActivationOffloadConfig(min_bytes=0)
    )
    everything = CheckpointConfig(save_contents=("model", "optimizer", "extra", "hf_model"))
    actor = ActorConfig(
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=2,
        use_kl_loss=True,
        optim=OptimConfig(lr=1e-2),
        checkpoint=everything,
    )
    tree = PPOConfig(
        data=DataConfig(max_prompt_length=PROMPT_TOKENS, max_response_length=RESPONSE_TOKENS, train_batch_size=4),
        actor_rollout_ref=ActorRolloutRefConfig(model=model, actor=actor, rollout=RolloutConfig(name="hf")),
        critic=CriticConfig(model=ModelConfig(path=None), optim=OptimConfig(lr=1e-2)),
        trainer=TrainerConfig(device="cpu", total_training_steps=3, n_gpus_per_node=2),
    )
    return replace(tree, critic=critic_settings(tree))


@pytest.fixture(scope="session")
def prompts() -> Batch:
    """Five prompts of different lengths."""
    lengths = torch.tensor([[9], [4], [6], [1], [8]])
    mask = torch.arange(PROMPT_TOKENS) >= PROMPT_TOKENS - lengths
    ids = torch.randint(3, 250, mask.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~mask, 0)
    return Batch.of({"prompt_ids": ids, "prompt_mask": mask, "seed": torch.arange(5)})
