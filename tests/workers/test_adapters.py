"""Actor and sampler of a run with adapters: a reference without a model of its own, and syncs of adapters or of merged weights."""

from dataclasses import replace

import pytest
import torch

from rlx.config.schema import LoraConfig, TinyModelConfig
from rlx.models.tiny import make_tiny


@pytest.fixture(params=["adapters", "merged", "nf4", pytest.param("nf4-merged", marks=pytest.mark.slow)])
def ranks(request, config, two_ranks, tmp_path):
    policy, kind = config.actor_rollout_ref, request.param
    model = replace(policy.model, lora_rank=2, lora=LoraConfig(merge="merged" in kind))
    if "nf4" in kind:
        pytest.importorskip("bitsandbytes", reason="NF4 needs bitsandbytes (rlx[nf4])")
        shape = TinyModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
        for part in make_tiny(shape):
            part.save_pretrained(tmp_path)
        model = replace(model, path=str(tmp_path), quantization="nf4")
    two_ranks("adapters", "start", replace(config, actor_rollout_ref=replace(policy, model=model)))
    yield two_ranks
    two_ranks("adapters", "stop")


@pytest.mark.slow
def test_steps_with_adapters_and_a_sampler_that_loses_its_weights(ranks, prompts):
    first = ranks("adapters", "step", prompts, 1)
    for batch, version in first:
        assert torch.equal(batch["ref_log_probs"], batch["old_log_probs"]), "the adapters are 0"
        assert version == 1
    for (batch, version), (before, _) in zip(ranks("adapters", "step", prompts, 2), first, strict=True):
        real = batch["response_mask"]
        assert not torch.allclose(batch["ref_log_probs"][real], batch["old_log_probs"][real], atol=1e-6)
        torch.testing.assert_close(batch["rollout_log_probs"][real], batch["old_log_probs"][real], atol=1e-4, rtol=0)
        assert version == 2 and not torch.equal(batch["rollout_log_probs"], before["rollout_log_probs"])
    for message in ranks("adapters", "stale", prompts):
        assert "of the policy's sampled weights changed, but none of" in message
