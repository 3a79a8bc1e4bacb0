"""Sampling from models whose caches hold states, that count positions from elsewhere, or that cannot be decoded here."""

import pytest
import torch
import transformers as hf

from rlx.benchmarks.sweep.tiny_models import config_of
from rlx.rollout.hf import HFRollout
from rlx.rollout.protocol import EngineError, Request, Sampling

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
EXPERTS = {"num_experts_per_tok": 1}
MAMBA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
ROBERTA = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"} | {"pad_token_id": 1}
CONFIGS = {
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**SMALL, **LINEAR, head_dim=16),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **SMALL, **LINEAR, **EXPERTS, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "bamba": lambda: hf.BambaConfig(**SMALL, **STATES, attn_layer_indices=[1, 3], mamba_chunk_size=8),
    "jamba": lambda: hf.JambaConfig(
        **SMALL, **EXPERTS, num_experts=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False
    ),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **SMALL,
        **EXPERTS,
        **STATES,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=2,
        shared_intermediate_size=16,
    ),
    "lfm2": lambda: hf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"] * 2),
    "falcon_h1": lambda: hf.FalconH1Config(**SMALL, **STATES, mamba_d_ssm=64, mamba_chunk_size=8),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(**SMALL, **LINEAR),
    "mamba": lambda: hf.MambaConfig(**MAMBA),
    "mamba2": lambda: hf.Mamba2Config(**MAMBA, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    "roberta": lambda: hf.RobertaConfig(**ROBERTA, is_decoder=True),
}
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (3,), (20, 21, 22, 23)]


def made(name):
    """A model whose weights are large enough that its distributions are far from uniform."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_follow_whole_forwards_without_padding(name, temperature):
    """Samples of one prompt share its prefill, and rows leave the batch at different times."""
    model = made(name)
    rollout = HFRollout(model.config, attn_implementation="eager")
    rollout.update_weights(model.state_dict().items(), version=1)
    sampling = Sampling(max_tokens=10, temperature=temperature, stop_token_ids=tuple(range(1, 24)))
    requests = [Request(prompt, 10 * i + j, sampling) for i, prompt in enumerate(PROMPTS) for j in range(3)]
    completions = rollout.generate(requests)
    assert temperature == 0.0 or len({len(completion.token_ids) for completion in completions}) > 2
    for request, completion in zip(requests, completions, strict=True):
        ids, tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]]), torch.tensor(completion.token_ids)
        with torch.no_grad():
            every = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = every.gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)
        if temperature == 0.0:
            torch.testing.assert_close(expected, every.amax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            lambda: hf.RecurrentGemmaConfig(**SMALL | {"num_hidden_layers": 3}, lru_width=32, attention_window_size=8),
            "has other logits than one that was not",
        ),
        (
            lambda: hf.MiniMaxConfig(**SMALL, **EXPERTS, num_local_experts=2, layer_types=LINEAR["layer_types"]),
            "decoding with a cache fails",
        ),
        # A part of its cache does not follow the rows of the batch.
        (lambda: config_of("qwen4_exp_text"), "decoding with a cache fails"),
    ],
)
def test_a_model_that_cannot_be_decoded_is_refused_when_it_is_built(config, reason):
    with pytest.raises(EngineError, match=rf"rollout\.name=hf cannot sample from .*{reason}.*; set rollout\.name=vllm"):
        HFRollout(config(), attn_implementation="eager")
