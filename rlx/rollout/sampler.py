"""Build a worker's sampler, complete batches with it, and check that new weights reach it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.config.vllm_range import supported_vllm
from rlx.data.batch import Batch, BatchError, right_padded
from rlx.errors import ExplainedError
from rlx.models.exact import TORCH, Kernels
from rlx.models.loading import load_config
from rlx.rollout.engines import EngineProcess, EngineRollout, start_engines
from rlx.rollout.hf import HFRollout
from rlx.rollout.protocol import Completion, Kept, Request, Rollout, Sampling, evenly_spaced, on_cpu

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

SAMPLER_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# If so many elements of the sampler's sample should have changed and none did, it is no accident: bf16 hides small updates of most
# elements, so few changes prove nothing.
SURE = 64


def build_rollout(
    rollout: RolloutConfig,
    model: ModelConfig,
    device: torch.device,
    context_length: int,
    seed: int = 0,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    engines: Sequence[EngineProcess] = (),
    silence_s: float = math.inf,
) -> Rollout:
    """Return the sampler of `rollout.name`, still without weights. All processes build theirs together.

    Args:
        rollout, model: the configuration; the model's weights are read only if the trainer sends adapters alone.
        device: where it decodes.
        context_length: longest prompt and response together [tokens].
        seed: of the engine itself.
        tokenizer: for stop strings and bad words.
        engines, silence_s: of `EngineRollout`; by default as many as `rollout.engines_per_gpu` are started now.

    Raises ValueError: the sampler does not support the model or the options; ImportError: vLLM is not installed in a version that
    rlx works with.
    """
    config = load_config(model)
    vocabulary = config.get_text_config().vocab_size
    if beyond := [token for token in rollout.val_kwargs.logit_bias if int(token) >= vocabulary]:
        raise ValueError(
            f"actor_rollout_ref.rollout.val_kwargs.logit_bias: got token {beyond[0]}, expected one of {model.path}, which has "
            f"tokens below {vocabulary}"
        )
    if rollout.name == "vllm":
        supported_vllm()
        if engines := engines or start_engines(rollout):
            return EngineRollout(engines, rollout, model, device, context_length, seed, tokenizer, silence_s)
        from rlx.rollout.vllm import VLLMRollout  # takes seconds

        return VLLMRollout(rollout, model, device, context_length, seed, tokenizer)
    sampler = HFRollout(
        config,
        device=device,
        dtype=sampler_dtype(rollout, device),
        max_num_seqs=rollout.max_num_seqs,
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
        with_experts=rollout.enable_rollout_routing_replay,
        tokenizer=tokenizer,
    )
    if model.sends_adapters:
        sampler.add_adapters(model)
    return sampler


def kernels_of_sampler(device: torch.device) -> Kernels:
    """Return the operations of the sampler with `rollout.exact`; on a CPU, where `rlx check` rejects it, torch's."""
    if device.type == "cpu":
        return TORCH
    from rlx.rollout import vllm_exact  # imports vLLM

    vllm_exact.require_device(device)
    return vllm_exact.KERNELS


def sampler_dtype(rollout: RolloutConfig, device: torch.device) -> torch.dtype:
    """Return the type of a sampler's weights; `auto` is bf16 on accelerators, fp32 on CPU."""
    return SAMPLER_DTYPES.get(rollout.dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)


def stop_tokens(tokenizer: "PreTrainedTokenizerBase", generation: "GenerationConfig | None") -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's EOS and those of the model's generation config."""
    listed = generation.eos_token_id if generation else None
    more = [listed] if isinstance(listed, int) else listed or []
    return tuple(sorted({int(tokenizer.eos_token_id), *(int(token) for token in more)}))


def generate_batch(
    rollout: Rollout,
    batch: Batch,
    sampling: Sampling,
    pad_token_id: int,
    response_length: int,
    done: dict[int, Completion] | None = None,
) -> Batch:
    """Complete each row once.

    Args:
        rollout: the sampler; it has received weights.
        batch: with prompt_ids, prompt_mask and seed; other columns and info are kept.
        sampling: the same for every row.
        pad_token_id: fills responses on the right.
        response_length: R, the width of the response columns [tokens], at least `max_tokens`.
        done: completions by row, see `Rollout.generate`.

    Returns:
        The batch with input_ids, attention_mask, response_mask, policy_versions and, if `sampling` asks for them,
        rollout_log_probs and routed_experts, instead of prompt_ids and prompt_mask; without rows one without rows.

    Raises ValueError: max_tokens exceeds `response_length`; BatchError: a column is missing or a prompt is empty.
    """
    if sampling.max_tokens > response_length:
        raise ValueError(
            f"max_tokens: got {sampling.max_tokens}, expected at most {response_length}, the width of the response columns"
        )
    completions, version = rollout.generate(_requests(batch, sampling), done), rollout.version
    assert version is not None
    kept = [Kept().continued(completion, version) for completion in completions]
    samples = samples_of(batch, kept, pad_token_id, response_length, sampling.with_log_probs)
    if sampling.with_experts and len(batch):
        starts = (batch["prompt_mask"].shape[1] - batch["prompt_mask"].sum(dim=1)).tolist()
        experts = [completion.experts for completion in completions]
        samples = samples.with_(routed_experts=_placed(experts, starts, samples["input_ids"].shape[1]))
    return samples


def continue_batch(
    rollout: Rollout, batch: Batch, sampling: Sampling, done: dict[int, Completion] | None = None
) -> Batch:
    """Sample more tokens of each row, which info `kept` begins, at most as many as its `budget`; return seed and `kept`.

    `done` as in `generate_batch`.
    """
    begun, requests = batch.info["kept"], list[Request]()
    for request, kept, most in zip(_requests(batch, sampling), begun, batch["budget"].tolist(), strict=True):
        tokens = (*request.prompt_ids, *kept.token_ids)
        requests.append(replace(request, prompt_ids=tokens, kept=len(kept.token_ids), budget=most or None))
    completions, version = rollout.generate(requests, done), rollout.version
    assert version is not None
    pairs = zip(begun, completions, strict=True)
    return batch.select("seed").with_({"kept": [kept.continued(completion, version) for kept, completion in pairs]})


def _requests(batch: Batch, sampling: Sampling) -> list[Request]:
    prompts, masks, seeds = batch["prompt_ids"], batch["prompt_mask"], batch["seed"]
    empty = (~masks.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise BatchError(f"row {empty[0]} has an empty prompt; expected at least one token")
    # Lists and arrays of the whole batch; row by row this would take as long as several steps of decoding.
    starts = (prompts.shape[1] - masks.sum(dim=1)).tolist()
    return [
        Request(tuple(ids[start:]), seed, sampling)
        for ids, start, seed in zip(prompts.tolist(), starts, seeds.tolist(), strict=True)
    ]


def samples_of(
    batch: Batch, kept: Sequence[Kept], pad_token_id: int, response_length: int, with_log_probs: bool
) -> Batch:
    """Return the prompts of a batch with these responses, see `generate_batch`."""
    responses, mask = right_padded([each.token_ids for each in kept], response_length, torch.int64, pad_token_id)
    versions, _ = right_padded([each.versions for each in kept], response_length, torch.int32)
    samples = batch.drop("prompt_ids", "prompt_mask").with_(
        input_ids=torch.cat([batch["prompt_ids"], responses], dim=1),
        attention_mask=torch.cat([batch["prompt_mask"], mask], dim=1),
        response_mask=mask,
        policy_versions=versions,
    )
    if not with_log_probs:
        return samples
    log_probs, _ = right_padded([each.log_probs for each in kept], response_length, torch.float32)
    return samples.with_(rollout_log_probs=log_probs)


def _placed(experts: Sequence[Tensor | None], starts: Sequence[int], width: int) -> Tensor:
    """Return the experts of all rows, each from its first prompt token on, (B, width, L, K)."""
    first = experts[0]
    assert first is not None
    placed = torch.zeros(len(experts), width, *first.shape[1:], dtype=first.dtype)
    for row, (own, start) in enumerate(zip(experts, starts, strict=True)):
        assert own is not None
        placed[row, start : start + len(own)] = own
    return placed


class StaleSamplerError(ExplainedError, RuntimeError):
    """The sampler still has its old weights after a sync of new ones."""


class ChangeCheck:
    """Detects a sampler whose weights do not change although the policy's do.

    A sync compares a sample of the policy's weights and one of the sampler's with those of the sync before. Elements of the two
    samples need not correspond, because vLLM fuses, pads and shards weights.

    Args:
        dtype: of the sampler's weights; a change of the policy that it rounds away is none.
    """

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        self._sent: list[Tensor] = []
        self._before: tuple[Tensor, Tensor] | None = None

    def watched(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights on their way to the sampler and take samples of them."""
        self._sent = []
        for name, tensor in weights:
            self._sent.append(evenly_spaced(tensor))
            yield name, tensor

    def require_change(self, found: Tensor, version: int) -> None:
        """Compare with the sync before; `found` is the sampler's `probe`. Raises StaleSamplerError if only the policy changed."""
        sent = on_cpu(self._sent).to(self._dtype).float()
        self._sent = []  # they hold device memory
        before, self._before = self._before, (sent, found)
        if before is None or before[0].shape != sent.shape or before[1].shape != found.shape:
            return
        share = (before[0] != sent).double().mean().item() if len(sent) else 0.0
        if share * len(found) >= SURE and torch.equal(before[1], found):
            raise StaleSamplerError(
                f"sync of version {version}: {share:.1%} of the policy's sampled weights changed, but none of {len(found):,} "
                "of the sampler's; expected new weights there. It would keep sampling from old weights. Update vLLM or set "
                "actor_rollout_ref.rollout.name=hf; with adapters, actor_rollout_ref.model.lora.merge=True sends all weights"
            )
