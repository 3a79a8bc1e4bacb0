"""Sampling from models whose caches hold states, that count positions from elsewhere, or that cannot be decoded here."""

import copy

import pytest
import torch

from rlx.rollout.hf import HFRollout
from rlx.rollout.protocol import EngineError, Request, Sampling
from tests.tiny_models import config_of, tiny_model

TYPES = [
    *("bamba", "gpt2", "qwen3", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2"),
    *("moshi", "olmo_hybrid", "qwen3_5_text", "qwen3_next", "roberta"),
]
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (3,), (20, 21, 22, 23)]


@pytest.mark.parametrize("name", TYPES)
def test_samples_follow_whole_forwards_without_padding(name):
    """Samples of one prompt share its prefill, and rows leave the batch at different times."""
    model = tiny_model(config_of(name), torch.float32)
    model.set_attn_implementation("eager")
    near = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))
    rollout = HFRollout(model.config, attn_implementation="eager")
    rollout.update_weights(model.state_dict().items(), version=1)
    greedy, sampled = (Sampling(10, temperature, stop_token_ids=tuple(range(1, 40))) for temperature in (0.0, 1.0))
    seeded = [(prompt, 10 * i + j) for i, prompt in enumerate(PROMPTS) for j in range(3)]
    requests = [Request(prompt, seed, sampled) for prompt, seed in seeded] + [
        Request(each, 0, greedy) for each in PROMPTS
    ]
    completions = rollout.generate(requests)
    assert len({len(completion.token_ids) for completion in completions[: len(seeded)]}) > 2
    roundings = []
    for request, completion in zip(requests, completions, strict=True):
        ids, tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]]), torch.tensor(completion.token_ids)
        with torch.no_grad():
            every, other = (
                each(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(-1)
                for each in (model, near)
            )
        # States such as Mamba's amplify rounding, as they do a small change of the weights
        rounding = max(1e-4, 10 * (every - other).abs().max().item())
        roundings.append(rounding)
        expected = every.gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=rounding)
        if request.sampling is greedy:
            torch.testing.assert_close(expected, every.amax(-1), rtol=0, atol=rounding)
    assert sorted(roundings)[len(roundings) // 2] < 0.1, "wrong positions or masks change log-probs by 0.4 and more"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("recurrent_gemma", "changes its logits"),
        ("minimax", "decoding with a cache fails"),
        ("qwen4_exp_text", "decoding with a cache fails"),  # a part of its cache does not follow the rows of the batch
    ],
)
def test_a_model_that_cannot_be_decoded_is_refused_when_it_is_built(name, reason):
    with pytest.raises(EngineError, match=rf"rollout\.name=hf cannot sample from .*{reason}.*; set rollout\.name=vllm"):
        HFRollout(config_of(name), attn_implementation="eager")
