"""Sample with a transformers model: batched decoding with a KV cache."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from rlx.config.schema import ModelConfig
from rlx.heartbeat import beat
from rlx.models.experts import ExpertRouting
from rlx.models.loading import load_model
from rlx.models.lora import Adapter, adapter_weights, add_lora
from rlx.rollout import hf_decoder as decoding
from rlx.rollout.protocol import Completion, EngineLoad, Request, Rollout, evenly_spaced, on_cpu

# Finished sequences leave the batch once they are this share of it, because removing them copies the KV cache.
COMPACT_SHARE = 1 / 8


class HFRollout(Rollout):
    """A `Rollout` on a transformers causal language model.

    The model is built from a copy of its config; its weights only come through `update_weights`.

    Args:
        config, device, dtype, attn_implementation, trust_remote_code: of the model, as transformers names them.
        max_num_seqs: sequences decoded at once.
        with_experts: whether requests may ask for the experts of their tokens.
        tokenizer: for stop strings and bad words.

    Raises EngineError: the model cannot be decoded with a cache, or counts positions in a way of its own; RoutingError: the
    model's experts cannot be recorded.
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
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        super().__init__(max_num_seqs)
        self._device = torch.device(device)
        options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
        with self._device:
            self._model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **options)
        self._model.requires_grad_(False).eval()
        self._inputs = decoding.inputs_of(self._model)
        read_five = partial(self._model, input_ids=torch.arange(5, device=self._device)[None], use_cache=False)
        self._routing = ExpertRouting(self._model, read_five, tokens=5) if with_experts else None
        self._tokenizer: Any = tokenizer  # `_fault` asks for one where a request needs it
        self._adapters: dict[str, Adapter] = {}
        self._unfinished = 0, 0  # of the requests that are decoded now, and all of those

    def add_adapters(self, config: ModelConfig) -> None:
        """Load the base of a model with adapters; from now on `update_weights` takes the adapters alone. Raises ModelError."""
        dtype = self._model.dtype
        self.update_weights(load_model(config, "lm", dtype).state_dict().items(), version=0)
        self.version = None
        with self._device:
            self._adapters = add_lora(self._model, config)
        self._model.requires_grad_(False).eval()
        for parameter in self._targets().values():
            parameter.data = parameter.data.to(dtype)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See Rollout. The weights may come in any order, dtype and device; of tied weights one name is enough.

        Raises ValueError: a name is unknown, missing or sent twice, a shape differs, or tied weights disagree. The model is then
        half written and takes no requests until a complete set has arrived. Or requests are in flight.
        """
        self._require_idle("update_weights")
        self.version = None
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
                    f"weight {name!r}: got values that differ from those of the weight it is tied to; untie them in the model's config"
                )
        missing = [name for name, target in targets.items() if id(target) not in written]
        if missing:
            raise ValueError(f"{len(missing)} of {len(targets)} weights did not arrive: {_some(missing)}")
        self.version = version

    def _targets(self) -> dict[str, Tensor]:
        """Return the weights that an update replaces, by name."""
        weights = self._model.state_dict(keep_vars=True)
        return dict(adapter_weights(weights, lambda tensor: tensor)) if self._adapters else weights

    def probe(self) -> Tensor:
        return on_cpu([evenly_spaced(each) for each in self._targets().values()])

    def close(self) -> None:
        self.version = None
        self._requests.clear()
        self._model.to("meta")

    def _fault(self, request: Request) -> str | None:
        if request.sampling.needs_tokenizer and self._tokenizer is None:
            return "asks for stop strings or bad words, but the sampler was built without a tokenizer"
        return None if request.prompt_ids else "has an empty prompt; expected at least one token"

    def _advance(self, requests: Mapping[int, Request]) -> list[tuple[int, Completion]]:
        """Complete up to `max_num_seqs` requests.

        Equal prompts share one prefill. Except for rounding, a completion does not depend on the other requests.
        """
        numbers = self._batch(requests)
        self._unfinished = len(numbers), len(numbers)
        completions = self._decode([requests[number] for number in numbers])
        self._unfinished = 0, 0
        return list(zip(numbers, completions, strict=True))

    def engine_loads(self) -> list[EngineLoad]:
        running, decoded = self._unfinished
        return [EngineLoad(min(running, self.running), max(0, self.running - decoded))]  # a failed batch leaves its own

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
        sampling, limits = batch[0].sampling, [request.room for request in batch]
        longest = max(limits)
        kept = [request.kept for request in batch]
        uniforms = decoding.request_uniforms([request.seed for request in batch], longest, kept).to(self._device)
        stops = torch.tensor(sampling.stop_token_ids, device=self._device, dtype=torch.int64)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64, device=self._device)
        log_probs = torch.zeros(len(batch), longest, device=self._device)
        lengths = torch.tensor(limits, device=self._device)
        stopped = torch.zeros(len(batch), dtype=torch.bool, device=self._device)

        prompts = [request.prompt_ids for request in batch]
        stop_texts = decoding.StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        bad_words = decoding.bad_word_tokens(self._tokenizer, sampling.bad_words)
        stop_strings: list[str | None] = [None] * len(batch)
        routing = self._routing if sampling.with_experts else None
        decoder = decoding.BatchDecoder(self._model, self._inputs, prompts, longest, self._device, routing)
        in_prompts = None
        penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
        if penalties != (0, 0, 1) or sampling.bad_words or sampling.logit_bias:
            in_prompts = torch.zeros(len(batch), decoder.logits_BV.shape[1], dtype=torch.bool, device=self._device)
            for row, prompt in enumerate(prompts):
                in_prompts[row, list(prompt)] = True
        # Of the last tokens that the decoder has read, with the rows that they belong to.
        experts: list[tuple[Tensor, Tensor | None]] = []
        rows = torch.arange(len(batch), device=self._device)  # rows of the batch that the decoder still works on
        running = torch.ones_like(rows, dtype=torch.bool)  # those of them that have not stopped
        for step in range(longest):
            beat()
            experts.append((rows, decoder.experts))
            changed = None
            if in_prompts is not None:
                said = tokens[rows, :step]
                changed = decoding.changed_logits(decoder.logits_BV, sampling, in_prompts[rows], said, bad_words)
            chosen, chosen_log_probs = decoding.choose_tokens(
                decoder.logits_BV, uniforms[rows, step], sampling, changed
            )
            tokens[rows, step] = chosen
            log_probs[rows, step] = chosen_log_probs
            ends = torch.isin(chosen, stops) & running
            if stop_texts is not None:
                for place in (running & ~ends).nonzero().flatten().tolist():
                    row = int(rows[place])
                    stop_strings[row] = stop_texts.completed_by_last(tokens[row, : step + 1])
                    ends[place] |= stop_strings[row] is not None
            lengths[rows[ends]] = step + 1
            stopped[rows[ends]] = True
            running &= lengths[rows] > step + 1
            count = int(running.sum())
            self._unfinished = count, len(batch)
            if count == 0:
                break
            # A row at its own limit leaves at once: the model may have no position for a token more.
            if count <= (1 - COMPACT_SHARE) * len(rows) or step + 1 in limits:
                keep = running.nonzero().squeeze(-1)
                decoder.keep(keep)
                rows, chosen, running = rows[keep], chosen[keep], running[keep]
            decoder.feed(chosen)
        tokens, log_probs, stopped = tokens.cpu(), log_probs.cpu(), stopped.cpu()
        routed = decoding.experts_by_row(experts, [len(prompt) for prompt in prompts], lengths.tolist())
        return [
            Completion(
                tokens[row, :length].tolist(),
                log_probs[row, :length].tolist() if sampling.with_log_probs else None,
                "stop" if stopped[row] else "length",
                routed[row],
                stop_strings[row],
            )
            for row, length in enumerate(lengths.tolist())
        ]


def _some(names: Iterable[str], shown: int = 3) -> str:
    names = list(names)
    return ", ".join(repr(name) for name in names[:shown]) + (", …" if len(names) > shown else "")
