"""Sample with a transformers model: batched decoding with a KV cache.

Shape letters: B sequences being decoded, D distinct prompts, P prompt tokens (left padded), V vocabulary.
"""

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rlx.config.schema import ModelConfig
from rlx.heartbeat import beat
from rlx.models.experts import ExpertRouting, recorded
from rlx.models.loading import load_model
from rlx.models.lora import Adapter, adapter_weights, add_lora
from rlx.rollout.change_check import sample_of
from rlx.rollout.flight import RequestsInFlight
from rlx.rollout.hf_experts import experts_by_row
from rlx.rollout.kv_cache import growing_cache
from rlx.rollout.protocol import Completion, EngineError, Request
from rlx.rollout.sampling import choose_tokens, request_uniforms

# Finished sequences leave the batch once they are this share of it, because removing them copies the KV cache.
COMPACT_SHARE = 1 / 8
# Two computations of the same logits may differ by this share of their standard deviation, by the bytes of a weight. In bf16 small
# models differ by 0.01, in fp32 by 1e-5; positions that count padding make 0.4 to 1.5, Nemotron-H's and Zamba2's steps 1e-4 to 0.1.
_LOGITS_TOLERANCE = {2: 0.2, 4: 1e-4, 8: 1e-4}
_RELATIVE_CHANGE, _AMPLIFIED = 1e-6, 10  # of weights, and of the change of logits that follows
_DEVIATION = 2.0  # of the probe's weights, times the root of their width


class HFRollout(RequestsInFlight):
    """A `Rollout` on a transformers causal language model.

    The model is built from its config; its weights only come through `update_weights`.

    Args:
        config: of the model; copied.
        device: of the model.
        dtype: of its weights.
        max_num_seqs: sequences decoded at once.
        attn_implementation: attention kernel, as transformers names it.
        trust_remote_code: allow the config's model class to come from the model's folder.
        with_experts: whether requests may ask for the experts of their tokens.

    Raises:
        EngineError: the model cannot be decoded with a cache, or counts positions in a way of its own.
        RoutingError: the model's experts cannot be recorded.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_num_seqs: int = 1024,
        attn_implementation: str = "sdpa",
        trust_remote_code: bool = False,
        with_experts: bool = False,
    ):
        super().__init__(max_num_seqs)
        self._device = torch.device(device)
        options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
        with self._device:
            self._model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **options)
        self._model.requires_grad_(False).eval()
        self._inputs = _Inputs.of(self._model)
        self._routing = ExpertRouting(self._model, self._read_five, tokens=5) if with_experts else None
        self._version: int | None = None
        self._adapters: dict[str, Adapter] = {}

    def add_adapters(self, config: ModelConfig) -> None:
        """Load the base of a model with adapters; from now on `update_weights` takes the adapters alone.

        Args:
            config: reads the path and the keys of LoRA.

        Raises:
            ModelError: the weights cannot be loaded, or the model takes no such adapters.
        """
        dtype = self._model.dtype
        self.update_weights(load_model(config, "lm", dtype).state_dict().items(), version=0)
        self._version = None
        with self._device:
            self._adapters = add_lora(self._model, config)
        self._model.requires_grad_(False).eval()
        for parameter in self._targets().values():
            parameter.data = parameter.data.to(dtype)

    @property
    def version(self) -> int | None:
        """Version of the weights in use; None until a complete set has arrived."""
        return self._version

    def _read_five(self) -> None:
        self._model(input_ids=torch.arange(5, device=self._device)[None], use_cache=False)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy a complete set of weights into the model, or after `add_adapters` of those of the adapters.

        Args:
            weights: (name in the model's state dict, full tensor) in any order, dtype and device. Of tied weights one
                name is enough.
            version: number that `version` returns from now on.

        Raises:
            ValueError: a name is unknown, missing or sent twice, a shape differs, or tied weights disagree. The model is then
                half written, and requests are refused until a complete set has arrived. Or requests are in flight; the weights
                are then as before.
        """
        self._refuse_in_flight("update_weights")
        self._version = None
        targets = self._targets()
        sent: set[str] = set()
        written: set[int] = set()
        for name, tensor in weights:
            target = targets.get(name)
            if target is None:
                raise ValueError(
                    f"weight {name!r}: got a name that {type(self._model).__name__} lacks, expected one of {_some(targets)}"
                )
            if tensor.shape != target.shape:
                raise ValueError(f"weight {name!r}: got shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
            if name in sent:
                raise ValueError(f"weight {name!r}: got it twice, expected it once")
            sent.add(name)
            value = tensor.detach().to(device=target.device, dtype=target.dtype)
            if id(target) not in written:
                target.detach().copy_(value)
                written.add(id(target))
            elif not torch.equal(target, value):
                raise ValueError(
                    f"weight {name!r}: got other values than the weight it is tied to; untie them in the model's config"
                )
        missing = [name for name, target in targets.items() if id(target) not in written]
        if missing:
            raise ValueError(f"{len(missing)} of {len(targets)} weights did not arrive: {_some(missing)}")
        self._version = version

    def _targets(self) -> dict[str, Tensor]:
        """Return the weights that an update replaces, by name."""
        weights = self._model.state_dict(keep_vars=True)
        return dict(adapter_weights(weights, self._adapters, lambda tensor: tensor)) if self._adapters else weights

    def probe(self) -> Tensor:
        """See Rollout."""
        return sample_of(self._targets().values())

    def sleep(self) -> None:
        """Move the weights to host memory; do nothing on CPU. Raises ValueError."""
        self._refuse_in_flight("sleep")
        if self._device.type != "cpu":
            self._model.to("cpu")
            torch.accelerator.empty_cache()

    def wake(self) -> None:
        """See Rollout: weights are written where they are, and move when the next request comes."""

    def close(self) -> None:
        """Free the memory of the weights."""
        self._version = None
        self._requests.clear()
        self._model.to("meta")

    def _fault(self, request: Request) -> str | None:
        return None if request.prompt_ids else "has an empty prompt; expected at least one token"

    def _advance(self, requests: Mapping[int, Request]) -> list[tuple[int, Completion]]:
        """Complete up to `max_num_seqs` requests.

        Equal prompts share one prefill. Except for rounding, a completion does not depend on the other requests.
        """
        self._model.to(self._device)
        numbers = self._batch(requests)
        return list(zip(numbers, self._decode([requests[number] for number in numbers]), strict=True))

    def _batch(self, requests: Mapping[int, Request]) -> list[int]:
        """Return the numbers of requests to decode together.

        They have the sampling of the oldest request, but for `max_tokens`, and the shortest prompts; equal prompts are next to
        each other.
        """
        kinds = {number: replace(request.sampling, max_tokens=1) for number, request in requests.items()}
        oldest = next(iter(kinds.values()))
        numbers = [number for number, kind in kinds.items() if kind == oldest]
        numbers.sort(key=lambda number: (len(requests[number].prompt_ids), requests[number].prompt_ids))
        return numbers[: self.max_num_seqs]

    @torch.inference_mode()
    def _decode(self, batch: list[Request]) -> list[Completion]:
        sampling, limits = batch[0].sampling, [request.sampling.max_tokens for request in batch]
        longest = max(limits)
        uniforms = request_uniforms([request.seed for request in batch], longest).to(self._device)
        stops = torch.tensor(sampling.stop_token_ids, device=self._device, dtype=torch.int64)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64, device=self._device)
        log_probs = torch.zeros(len(batch), longest, device=self._device)
        lengths = torch.tensor(limits, device=self._device)
        stopped = torch.zeros(len(batch), dtype=torch.bool, device=self._device)

        prompts = [request.prompt_ids for request in batch]
        routing = self._routing if sampling.with_experts else None
        decoder = _Decoder(self._model, self._inputs, prompts, longest, self._device, routing)
        # Of the last tokens that the decoder has read, with the rows that they belong to.
        experts: list[tuple[Tensor, Tensor | None]] = []
        rows = torch.arange(len(batch), device=self._device)  # rows of the batch that the decoder still works on
        running = torch.ones_like(rows, dtype=torch.bool)  # those of them that have not stopped
        for step in range(longest):
            beat()
            experts.append((rows, decoder.experts))
            chosen, chosen_log_probs = choose_tokens(decoder.logits_BV, uniforms[rows, step], sampling)
            tokens[rows, step] = chosen
            log_probs[rows, step] = chosen_log_probs
            ends = torch.isin(chosen, stops) & running
            lengths[rows[ends]] = step + 1
            stopped[rows[ends]] = True
            running &= lengths[rows] > step + 1
            count = int(running.sum())
            if count == 0:
                break
            # A row at its own limit leaves at once: the model may have no position for a token more.
            if count <= (1 - COMPACT_SHARE) * len(rows) or step + 1 in limits:
                keep = running.nonzero().squeeze(-1)
                decoder.keep(keep)
                rows, chosen, running = rows[keep], chosen[keep], running[keep]
            decoder.feed(chosen)
        routed = experts_by_row(experts, [len(prompt) for prompt in prompts], lengths.tolist())
        return [
            Completion(
                ids[:length], values[:length] if sampling.with_log_probs else None, "stop" if stop else "length", own
            )
            for ids, values, length, stop, own in zip(
                tokens.tolist(), log_probs.tolist(), lengths.tolist(), stopped.tolist(), routed, strict=True
            )
        ]


class _Inputs(NamedTuple):
    """The arguments of a model's forward besides tokens and their mask.

    Args:
        cache: name of the argument for the cache.
        first_position: of a sequence; None: the model takes no positions.
        has_window: whether the model's masks follow its `sliding_window`; Moshi's do not, so its cache must keep all tokens.
    """

    cache: str
    first_position: int | None
    has_window: bool

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel) -> "_Inputs":
        """Decode two short prompts with random weights to find out what the model's forward takes."""
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
                if torch.allclose(own, model(input_ids=ids, position_ids=positions, use_cache=False).logits):
                    break
            else:
                raise EngineError(refused % "its positions begin neither at 0 nor behind the padding index")
        inputs = cls(cache, first, _has_window(model, ids))
        try:
            decoder = _Decoder(model, inputs, [tuple(ids[0].tolist()), tuple(ids[0, :1].tolist())], 3, model.device)
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


class _Decoder:
    """The model, its KV cache and the next token's logits for a batch of sequences that grow together."""

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: _Inputs,
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
        mask_BT = (
            None if cache == "cache_params" and ids.shape[1] == 1 < self._length else self._mask_BT[:, : self._length]
        )
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


def _some(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    return ", ".join(repr(name) for name in names[:shown]) + (", …" if len(names) > shown else "")
