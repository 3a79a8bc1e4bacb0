"""What a reward model's folder must hold, and what its role takes."""

import json
from pathlib import Path

import pytest

from rlx.config.compose.command_line import compose
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Machine
from rlx.config.schema.roles import reward_role

ENABLE = "reward_model.enable=True"
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}
ONE = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "model_type": "qwen3",
    **SHAPE,
}


@pytest.mark.parametrize(
    ("config", "files", "starts"),
    [
        (ONE, ["tokenizer.json"], []),
        (ONE | {"id2label": None, "num_labels": 1}, ["tokenizer_config.json"], []),
        (ONE, [], ["the reward model has no tokenizer"]),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["tokenizer.json"], ["the reward model does not give one score"]),
        (ONE | {"id2label": {"0": "a", "1": "b"}}, ["tokenizer.json"], ["the reward model does not give one score"]),
        ([], ["tokenizer.json"], ["the reward model's folder has no config.json to read"]),
    ],
)
def test_a_reward_model_is_known_by_its_folder(verdict, tmp_path: Path, config, files, starts):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in files:
        (tmp_path / name).touch()
    found = verdict([ENABLE, f"reward_model.model.path={tmp_path}"]).faults
    assert [any(fault.what.startswith(start) for start in starts) for fault in found] == [True] * len(starts)


def test_it_takes_memory_as_a_role_that_is_not_trained(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(ONE))
    options = [ENABLE, f"reward_model.model.path={tmp_path}", "trainer.n_gpus_per_node=2", "trainer.device=cuda"]
    offload = "reward_model.model.fsdp_config.param_offload=True"
    config = compose(["experiment=arithmetic", *options, offload]).config
    assert reward_role(config).micro.rows == config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    forecast = MemoryForecast.of(config, Machine(2, 4, frozenset()))
    reward, after = forecast.phase("reward"), forecast.phase("old_log_prob")
    layer = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 32
    assert reward.parts["weights"] == (100 * 64 + 2 * layer + 64) * 4 / 2 == after.host
    assert reward.parts["gradients"] == reward.parts["optimizer"] == reward.host == 0


def test_its_forward_is_cut_by_its_own_size_else_by_the_actors():
    def micro(*options: str):
        return reward_role(compose(["experiment=arithmetic", *options]).config).micro

    assert micro("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7") == (7, None)
    assert micro("reward_model.micro_batch_size_per_gpu=3") == (3, None)
    assert micro("reward_model.use_dynamic_bsz=True", "reward_model.forward_max_token_len_per_gpu=99") == (None, 99)
