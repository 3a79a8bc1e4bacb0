"""Compare rlx's samplers with transformers' `generate` and with whole forwards of the trainer."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from benchmarks.sweep.reference import P, R, logits_of
from benchmarks.sweep.trainer import MICRO, TinyModel, engine, refusals
from rlx.config.schema import EngineKwargsConfig, ModelConfig, RolloutConfig
from rlx.data.batch import Batch
from rlx.engine.engine import Engine
from rlx.models.loading import load_config
from rlx.rollout.hf import HFRollout
from rlx.rollout.protocol import Completion, Request, Rollout, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")
TEMPERATURES = (0.0, 1.0)


def hf_error(made: TinyModel) -> tuple[float, str]:
    """Return the error of `rollout.name=hf`, in fp32."""
    trained, plain = engine(made), made.model("lm")
    model = ModelConfig(path=str(made.folder), attn_implementation=made.attention)
    with refusals():
        sampler = HFRollout(load_config(model), dtype=torch.float32, attn_implementation=model.attn_implementation)
    return sampler_error(made.batch, trained, plain, sampler)


def vllm_error(made: TinyModel) -> tuple[float, str]:
    """Return the error of `rollout.name=vllm`, in fp32."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

    small = EngineKwargsConfig(vllm={"block_size": 32, "kv_cache_memory_bytes": 1 << 22})
    rollout = RolloutConfig(name="vllm", engine_kwargs=small)
    batch, trained, plain = made.batch, engine(made), made.model("lm")
    from rlx.rollout.vllm import VLLMRollout  # takes seconds, and may not be installed

    with refusals():
        model = ModelConfig(path=str(made.folder), attn_implementation=made.attention)
        sampler = VLLMRollout(rollout, model, CPU, P + R, 0)
    return sampler_error(batch, trained, plain, sampler)


def sampler_error(sweep_batch: Batch, trained: Engine, plain: "PreTrainedModel", sampler: Rollout) -> tuple[float, str]:
    """Return the largest difference of a sampler's log-probs to the trainer's, and of the tokens' to the most likely ones."""
    weights = ((name, x.float()) for name, x in trained.weights.full())
    sampler.update_weights(weights, version=1)
    errors, note = [0.0], ""
    for temperature in TEMPERATURES:
        # Two samples of each prompt share its prefill, and leave the batch at different times.
        sampling = Sampling(R, temperature, stop_token_ids=tuple(range(3, 40)))
        prompts = prompts_of(sweep_batch)
        requests = [Request(prompt, 2 * i + j, sampling) for i, prompt in enumerate(prompts) for j in range(2)]
        answers = sampler.generate(requests)
        batch = batch_of(requests, answers)
        found = trained.log_probs(batch, MICRO, 1.0, with_entropy=False)["log_probs"]
        mask = batch["response_mask"]
        told = torch.cat([torch.tensor(answer.log_probs) for answer in answers])
        errors.append(float((found[mask] - told).abs().max()))
        if temperature == 0.0:
            errors.append(lead_of_best(plain, batch))
            note = unlike_generate(plain, prompts, answers[::2])
    sampler.close()
    return float(torch.tensor(errors).max()), note


def prompts_of(batch: Batch) -> list[tuple[int, ...]]:
    """Return the prompts of the sweep's rows."""
    rows = zip(batch["input_ids"][:, :P], batch["attention_mask"][:, :P], strict=True)
    return [tuple(ids[mask].tolist()) for ids, mask in rows]


def batch_of(requests: Sequence[Request], answers: Sequence[Completion]) -> Batch:
    """Lay out prompts and completions as the trainer reads them."""
    ids, mask = torch.zeros(2, len(requests), P + R, dtype=torch.int64)
    for row, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        tokens = [*request.prompt_ids, *answer.token_ids]
        own = slice(P - len(request.prompt_ids), P + len(answer.token_ids))
        ids[row, own], mask[row, own] = torch.tensor(tokens), 1
    return Batch.of({"input_ids": ids, "attention_mask": mask.bool(), "response_mask": mask[:, P:].bool()})


@torch.no_grad()
def lead_of_best(model: "PreTrainedModel", batch: Batch) -> float:
    """Return how far the chosen tokens fall behind the most likely ones [nat], by forwards without padding."""
    behind = [0.0]
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        own, response = ids[mask], int(mask[P:].sum())
        every = logits_of(model, own)[-1 - response : -1].log_softmax(-1)
        behind.append(float((every.amax(-1) - every.gather(-1, own[-response:, None])[:, 0]).max()))
    return max(behind)


def unlike_generate(model: "PreTrainedModel", prompts: Sequence[tuple[int, ...]], answers: Sequence[Completion]) -> str:
    """Return a remark if transformers' own greedy decoding fails or finds other tokens, else nothing."""
    for prompt, answer in zip(prompts, answers, strict=True):
        count = len(answer.token_ids)
        try:
            ids = torch.tensor([prompt])
            # Without a mask it would take tokens for padding.
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=-1
            )
        except Exception as error:
            return f"generate of transformers fails: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
        if whole[0, len(prompt) :].tolist() != answer.token_ids:
            return "generate of transformers finds other tokens than whole forwards"
    return ""
