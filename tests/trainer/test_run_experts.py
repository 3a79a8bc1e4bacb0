"""A whole run of a mixture of experts: the sampler's experts travel to the updates of two processes."""

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def mixture(untrained, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(untrained)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # else the weights would follow from the tests before
        model = Qwen3MoeForCausalLM(config)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "mixture")
    return str(tmp_path / "mixture")


def test_replay_leaves_no_difference_and_the_load_is_balanced(train, mixture):
    options = [
        f"actor_rollout_ref.model.path={mixture}",
        "actor_rollout_ref.rollout.dtype=bf16",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
        "actor_rollout_ref.actor.router_aux_loss_coef=0.1",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
    ]
    metrics = {}
    for mode in ("disabled", "R3"):
        _, steps = train(*options, f"actor_rollout_ref.actor.router_replay.mode={mode}")
        assert set(steps) == {1, 2}
        metrics[mode] = steps
        for step in steps.values():
            assert step["mismatch/differing_experts"] > 0
            assert step["actor/router_aux_loss"] > 1 and step["actor/grad_norm"] > 0
    name = "mismatch/differing_experts_used"
    assert [step[name] > 0 for step in metrics["disabled"].values()] == [True, True]
    assert [step[name] for step in metrics["R3"].values()] == [0, 0]
    off = [metrics[mode][1]["mismatch/mean_abs_log_prob"] for mode in ("disabled", "R3")]
    assert off[1] < off[0]
