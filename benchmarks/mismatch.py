"""Map the numerical gap between sampler and trainer: `python -m benchmarks.mismatch (--model FOLDER | --shape NAME ...)`.

Each engine runs in a process of its own. It samples, and records the inputs and outputs of vLLM's operations in three layers (only
without compilation, which leaves no modules to watch). Then the trainer's operations get the sampler's inputs, among the rows of a
larger batch, and their outputs are compared bit by bit. Last come whole forwards over the sampled tokens: the trainer's, one of
vLLM's own operations, and mixtures of both; their log-probs are compared with those of sampling. Each figure is a line of JSON; tables
follow. A `forward` of the tables is:

    trainer         transformers' operations and rlx's packed attention
    sampler         vLLM's operations over whole sequences; attention is FlashAttention 3 without splits, on CPU torch's
    sampler, X      the same, but operation X is the trainer's; the head includes log-softmax
    one ulp at L    the trainer's, with one element of each token changed by one unit in the last place before layer L, against itself
    fp32            the trainer's in fp32, from the weights in bf16
    trainer to fp32 not the sampler's log-probs but those in fp32 are compared with the trainer's
    prompt          vLLM's own log-probs of the same tokens as a prompt

Shape letters: N tokens of all sequences, V vocabulary, S sequences, T tokens of a sequence.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.common import benchmark_parser, chosen_device, random_model, seconds_of, title
from rlx.algorithms.rollout_correction import mismatch_figures, mismatch_sums
from rlx.models.log_probs import head_log_probs, token_log_probs
from rlx.models.packed_attention import packed_attention
from rlx.models.prefix_tree import Tree
from rlx.offload.plan.shapes import SHAPES

ENGINES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {},
    "kernels": {"compilation_config": {"custom_ops": ["all"]}},
    "casts": {"compilation_config": {"inductor_compile_config": {"emulate_precision_casts": True}}},
    "invariant": {"enforce_eager": True},
    "invariant-compiled": {},
}
"""vLLM's options by name. `kernels` compiles round vLLM's kernels for norms, rotary and activation, `casts` rounds as eager
operations do; an invariant engine has VLLM_BATCH_INVARIANT=1."""
KINDS = {
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"), "norm"),
    **dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "product"),
    **{"embed_tokens": "embedding", "rotary_emb": "rotary", "act_fn": "activation", "attn": "attention"},
}
"""The kind of operation of vLLM's modules, by the last part of their names."""
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PARTS |= {"o_proj": ("o_proj",), "down_proj": ("down_proj",)}
"""The products of transformers that vLLM's product joins."""
Figures = dict[str, Any]
Tensors = tuple[Tensor, ...]
Way = Callable[..., Tensors]
GAPS = ("equal", "mean", "rms", "max", "kl_k3", "beyond_0.1", "ess_sequence")


# Ways to compute an operation: vLLM's (its module `own`), transformers' (its modules `other`), and others ----------------------


def _norm(wide_sum: bool, wide_weight: bool) -> Way:
    """Return a norm of the sum of an output and the residual stream, which rounds the sum and the normalised one, or does not."""

    def norm(own: nn.Module, other: Any, x: Tensor, residual: Tensor | None = None) -> Tensors:
        total = x if residual is None else x.float() + residual.float() if wide_sum else residual + x
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + other.variance_epsilon)
        result = (wide * other.weight.float()).to(x.dtype) if wide_weight else wide.to(x.dtype) * other.weight
        return result, total.to(x.dtype)

    return norm


def _norm_sampler(own: nn.Module, other: Any, x: Tensor, residual: Tensor | None = None) -> Tensors:
    # Kernels overwrite their inputs.
    return (own(x.clone()), x) if residual is None else own(x.clone(), residual.clone())


def _norm_trainer(own: nn.Module, other: Any, x: Tensor, residual: Tensor | None = None) -> Tensors:
    total = x if residual is None else residual + x
    return other(total), total


def _joined(own: nn.Module, other: Any, x: Tensor) -> Tensors:
    bias = None if other[0].bias is None else torch.cat([each.bias for each in other])
    return (F.linear(x, torch.cat([each.weight for each in other]), bias),)


def _rotary_trainer(own: nn.Module, other: Any, places: Tensor, q: Tensor, k: Tensor) -> Tensors:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = other(q, places[None])
    heads = [x.view(1, len(x), -1, cos.shape[-1]).transpose(1, 2) for x in (q, k)]
    return tuple(x[0].transpose(0, 1).flatten(1) for x in apply_rotary_pos_emb(*heads, cos, sin))


def _rotary_one_rounding(own: nn.Module, other: Any, places: Tensor, q: Tensor, k: Tensor) -> Tensors:
    tables = other(q, places[None])
    cos, sin = (x[0].float().chunk(2, -1)[0][:, None] for x in tables)
    halves = [x.view(len(x), -1, tables[0].shape[-1]).float().chunk(2, -1) for x in (q, k)]
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(q.dtype).flatten(1) for a, b in halves)


def _activation(own: nn.Module, other: Any, x: Tensor) -> Tensors:
    gate, up = x.chunk(2, -1)
    return ((other.act_fn(gate) * up),)


def _attention(own: nn.Module, other: Any, *given: Any, by_sampler: bool = False) -> Tensors:
    *tensors, lengths = given
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tensors[0].device)
    q, k, v = (x.view(len(x), -1, own.head_size) for x in tensors)
    if not by_sampler or not q.is_cuda:  # on CPU vLLM's kernel reads a cache
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        return (packed_attention(*rows, starts, Tree(lengths), other.scaling)[0].flatten(1),)
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    ends = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    ends |= {"fa_version": own.impl.vllm_flash_attn_version, "num_splits": 1}
    return (flash_attn_varlen_func(q, k, v, **ends, softmax_scale=other.scaling, causal=True).flatten(1),)


WAYS: dict[str, dict[str, Way]] = {
    "embedding": {"sampler": lambda own, other, ids: (own(ids),), "trainer": lambda own, other, ids: (other(ids),)},
    "norm": {"sampler": _norm_sampler, "trainer": _norm_trainer} | {
        "weight in fp32": _norm(False, True), "sum in fp32": _norm(True, False), "both in fp32": _norm(True, True)
    },
    "product": {
        "sampler": lambda own, other, x: own(x)[:1],
        "trainer": lambda own, other, x: (torch.cat([each(x) for each in other], dim=-1),),
        "joined": _joined,
    },
    "rotary": {
        "sampler": lambda own, other, places, q, k: own(places, q.clone(), k.clone()),
        "trainer": _rotary_trainer,
        "one rounding": _rotary_one_rounding,
    },
    "attention": {"sampler": partial(_attention, by_sampler=True), "trainer": _attention},
    "activation": {
        "sampler": lambda own, other, x: (own(x.clone()),),
        "trainer": _activation,
        "one rounding": lambda own, other, x: (_activation(own, other, x.float())[0].to(x.dtype),),
    },
}  # fmt: skip


class Pair:
    """vLLM's model and transformers', with the same weights; both are Llama, Qwen2 or Qwen3."""

    def __init__(self, own: nn.Module, other: Any, by_kernel: bool) -> None:
        self.own, self.other, self.by_kernel = own, other, by_kernel
        self.count = len(own.model.layers)
        self.watched = sorted({0, self.count // 2, self.count - 1})

    def modules(self, name: str, layer: int) -> tuple[nn.Module, Any]:
        """Return an operation's module of vLLM, and those of transformers that compute the same."""
        own, other = self.own.model, self.other.model
        if name in ("norm", "embed_tokens"):
            return getattr(own, name), getattr(other, name)
        mine, theirs = own.layers[layer], other.layers[layer]
        within = "mlp" if hasattr(mine.mlp, name) else "self_attn" if hasattr(mine.self_attn, name) else None
        if within is not None:
            mine, theirs = getattr(mine, within), getattr(theirs, within)
        if name in PARTS:
            return getattr(mine, name), [getattr(theirs, part) for part in PARTS[name]]
        whole = {"rotary_emb": other.rotary_emb, "attn": theirs, "act_fn": theirs}
        return getattr(mine, name), whole[name] if name in whole else getattr(theirs, name)

    def hidden(self, ids_ST: Tensor, ways: dict[str, str], before: Callable[[int, Tensor], Tensor] | None) -> Tensor:
        """Return the hidden states (N, width) of whole sequences, with these ways by kind of operation."""
        lengths = [ids_ST.shape[1]] * len(ids_ST)
        places = torch.arange(ids_ST.shape[1], device=ids_ST.device).repeat(len(ids_ST))

        def run(name: str, layer: int, *given: Any) -> Any:
            found = WAYS[KINDS[name]][ways[KINDS[name]]](*self.modules(name, layer), *given)
            return found if len(found) > 1 else found[0]

        x, residual = run("embed_tokens", 0, ids_ST.flatten()), None
        for layer in range(self.count):
            x = x if before is None else before(layer, x)
            x, residual = run("input_layernorm", layer, x, residual)
            attention = self.own.model.layers[layer].self_attn
            sizes = (attention.q_size, attention.kv_size, attention.kv_size)
            q, k, v = (part.contiguous() for part in run("qkv_proj", layer, x).split(sizes, -1))
            if hasattr(attention, "q_norm"):
                by_head = (("q_norm", q), ("k_norm", k))
                q, k = (run(n, layer, z.view(len(z), -1, attention.head_dim))[0].view(z.shape) for n, z in by_head)
            q, k = run("rotary_emb", layer, places, q, k)
            x = run("o_proj", layer, run("attn", layer, q, k, v, lengths))
            x, residual = run("post_attention_layernorm", layer, x, residual)
            x = run("down_proj", layer, run("act_fn", layer, run("gate_up_proj", layer, x)))
        return run("norm", 0, x, residual)[0]

    def log_probs(self, hidden: Tensor, ids: Tensor, head: str) -> Tensor:
        """Return the log-probs of `ids` by vLLM's head and softmax, or by rlx's from logits in bf16 or fp32."""
        weight = self.other.get_output_embeddings().weight
        if head == "fp32":
            return head_log_probs(hidden, weight, ids, 1.0, False)[0]
        parts = zip(hidden.split(4096), ids.split(4096), strict=True)
        if head == "bf16":
            return torch.cat([token_log_probs(F.linear(x, weight), each, 1.0, False)[0] for x, each in parts])
        return torch.cat([self.of_logits(self.own.compute_logits(x.clone()), each) for x, each in parts])

    def of_logits(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probs that vLLM's sampler takes from logits."""
        if not self.by_kernel:
            return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        return compute_token_logprobs(logits, ids[:, None])[:, 0]


def wide_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return F.linear(hidden.float(), weight.float())


# What the sampler computes ---------------------------------------------------------------------------------------------


class Recorder:
    """Records the inputs and outputs of vLLM's operations in some layers, step by step."""

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self.steps: dict[tuple[str, int], list[tuple[list[Any], list[Tensor]]]] = defaultdict(list)
        self._layers, self._count, self._calls = layers, len(model.model.layers), 0
        self._given: list[Any] = []
        self._hooks = []
        for path, module in model.named_modules():
            *above, name = path.split(".")
            layer = int(above[2]) if len(above) > 2 else 0
            # One rotary module serves all layers, and has its name from the first.
            watched = name in KINDS and layers and (layer in layers or name == "rotary_emb")
            if watched or name == "logits_processor":
                self._hooks.append(module.register_forward_pre_hook(self._before))
                self._hooks.append(module.register_forward_hook(partial(self._after, name, layer)))

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        self._given = [x.clone() for x in given if isinstance(x, Tensor)]  # some kernels overwrite them

    def _after(self, name: str, layer: int, module: nn.Module, given: Any, output: Any) -> None:
        if name == "rotary_emb":
            layer, self._calls = self._calls % self._count, self._calls + 1
        if layer in self._layers or name == "logits_processor":
            found = output if isinstance(output, tuple) else (output,)
            self.steps[name, layer].append((self._given, [x.clone() for x in found if isinstance(x, Tensor)]))


def start_engine(name: str, folder: str, options: argparse.Namespace, device: torch.device) -> Any:
    """Return vLLM's engine in this process."""
    from vllm import LLM

    most, length = max(options.batches), options.prompt + options.tokens
    given: dict[str, Any] = {
        "model": folder, "dtype": "bfloat16", "skip_tokenizer_init": True, "generation_config": "vllm", "seed": 0,
        "max_model_len": length, "max_num_seqs": most, "max_num_batched_tokens": max(most * options.prompt, 16 * length),
        "enable_prefix_caching": False, "logprobs_mode": "raw_logprobs", "disable_log_stats": True,
    }  # fmt: skip
    on_cpu = {"kv_cache_memory_bytes": 1 << 30, "enforce_eager": True}
    return LLM(**given | (on_cpu if device.type == "cpu" else {"gpu_memory_utilization": 0.35}) | ENGINES[name])


def sample(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequences (S, T) with their prompts, and the log-probs (S, tokens) of the sampled tokens."""
    from vllm import SamplingParams

    shared = {"temperature": 1.0, "max_tokens": tokens, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**shared, seed=seed) for seed in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    found = [each.outputs[0] for each in outputs]
    log_probs = [[at[token].logprob for at, token in zip(o.logprobs, o.token_ids, strict=True)] for o in found]
    ids = [prompt + list(o.token_ids) for prompt, o in zip(prompts, found, strict=True)]
    return torch.tensor(ids), torch.tensor(log_probs)


def prompt_log_probs(llm: Any, ids_ST: Tensor, tokens: int) -> Tensor:
    """Return vLLM's log-probs (S, tokens) of the last tokens of prompts."""
    from vllm import SamplingParams

    params, rows = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), ids_ST.tolist()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in rows], params, use_tqdm=False)
    places = range(ids_ST.shape[1] - tokens, ids_ST.shape[1])
    pairs = zip(rows, outputs, strict=True)
    return torch.tensor([[o.prompt_logprobs[at][ids[at]].logprob for at in places] for ids, o in pairs])


# Comparisons -----------------------------------------------------------------------------------------------------------


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Figures:
    """Return the share of equal elements, and the length of the difference as a share of the whole."""
    a, b = (torch.cat([x.flatten().float().cpu() for x in side]) for side in (found, expected))
    return {"equal": (a == b).float().mean().item(), "relative_rms": ((a - b).norm() / b.norm()).item()}


def compare_operations(pair: Pair, recorder: Recorder, batch: int, options: argparse.Namespace) -> Iterator[Figures]:
    """Yield the difference of each way to compute each recorded operation, from the sampler's inputs.

    The sampler's rows are among others of a larger batch, because a kernel may depend on it. Attention is over whole sequences.
    """
    for (name, layer), steps in sorted(recorder.steps.items()):
        if name == "logits_processor":
            continue
        for phase, step in (("prefill", 0), ("decode", options.tokens - 2)):
            count = batch * (1 if step else options.prompt)  # vLLM may pad a step
            given, expected = ([x[:count] for x in side] for side in steps[step])
            inputs, rows = given, max(options.rows, count)
            places = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:count]
            if name == "attn":
                parts = [[x[: batch * options.prompt] for x in steps[0][0][:3]]]
                parts += [[x[:batch] for x in each[:3]] for each, _ in steps[1 : step + 1]]
                parts = [[x.view(batch, -1, x.shape[-1]) for x in each] for each in parts]
                whole = [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]
                inputs = [*(x.flatten(0, 1) for x in whole), [whole[0].shape[1]] * batch]
                own = parts[-1][0].shape[1]  # tokens of a sequence in this step
                places = torch.arange(len(inputs[0])).view(batch, -1)[:, -own:].flatten()
            else:
                order = torch.arange(rows) % count
                order[places] = torch.arange(count)
                inputs = [x[order.to(x.device)] for x in given]
            for way, function in WAYS[KINDS[name]].items():
                found = function(*pair.modules(name, layer), *inputs)[: len(expected)]
                found = [x[places.to(x.device)] for x in found]
                figures = {"operation": name, "layer": layer, "phase": phase, "batch": batch, "way": way}
                yield {"figure": "operation", **figures, **difference(found, expected[: len(found)])}


def compare_head(pair: Pair, recorder: Recorder, log_probs: Tensor, ids: Tensor, head: str) -> Iterator[Figures]:
    """Yield the difference of logits, and of log-probs from the sampler's logits, in the last step."""
    (hidden,), (logits,) = recorder.steps["logits_processor", 0][log_probs.shape[1] - 1]
    hidden, logits = hidden[: len(ids)], logits[: len(ids)]
    weight, of_ids = pair.other.get_output_embeddings().weight, ids[:, -1].to(logits.device)
    found = [("head", "bf16", F.linear(hidden, weight), logits), ("head", "fp32", wide_logits(hidden, weight), logits)]
    for way, x in (
        ("trainer", token_log_probs(logits, of_ids, 1.0, False)[0]),
        ("sampler", pair.of_logits(logits, of_ids)),
    ):
        found.append(("log-softmax", way, x, log_probs[:, -1]))
    for name, way, a, b in found:
        figures = {"operation": f"{name} ({head})", "layer": 0, "phase": "decode", "batch": len(ids), "way": way}
        yield {"figure": "operation", **figures, **difference([a], [b])}


def gap(trainer: Tensor, sampler: Tensor) -> Figures:
    """Return how far log-probs (S, tokens) are apart, as docs/rollout.md defines it."""
    sums, largest = mismatch_sums(trainer.cpu(), sampler.cpu(), torch.ones(sampler.shape, dtype=torch.bool))
    figures = mismatch_figures({name: total.item() for name, total in sums.items()}, largest.item())
    d = (trainer.cpu() - sampler.cpu()).double()
    shares = {"equal": d == 0, "beyond_0.1": (d.exp() - 1).abs() > 0.1}
    named = {"mean": "mean_abs_log_prob", "max": "max_abs_log_prob", "kl_k3": "kl_k3", "ess_sequence": "ess_sequence"}
    values = {name: figures[full] for name, full in named.items()} | {"rms": d.pow(2).mean().sqrt().item()}
    return values | {name: each.double().mean().item() for name, each in shares.items()} | {"tokens": d.numel()}


def compare_log_probs(
    pair: Pair, exact: Any, ids: Tensor, sampled: Tensor, head: str, in_full: bool
) -> Iterator[Figures]:
    """Yield the gaps between the sampler's log-probs and those of whole forwards over the same tokens."""
    ids, count = ids.to(next(pair.other.parameters()).device), sampled.shape[1]

    def log_probs(ways: dict[str, str], head: str, before: Any = None) -> Tensor:
        states = pair.hidden(ids[:, :-1], ways, before).view(len(ids), ids.shape[1] - 1, -1)[:, -count:]
        return pair.log_probs(states.flatten(0, 1), ids[:, -count:].flatten(), head).view(sampled.shape)

    trainer, sampler = (dict.fromkeys(WAYS, side) for side in ("trainer", "sampler"))
    ours = log_probs(trainer, head)
    wide = torch.cat([exact.model(rows[:, :-1]).last_hidden_state[:, -count:].flatten(0, 1) for rows in ids.split(32)])
    wide = head_log_probs(wide, exact.get_output_embeddings().weight, ids[:, -count:].flatten(), 1.0, False)[0]
    wide = wide.view(sampled.shape)
    found = {"trainer": gap(ours, sampled), "sampler": gap(log_probs(sampler, "sampler"), sampled)}
    found |= {"fp32": gap(wide, sampled), "trainer to fp32": gap(ours, wide)}
    if in_full:
        found |= {f"sampler, {kind}": gap(log_probs(sampler | {kind: "trainer"}, "sampler"), sampled) for kind in WAYS}
        found["sampler, head"] = gap(log_probs(sampler, head), sampled)
        found |= {f"one ulp at {at}": gap(log_probs(trainer, head, partial(one_ulp, at)), ours) for at in pair.watched}
    for forward, figures in found.items():
        yield {"figure": "log-probs", "head": head, "batch": len(ids), "forward": forward, **figures}


def one_ulp(at: int, layer: int, x: Tensor) -> Tensor:
    """Return the input of a layer; before layer `at` the first element of each token is changed."""
    if layer == at:
        x = x.clone()
        x[:, 0] = (x[:, 0].view(torch.int16) ^ 1).view(x.dtype)
    return x


def costs(pair: Pair, recorder: Recorder, rows: int, rounds: int) -> Iterator[Figures]:
    """Yield the milliseconds of each way to compute an operation for as many rows as a trainer's forward has."""
    for (name, layer), steps in recorder.steps.items():
        if layer or name == "logits_processor":
            continue
        given = steps[0][0][:3]
        inputs = [x[torch.arange(8 * rows, device=x.device) % len(x)] for x in given]
        extra = [[rows] * 8] if name == "attn" else []
        for way, function in WAYS[KINDS[name]].items():
            work = partial(function, *pair.modules(name, layer), *inputs, *extra)
            seconds = [seconds_of(work, inputs[0].device) for _ in range(rounds + 1)][1:]
            yield {"figure": "cost", "operation": name, "way": way, "ms": 1e3 * statistics.median(seconds)}


# One engine, and all of them -------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(name: str, folder: str, options: argparse.Namespace) -> Iterator[Figures]:
    """Yield the figures of one engine in this process."""
    from transformers import AutoModelForCausalLM

    device = chosen_device(options.device)
    llm = start_engine(name, folder, options, device)
    load = AutoModelForCausalLM.from_pretrained
    other, exact = (load(folder, dtype=dtype).to(device).eval() for dtype in (torch.bfloat16, torch.float32))
    model = llm.apply_model(lambda model: model)[0]
    pair = Pair(model, other, getattr(llm.llm_engine.vllm_config, "use_v2_model_runner", False))
    is_eager = device.type == "cpu" or "enforce_eager" in ENGINES[name]
    for head in options.heads:
        model.logits_processor.head_dtype = torch.float32 if head == "fp32" else torch.bfloat16
        for batch in options.batches:
            recorder = Recorder(model, pair.watched if is_eager else ())
            ids, sampled = sample(
                llm, make_prompts(folder, batch, options.prompt, other.config.vocab_size), options.tokens
            )
            recorder.stop()
            yield from compare_log_probs(pair, exact, ids, sampled, head, in_full=batch == max(options.batches))
            if batch <= 8:
                again = gap(prompt_log_probs(llm, ids[:, :-1], options.tokens - 1), sampled[:, :-1])
                yield {"figure": "log-probs", "head": head, "batch": batch, "forward": "prompt", **again}
            yield from compare_head(pair, recorder, sampled, ids, head)
            if is_eager and head == options.heads[0]:
                yield from compare_operations(pair, recorder, batch, options)
                if batch == max(options.batches):
                    yield from costs(pair, recorder, options.rows, options.rounds)


def make_prompts(folder: str, count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of `length` tokens: the ends of questions if the folder has a tokenizer, else random tokens."""
    if not (Path(folder) / "tokenizer.json").exists():
        return torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = (
        f"Tell me a story in which the number {number} matters, then explain it." for number in range(100, 100 + count)
    )
    turns = ([{"role": "user", "content": text}] for text in asked)
    texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer(text, add_special_tokens=False).input_ids[-length:] for text in texts]


def tables(found: Sequence[Figures]) -> Iterator[Table]:
    """Yield tables: of operations, the share of equal elements in the worst layer; of costs; and of log-probs."""
    for figure, key, columns in (
        ("operation", ("operation", "way"), ("phase", "batch")),
        ("cost", ("operation",), ("way",)),
    ):
        cells: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
        for each in (each for each in found if each["figure"] == figure):
            row = cells[tuple(each[name] for name in ("model", "engine", *key))]
            column = " ".join(str(each[name]) for name in columns)
            value = each["equal"] if figure == "operation" else each["ms"]
            row[column] = min(value, row.get(column, value))
        heads = list(dict.fromkeys(column for row in cells.values() for column in row))
        unit = "share of equal elements" if figure == "operation" else "ms"
        table = Table("model", "engine", *key, *heads, title=f"{figure}: {unit}")
        for row_key, row in cells.items():
            table.add_row(*row_key, *(f"{row[column]:.4g}" if column in row else "" for column in heads))
        yield table
    table = Table("model", "engine", "head", "batch", "forward", *GAPS, title="log-probs: gap to the sampler's")
    for each in (each for each in found if each["figure"] == "log-probs"):
        names = (str(each[name]) for name in ("model", "engine", "head", "batch", "forward"))
        table.add_row(*names, *(f"{each[name]:.3g}" for name in GAPS))
    yield table


def main(arguments: list[str]) -> int:
    """Run each engine on each model in a process of its own, and print the tables."""
    parser = benchmark_parser("mismatch", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", help="folder of a Llama, Qwen2 or Qwen3")
    parser.add_argument("--shape", nargs="+", default=[], choices=sorted(SHAPES), help="random weights of these shapes")
    parser.add_argument("--layers", type=int, default=4, help="of a model with random weights (default 4)")
    parser.add_argument("--engines", nargs="+", default=["eager"], choices=ENGINES)
    parser.add_argument("--heads", nargs="+", default=["bf16", "fp32"], choices=("bf16", "fp32"), help="vLLM's logits")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 256], help="sequences sampled at once")
    parser.add_argument("--prompt", type=int, default=36, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="sampled tokens of a sequence")
    parser.add_argument("--rows", type=int, default=2048, help="of the trainer's batch; for costs 8 times as many")
    parser.add_argument("--inside", nargs=2, metavar=("ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        with torch.compiler.set_stance("force_eager" if chosen_device(options.device).type == "cpu" else "default"):
            for each in measure(*options.inside, options):
                print(
                    json.dumps({"model": Path(options.inside[1]).name, "engine": options.inside[0], **each}), flush=True
                )
        return 0
    found: list[Figures] = []
    codes = []
    with tempfile.TemporaryDirectory(prefix="rlx-shapes-") as made:
        folders = [options.model] if options.model else []
        for shape in options.shape:
            folders.append(f"{made}/{shape}")
            changes = {"num_hidden_layers": options.layers, "max_position_embeddings": 4096}
            model = random_model(shape, torch.device("cpu"), **changes)
            for weight in (
                weight for weight in model.parameters() if weight.dim() == 1
            ):  # else norms have 1, and biases 0
                weight.data += 0.2 * torch.randn_like(weight)
            model.save_pretrained(folders[-1])
        for folder, engine in ((folder, engine) for folder in folders for engine in options.engines):
            given = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            given |= {"VLLM_BATCH_INVARIANT": str(int(engine.startswith("invariant")))}
            command = [sys.executable, "-m", "benchmarks.mismatch", *arguments, "--inside", engine, folder]
            with subprocess.Popen(command, env=os.environ | given, stdout=subprocess.PIPE, text=True) as child:
                for line in child.stdout or ():
                    if line.startswith('{"model"'):
                        print(line, end="", flush=True)
                        found.append(json.loads(line))
            codes.append(child.returncode)
            if options.json:
                options.json.write_text("".join(json.dumps(each) + "\n" for each in found))
    console = Console(width=170)
    console.print(title(chosen_device(options.device)))
    for table in tables(found):
        console.print(table)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
