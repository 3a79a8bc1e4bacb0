"""Choose the next token from logits and one uniform number.

Shape letters: B sequences, V vocabulary.
"""

import torch
from torch import Tensor

from rlx.rollout.protocol import Sampling


def request_uniforms(seeds: list[int], count: int) -> Tensor:
    """Return `count` numbers in [0, 1) per seed, (len(seeds), count) fp64 on CPU; row i depends on seeds[i] alone."""
    generator = torch.Generator()
    rows = [torch.rand(count, generator=generator.manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)


def choose_tokens(logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Choose each row's next token by inverting the cumulative distribution at the row's uniform number.

    Args:
        logits_BV: (B, V) floating.
        uniforms_B: (B,) fp64 in [0, 1); unused when greedy.
        sampling: temperature, top_k, top_p.

    Returns:
        Tokens (B,) int64 and their log-probs (B,) fp32 under log_softmax(logits / temperature), before top-k and top-p.
    """
    log_probs_BV = torch.log_softmax(logits_BV.float() / sampling.log_prob_temperature, dim=-1)
    if sampling.temperature == 0:
        tokens_B1 = logits_BV.argmax(dim=-1, keepdim=True)
    elif sampling.top_p == 1 and sampling.top_k == -1:
        tokens_B1 = _invert_cdf(log_probs_BV.double().exp(), uniforms_B)
    else:
        tokens_B1 = _choose_truncated(log_probs_BV, uniforms_B, sampling)
    return tokens_B1.squeeze(-1), log_probs_BV.gather(-1, tokens_B1).squeeze(-1)


def _choose_truncated(log_probs_BV: Tensor, uniforms_B: Tensor, sampling: Sampling) -> Tensor:
    """Keep the top_k most likely tokens and, of their renormalised distribution, the nucleus of mass top_p."""
    kept = log_probs_BV.shape[-1] if sampling.top_k == -1 else min(sampling.top_k, log_probs_BV.shape[-1])
    sorted_log_probs, ids = log_probs_BV.sort(dim=-1, descending=True, stable=True)
    probs = sorted_log_probs[:, :kept].double().exp()
    probs = probs / probs.sum(dim=-1, keepdim=True)
    # A token is kept while those before it sum to less than top_p, so the token that crosses it and the first are kept.
    before = probs.cumsum(dim=-1) - probs
    rank = _invert_cdf(probs.where(before < sampling.top_p, 0.0), uniforms_B)
    return ids.gather(-1, rank)


def _invert_cdf(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the first index (B, 1) whose cumulative weight exceeds uniform * total; fp64 keeps the sum accurate enough."""
    cdf_BV = weights_BV.cumsum(dim=-1)
    target_B1 = uniforms_B[:, None] * cdf_BV[:, -1:]
    return torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=weights_BV.shape[-1] - 1)
