"""Choose the next token from logits and one uniform number, and find the end of a text.

Shape letters: B sequences, V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlx.rollout.protocol import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARGIN_TOKENS = 8  # a character may have several tokens


def request_uniforms(seeds: list[int], count: int) -> Tensor:
    """Return `count` numbers in [0, 1) per seed, (len(seeds), count) fp64 on CPU; row i depends on seeds[i] alone."""
    generator = torch.Generator()
    rows = [torch.rand(count, generator=generator.manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows)


def choose_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling, changed_BV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose each row's next token by inverting the cumulative distribution at the row's uniform number.

    Args:
        logits_BV: (B, V) floating.
        uniforms_B: (B,) fp64 in [0, 1); unused when greedy.
        sampling: temperature, min_p, top_k, top_p.
        changed_BV: logits after penalties and biases, to choose from.

    Returns:
        Tokens (B,) int64 and their log-probs (B,) fp32 under log_softmax(logits / temperature), before penalties and cuts.
    """
    log_probs_BV = torch.log_softmax(logits_BV.float() / sampling.log_prob_temperature, dim=-1)
    chosen_BV = log_probs_BV
    if changed_BV is not None:
        chosen_BV = torch.log_softmax(changed_BV / sampling.log_prob_temperature, dim=-1)
    if sampling.temperature == 0:
        tokens_B1 = (logits_BV if changed_BV is None else changed_BV).argmax(dim=-1, keepdim=True)
    elif sampling.top_p == 1 and sampling.top_k == -1 and sampling.min_p == 0:
        tokens_B1 = _invert_cdf(chosen_BV.double().exp(), uniforms_B)
    else:
        tokens_B1 = _choose_truncated(chosen_BV, uniforms_B, sampling)
    return tokens_B1.squeeze(-1), log_probs_BV.gather(-1, tokens_B1).squeeze(-1)


def changed_logits(
    logits_BV: Tensor, sampling: Sampling, prompts_BV: Tensor, said_BT: Tensor, bad_words: Sequence[Sequence[int]]
) -> Tensor:
    """Return logits in fp32 after biases, penalties and bad words, in this order.

    Args:
        logits_BV: (B, V) floating.
        sampling: names them.
        prompts_BV: (B, V) bool, which tokens the prompts have.
        said_BT: tokens of the completions so far.
        bad_words: tokens of each.
    """
    changed = logits_BV.float().clone()
    for token, bias in sampling.logit_bias:
        changed[:, token] += bias
    counts = torch.zeros_like(changed).scatter_add_(1, said_BT, torch.ones_like(said_BT, dtype=torch.float32))
    factor = torch.where((counts > 0) | prompts_BV, sampling.repetition_penalty, 1.0)
    changed = torch.where(changed > 0, changed / factor, changed * factor)
    changed -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    for *before, last in bad_words:
        if len(before) <= said_BT.shape[1]:
            end = said_BT[:, said_BT.shape[1] - len(before) :]
            changed[(end == torch.tensor(before, device=end.device)).all(dim=1), last] = -torch.inf
    return changed


def bad_word_tokens(tokenizer: "PreTrainedTokenizerBase", words: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each word, and of the word after a space where these are as many but begin otherwise, as vLLM does."""
    found: list[list[int]] = []
    for word in words:
        plain, spaced = (tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        found += [plain, *([spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [])]
    return [tokens for tokens in found if tokens]


class StopStrings:
    """Finds strings in texts that grow by tokens.

    Args:
        tokenizer: of the model.
        strings: at least one.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", strings: Sequence[str]):
        self._tokenizer, self._strings = tokenizer, strings
        self._longest = max(len(each.encode()) for each in strings)

    def completed_by_last(self, token_ids: list[int]) -> str | None:
        """Return the string that the last token completes; those before it have completed none."""
        count = self._longest + MARGIN_TOKENS
        while True:
            text = self._tokenizer.decode(
                token_ids[-count:], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            if len(text) >= self._longest or count >= len(token_ids):  # tokens of broken characters may have no text
                return next((each for each in self._strings if each in text), None)
            count *= 2


def _choose_truncated(log_probs_BV: Tensor, uniforms_B: Tensor, sampling: Sampling) -> Tensor:
    """Keep tokens of min_p, of these the top_k most likely and, of their renormalised distribution, the nucleus of mass top_p."""
    kept = log_probs_BV.shape[-1] if sampling.top_k == -1 else min(sampling.top_k, log_probs_BV.shape[-1])
    sorted_log_probs, ids = log_probs_BV.sort(dim=-1, descending=True, stable=True)
    probs = sorted_log_probs[:, :kept].double().exp()
    if sampling.min_p > 0:
        probs = probs.where(probs >= sampling.min_p * probs[:, :1], 0.0)
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
