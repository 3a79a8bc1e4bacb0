"""Operations that a sampler could share, here torch's own: this holds gradients and the comparison of log-probs, no kernels."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlx.models.exact import TORCH, UnequalLogProbs, require_equal, rotary_table, use_kernels
from rlx.models.loading import ModelError
from rlx.models.log_probs import head_replaced

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"vocab_size": 97, "num_hidden_layers": 2}


def figures(model):
    """Log-probs and entropies, and the gradients of both."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(97, (2, 9), generator=drawn)
    with head_replaced(model.get_output_embeddings(), ids, 0.7, True):
        found = model(input_ids=ids, use_cache=False).logits
    (found * torch.randn(found.shape, generator=drawn)).sum().backward()
    return found, torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.mark.parametrize(("config", "kind"), [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)])
def test_figures_and_gradients_are_those_of_the_plain_model(config, kind):
    torch.manual_seed(0)
    plain = kind._from_config(config(**SHAPE)).double()
    for weight in plain.parameters():  # norms have 1 and biases 0
        weight.data += 0.1 * torch.randn_like(weight)
    shared = copy.deepcopy(plain)
    use_kernels(shared, TORCH)
    for found, expected in zip(figures(shared), figures(plain), strict=True):  # whose norms are in fp32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    cos, sin = plain.model.rotary_emb(torch.empty(0), torch.arange(30)[None])
    assert torch.equal(
        rotary_table(plain.config, 30, torch.device("cpu")), torch.cat((cos[0, :, :8], sin[0, :, :8]), -1)
    )
    plain.model.norm = torch.nn.LayerNorm(64)
    with pytest.raises(ModelError, match=r"got a LayerNorm \(model\.norm\), which has no kernel in common"):
        use_kernels(plain, TORCH)


def test_the_first_token_that_differs_is_named():
    sampled = torch.tensor([[-1.5, -2.0, 0.0], [-3.0, -0.25, 0.0]])
    mask, ids = torch.arange(3).expand(2, 3) < 2, torch.arange(6).view(2, 3)
    require_equal(sampled + ~mask, sampled, mask, ids)
    found = sampled.clone()
    found[1] = torch.tensor([-3.0000002, math.nan, 0.0])
    with pytest.raises(
        UnequalLogProbs, match=r"at 2 of 4 tokens, first at token 0 \(id 3\) of response 1 .* and -3\.0,"
    ):
        require_equal(found, sampled, mask, ids)
