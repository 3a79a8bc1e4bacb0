"""Find out by trial what a transformers model's forward takes, and whether the model can be decoded with a cache."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlx.rollout.hf_decoder import BatchDecoder, ForwardInputs
from rlx.rollout.protocol import EngineError

# Two computations of the same logits may differ by this share of their standard deviation, by the bytes of a weight. In bf16 small
# models differ by 0.01, in fp32 by 1e-5; positions that count padding make 0.4 to 1.5, Nemotron-H's and Zamba2's steps 1e-4 to 0.1.
_LOGITS_TOLERANCE = {2: 0.2, 4: 1e-4, 8: 1e-4}
ATTEMPTS = 3
_RELATIVE_CHANGE, _AMPLIFIED = 1e-6, 10  # of weights, and of the change of logits that follows
_DEVIATION = 2.0  # of the probe's weights, times the root of their width


@torch.inference_mode()
def inputs_of(model: PreTrainedModel) -> ForwardInputs:
    """Decode two short prompts with random weights to find out what the model's forward takes; changes the weights.

    A model that fails is tried with other weights: with some, rounding alone makes a router choose other experts.

    Raises:
        EngineError: the model cannot be decoded with a cache, or counts positions in a way of its own.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _tried(model)
        except EngineError:
            if attempt == ATTEMPTS:
                raise
            for parameter in model.parameters():
                parameter.mul_(torch.randn_like(parameter).sign())
    raise AssertionError


def _tried(model: PreTrainedModel) -> ForwardInputs:
    name, config = type(model).__name__, model.config.get_text_config()
    refused = f"rollout.name=hf cannot sample from {name}: %s; set rollout.name=vllm, or take another model"
    _enlarge(model)
    taken = inspect.signature(model.forward).parameters
    cache = next((argument for argument in ("past_key_values", "cache_params") if argument in taken), None)
    if cache is None:
        raise EngineError(refused % "its forward takes no cache, expected past_key_values or cache_params")
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
            raise EngineError(refused % "its positions begin neither at 0 nor behind the padding index")
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
        raise EngineError(
            refused % "a row that was padded and decoded with a cache has other logits than one that was not"
        )
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
