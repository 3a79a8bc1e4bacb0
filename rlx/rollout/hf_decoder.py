"""Decode with a transformers model and a KV cache: all sequences of a batch grow by one token at a time.

Shape letters: B sequences being decoded, D distinct prompts, P prompt tokens (left padded), V vocabulary, L layers, K experts of a token.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rlx.models.experts import ExpertRouting, recorded
from rlx.rollout.protocol import EngineError, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARGIN_TOKENS = 8  # a character may have several tokens


def growing_cache(config: PreTrainedConfig, extra_tokens: int, has_window: bool = True) -> DynamicCache:
    """Return a DynamicCache for `config` whose plain layers have room for `extra_tokens` after the first call.

    Layers of other kinds (linear attention, or a sliding window if the model applies it) stay transformers' own.
    """
    cache = DynamicCache(config=config)
    plain = (DynamicLayer,) if has_window else (DynamicLayer, DynamicSlidingWindowLayer)
    cache.layers = [GrowingLayer(extra_tokens) if type(layer) in plain else layer for layer in cache.layers]
    return cache


class GrowingLayer(DynamicLayer):
    """Keys and values (B, heads, tokens, head_dim) as views of buffers with room for more tokens.

    transformers' dynamic cache copies all of them for each new token, which on CPU costs more than a small model's arithmetic.
    """

    def __init__(self, extra_tokens: int):
        super().__init__()
        self._extra_tokens = extra_tokens
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append along the token axis and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if self._buffers is None or stop > self._buffers[0].shape[-2]:
            self._buffers = (self._grown(self.keys, key_states, stop), self._grown(self.values, value_states, stop))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self._show(stop)
        return self.keys, self.values

    def _grown(self, old: Tensor, states: Tensor, stop: int) -> Tensor:
        batch, heads, _, head_dim = states.shape
        buffer = states.new_empty(batch, heads, stop + self._extra_tokens, head_dim)
        if old.numel():
            buffer[:, :, : old.shape[-2]] = old
        return buffer

    def _show(self, tokens: int) -> None:
        keys, values = self._buffers
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]

    def reorder_cache(self, indices: Tensor) -> None:
        """Keep these rows; a row may be named several times. Other kinds of layers have no other method that does."""
        tokens = self.get_seq_length()
        if tokens:
            keys, values = self._buffers
            self._buffers = (torch.index_select(keys, 0, indices), torch.index_select(values, 0, indices))
            self._show(tokens)


class ForwardInputs(NamedTuple):
    """The arguments of a model's forward besides tokens and their mask."""

    cache: str  # name of the argument for the cache
    first_position: int | None  # of a sequence; None: the model takes no positions
    has_window: bool  # whether masks follow the model's `sliding_window`; Moshi's do not: its cache keeps all tokens


class BatchDecoder:
    """The model, its KV cache and the next token's logits for a batch of sequences."""

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: ForwardInputs,
        prompts: list[tuple[int, ...]],
        max_tokens: int,
        device: torch.device,
        routing: ExpertRouting | None = None,
    ):
        self._model, self._inputs, self._routing = model, inputs, routing
        self.experts: Tensor | None = None  # of the tokens read last, (B, tokens, L, K)
        distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        width = max(len(prompt) for prompt in distinct)
        ids_DP = torch.zeros(len(distinct), width, dtype=torch.int64)
        mask_DT = torch.ones(len(distinct), width + max_tokens, dtype=torch.int64)
        for prompt, row in distinct.items():
            ids_DP[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_DT[row, : width - len(prompt)] = 0
        self._length = width
        self._mask_BT = mask_DT.to(device)
        self._positions_B1 = torch.tensor([[len(prompt) - 1] for prompt in distinct], device=device)
        self._cache = growing_cache(model.config, max_tokens, inputs.has_window)
        positions_DP = (mask_DT[:, :width].cumsum(dim=-1) - 1).clamp_(min=0)
        self._forward(ids_DP.to(device), positions_DP.to(device))
        self.keep(torch.tensor([distinct[prompt] for prompt in prompts], device=device))

    def _forward(self, ids: Tensor, positions: Tensor) -> None:
        cache, first, _ = self._inputs
        # State-space models that have a state read the mask as that of the new tokens.
        has_state = cache == "cache_params" and ids.shape[1] == 1 < self._length
        mask_BT = None if has_state else self._mask_BT[:, : self._length]
        inputs = {
            "input_ids": ids,
            "attention_mask": mask_BT,
            cache: self._cache,
            **({} if first is None else {"position_ids": positions + first}),
        }

        def run() -> None:
            self.logits_BV = self._model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]

        if self._routing is None:
            return run()
        layers = self._model.config.get_text_config().num_hidden_layers
        self.experts = recorded(self._routing, layers, run).unflatten(0, ids.shape)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows; a row may be named several times."""
        self._cache.reorder_cache(rows)
        self._mask_BT = self._mask_BT[rows]
        self._positions_B1 = self._positions_B1[rows]
        self.logits_BV = self.logits_BV[rows]
        self.experts = None if self.experts is None else self.experts[rows]

    def feed(self, tokens_B: Tensor) -> None:
        """Append one token to each sequence and compute the logits of the next."""
        self._length += 1
        self._positions_B1 = self._positions_B1 + 1
        self._forward(tokens_B[:, None], self._positions_B1)


def experts_by_row(
    steps: list[tuple[Tensor, Tensor | None]], prompts: list[int], lengths: list[int]
) -> Sequence[Tensor | None]:
    """Return each row's experts from its first prompt token to the last token that was read, (tokens, L, K) on CPU.

    Args:
        steps: numbers of rows and their experts (rows, tokens, L, K), first of the left-padded prompts, then of each new token.
        prompts, lengths: tokens of each row's prompt and completion.
    """
    (_, first), *later = steps
    if first is None:
        return [None] * len(prompts)
    width = first.shape[1]
    every = first.new_zeros(len(prompts), width + len(later), *first.shape[2:])
    every[:, :width] = first
    for step, (rows, experts) in enumerate(later):
        assert experts is not None
        every[rows, width + step] = experts[:, 0]
    every = every.cpu()
    return [own[width - p : width + n - 1].clone() for own, p, n in zip(every, prompts, lengths, strict=True)]


def request_uniforms(seeds: list[int], count: int, kept: Sequence[int] | None = None) -> Tensor:
    """Return `count` numbers in [0, 1) per seed, (len(seeds), count) fp64 on CPU; row i depends on seeds[i] alone.

    With `kept`, row i is what follows the first kept[i] numbers of its seed.
    """
    generator, skipped = torch.Generator(), kept or [0] * len(seeds)
    rows = [
        torch.rand(skip + count, generator=generator.manual_seed(seed), dtype=torch.float64)[skip:]
        for seed, skip in zip(seeds, skipped, strict=True)
    ]
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
    """Finds strings, at least one, in texts that grow by tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", strings: Sequence[str]):
        self._tokenizer, self._strings = tokenizer, strings
        self._longest = max(len(each.encode()) for each in strings)

    def completed_by_last(self, token_ids: Tensor | list[int]) -> str | None:
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


# Two computations of the same logits may differ by this share of their standard deviation, by the bytes of a weight. In bf16 small
# models differ by 0.01, in fp32 by 1e-5; positions that count padding make 0.4 to 1.5, Nemotron-H's and Zamba2's steps 1e-4 to 0.1.
_LOGITS_TOLERANCE = {2: 0.2, 4: 1e-4, 8: 1e-4}
_RELATIVE_CHANGE, _AMPLIFIED = 1e-6, 10  # of weights, and of the change of logits that follows
_DEVIATION = 2.0  # of the probe's weights, times the root of their width


@torch.inference_mode()
def inputs_of(model: PreTrainedModel) -> ForwardInputs:
    """Decode two short prompts with random weights to find out what the model's forward takes; changes the weights.

    Raises EngineError: the model cannot be decoded with a cache, or counts positions in a way of its own.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    refused = f"rollout.name=hf cannot sample from {name}: %s; set rollout.name=vllm, or take another model"
    _enlarge(model)
    taken = inspect.signature(model.forward).parameters
    cache = next((argument for argument in ("past_key_values", "cache_params") if argument in taken), None)
    if cache is None:
        raise EngineError(refused % "its forward accepts no cache, expected past_key_values or cache_params")
    padding = getattr(config, "pad_token_id", None)
    ids = torch.tensor([[token for token in range(4) if token != padding][:3]], device=model.device)
    first = None
    if "position_ids" in taken:
        own = model(input_ids=ids, use_cache=False).logits
        for first in (0, (padding or 0) + 1):  # RoBERTa's positions begin after the padding index
            positions = torch.arange(first, first + 3, device=model.device)[None]
            placed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            if (placed - own).abs().max() <= _LOGITS_TOLERANCE[own.element_size()] * own.std():
                break
        else:
            raise EngineError(refused % "its positions begin neither at 0 nor after the padding index")
    inputs = ForwardInputs(cache, first, _has_window(model, ids))
    try:
        decoder = BatchDecoder(model, inputs, [tuple(ids[0].tolist()), tuple(ids[0, :1].tolist())], 3, model.device)
        decoder.keep(torch.tensor([1, 1, 1], device=model.device))
        for token in ids[0, [1, 2, 1]]:
            decoder.feed(token.expand(3))
    except Exception as error:
        raise EngineError(refused % f"decoding with a cache fails ({error})") from error
    expected, found = model(input_ids=ids[:, [0, 1, 2, 1]], use_cache=False).logits[:, -1], decoder.logits_BV
    tolerance = _LOGITS_TOLERANCE[expected.element_size()] * expected.std()
    if (found - expected).abs().max() > max(tolerance, _rounding(model, ids[:, [0, 1, 2, 1]])):
        raise EngineError(refused % "padding and decoding with a cache changes its logits")
    return inputs


def _has_window(model: PreTrainedModel, ids: Tensor) -> bool:
    """Whether a window of two tokens changes the output of three."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None:
        return True
    own = model(input_ids=ids, use_cache=False).logits
    config.sliding_window = 2
    try:
        return not torch.allclose(own, model(input_ids=ids, use_cache=False).logits)
    finally:
        config.sliding_window = window


def _rounding(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return how much rounding may change a model's last logits; changes its weights.

    Kimi-Linear's states, for example, make 5e-4 of the deviation of its logits from the rounding of fp32.
    """
    before = model(input_ids=ids, use_cache=False).logits[:, -1]
    for parameter in model.parameters():
        parameter.mul_(1 + _RELATIVE_CHANGE * torch.randn_like(parameter))
    return _AMPLIFIED * (model(input_ids=ids, use_cache=False).logits[:, -1] - before).abs().max()


def _enlarge(model: PreTrainedModel) -> None:
    """Make positions, masks and padding matter: narrow models begin with small weights, and biases with 0."""
    for parameter in model.parameters():
        if parameter.dim() <= 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            deviation = parameter.detach().flatten()[:4096].float().std() * parameter.shape[-1] ** 0.5
            if 0 < deviation < _DEVIATION:
                parameter.mul_(_DEVIATION / deviation)
