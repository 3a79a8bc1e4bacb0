"""Measure an update of n responses to one prompt beside other libraries that compute the prompt once.

python -m benchmarks.shared_prefix_peers --case 4096+512x8

All ways train one model on the same rows: with its own packing, attention and log-probs, then with one loss, clipping and
AdamW. `rows` and `tree` are those of `benchmarks.shared_prefix`. Of the others the parts run that a release holds:

- `TRL`: 1.16's `TreeRow`, `tree_attention` and head of `AsyncGRPOTrainer`.
- `AReaL`: 1.0.4's packed trees, flex_attention and log-probs of its FSDP engine; of its package these files alone are imported.
- `verl`: 0.9.1's forward for the package prefix-grouper; no trainer of this release calls it.

Their FlashAttention 2 and 3 are torch's FlashAttention 2 here; AReaL has no other kernel than its own. A way that cannot be
imported or run gets a line with the reason. Packing happens before the clock starts. `off` is the mean distance of the
log-probs from those of rows, and the relative one of all gradients.
"""

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks import shared_prefix
from benchmarks.common import GB, cell, chosen_device, peak_beside, seconds_of, title, write_json
from benchmarks.shared_prefix import (
    PromptCase,
    case_parser,
    gradients_at_zero,
    made,
    micro_batches,
    relative_distance,
)
from rlx.algorithms.losses import LossSettings, vanilla
from rlx.models.attention_kernels import Call, CpuFlash
from rlx.models.packed_attention import PACKED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LogProbs = Callable[[], Iterator[tuple[slice, Tensor]]]
"""Yields the log-probs (b, R) of some rows after the other, of which the loss and backward come before the next."""
AREAL = ("areal", "areal.infra", "areal.api", "areal.engine")  # packages whose `__init__` imports the whole system


def rlx_way(way: str, model: "PreTrainedModel", case: PromptCase, rows: Tensor, options: Namespace) -> LogProbs:
    """Return rlx's own way, `rows` or `tree`."""
    parts = micro_batches(case, way, options, model)

    def run() -> Iterator[tuple[slice, Tensor]]:
        first = 0
        for part in parts:
            found = shared_prefix.log_probs(model, part, with_entropy=False)[0, :, 0].view(-1, case.response)
            yield slice(first, first + len(found)), found
            first += len(found)

    return run


def trl_way(model: "PreTrainedModel", case: PromptCase, rows: Tensor, options: Namespace) -> LogProbs:
    """Return TRL's tree rows."""
    packing = importlib.import_module("trl.experimental.async_grpo.packing")
    importlib.import_module("trl.trainer.utils").add_fused_lm_head(model)
    packing.register_tree_attention()
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_varlen)  # FA3 comes from a hub
    row, trained = packing.TreeRow(), torch.arange(rows.shape[1]) >= case.prompt
    for ids in rows:
        olds = torch.zeros(len(ids))
        row.add({"input_ids": ids, "completion_mask": trained, "old_log_probs": olds, "advantage": 0.0, "group_id": 0})
    packed = {name: x.to(model.device) for name, x in row.pack().items()}
    inputs = {name: packed[name][None] for name in ("input_ids", "position_ids", "shift_labels")}
    inputs |= {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), packed["tree_max_seqlens"].tolist(), strict=True))

    def run() -> Iterator[tuple[slice, Tensor]]:
        model.set_attn_implementation(packing.TREE_ATTENTION)
        found = model(**inputs, **longest, fused_lm_head=True).log_probs.flatten()[packed["token_index"]]
        yield slice(None), found.view(len(rows), case.response)

    return run


def areal_way(model: "PreTrainedModel", case: PromptCase, rows: Tensor, options: Namespace) -> LogProbs:
    """Return AReaL's packed trees."""
    (root,) = find_spec("areal").submodule_search_locations  # type: ignore[union-attr]
    for name in AREAL:
        bare = sys.modules.setdefault(name, ModuleType(name))
        bare.__path__ = [str(Path(root, *name.split(".")[1:]))]
    names = (*(f"models.tree_attn.{name}" for name in ("tree", "functional", "module_fsdp")), "api.cli_args")
    tree, functional, module, settings = (importlib.import_module(f"areal.{name}") for name in names)
    unique = case.prompt + case.samples * case.response
    most = settings.MicroBatchSpec(max_tokens_per_mb=-(-unique // tree.BLOCK_SIZE) * tree.BLOCK_SIZE)
    (batch,) = tree.build_packed_tree_batch({"input_ids": rows, "attention_mask": torch.ones_like(rows)}, most).mbs
    trie = batch["trie_node"]
    ids, places = (batch[name].view(1, -1).to(model.device) for name in ("input_ids", "position_ids"))

    def run() -> Iterator[tuple[slice, Tensor]]:
        model.config._attn_implementation = "flash_attention_2"
        module.patch_fsdp_for_tree_training()
        try:
            masks = tree.build_tree_attn_kwargs(trie, ids.shape[1], model.device)
            logits = model(input_ids=ids, position_ids=places, use_cache=False, **masks).logits[0]
            # Its update also computes entropies and the extremes of all logits, which are left out here.
            found = functional._gather_packed_tree_logprobs(logits, trie, ids)
            kept = slice(case.prompt - 1, case.prompt - 1 + case.response)
            yield slice(None), torch.stack([found[row][kept] for row in range(len(rows))])
        finally:
            module.restore_patch_fsdp_for_tree_training()

    return run


def verl_way(model: "PreTrainedModel", case: PromptCase, rows: Tensor, options: Namespace) -> LogProbs:
    """Return verl's forward for the package prefix-grouper."""
    from transformers.integrations import flash_attention

    grouper = importlib.import_module("verl.trainer.ppo.prefix_grouper_utils")
    importlib.import_module("verl.models.transformers.monkey_patch").apply_prefix_grouper_patch()
    ids = rows.to(model.device)
    group = {"prompts": ids[:, : case.prompt], "responses": ids[:, case.prompt :], "uid": [0] * len(rows)}
    group["response_mask"] = torch.ones_like(group["responses"])
    packed = grouper.build_pg_from_micro_batch(group, pad_token_id=-1)

    def run() -> Iterator[tuple[slice, Tensor]]:
        model.config._attn_implementation = "flash_attention_2"
        before = flash_attention._flash_attention_forward
        flash_attention._flash_attention_forward = flash_padded
        try:
            yield slice(None), grouper.pg_forward(model, *packed)[0]
        finally:
            flash_attention._flash_attention_forward = before

    return run


MAKERS: dict[str, Callable[..., LogProbs]] = {
    "rows": partial(rlx_way, "rows"),
    "tree": partial(rlx_way, "tree"),
    "TRL": trl_way,
    "AReaL": areal_way,
    "verl": verl_way,
}


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    most: int,
    most_keys: int,
    **given: Any,
) -> Tensor:
    """Run in place of flash-attn's function of this form, causal from the last key on; tensors are (N, H, D)."""
    if query.device.type == "cpu":
        lengths = (tuple(x.diff().tolist()) for x in (starts, key_starts))
        call = Call(*lengths, True, None, given.get("softmax_scale") or query.shape[-1] ** -0.5, query.device)
        return ByKernel.apply(query, key, value, call)  # type: ignore[no-any-return]
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": given.get("softmax_scale"), "window_size": (-1, 0)}
    return varlen_attn(query, key, value, starts, key_starts, most, most_keys, **options)  # type: ignore[no-any-return]


class ByKernel(torch.autograd.Function):
    """Attention by a kernel of `rlx.models.attention_kernels` on the CPU."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """See autograd.Function."""
        output, lse = CpuFlash().forward(query, key, value, call)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """See autograd.Function."""
        return *CpuFlash().backward(grad.contiguous(), *ctx.saved_tensors, ctx.call), None


def flash_padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Tensor:
    """Run in place of transformers' call of flash-attn for rows without padding; tensors are (B, N, H, D)."""
    assert mask is None or bool(mask.all()), "rows of a case have one length"
    rows, lengths = len(query), (query.shape[1], key.shape[1])
    starts = (torch.arange(rows + 1, dtype=torch.int32, device=query.device) * length for length in lengths)
    flat = (x.flatten(0, 1) for x in (query, key, value))
    return flash_varlen(*flat, *starts, *lengths, softmax_scale=given.get("softmax_scale")).view_as(query)


def backward(run: LogProbs, advantages: Tensor) -> Tensor:
    """Add up the gradients of the mean loss over all rows, and return their log-probs (B, R)."""
    seen = []
    for rows, found in run():
        old, weights = found.detach() - 0.01, advantages[rows, None].expand_as(found)
        loss, _ = vanilla(found, old, weights, torch.ones_like(found).bool(), LossSettings(0.2, 0.2))
        (loss.sum() / (len(advantages) * found.shape[1])).backward()
        seen.append(found.detach().float())
    return torch.cat(seen)


@contextmanager
def attention_kept(model: "PreTrainedModel") -> Iterator[None]:
    """Give the model its packed attention back at the end."""
    try:
        yield
    finally:
        model.set_attn_implementation(PACKED)


def measure(
    model: "PreTrainedModel", optimizer: AdamW, run: LogProbs, advantages: Tensor, rounds: int
) -> dict[str, Any]:
    """Return the median seconds of an update, its peak beside weights, gradients and states, log-probs and gradients."""

    def update() -> None:
        with gradients_at_zero(model):
            backward(run, advantages)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    with attention_kept(model):
        with gradients_at_zero(model):
            found, peak = peak_beside(lambda: backward(run, advantages), model.device)
            grads = [p.grad.to("cpu", copy=True) for p in model.parameters() if p.grad is not None]
        seconds = median([seconds_of(update, model.device) for _ in range(rounds + 1)][1:])
    return {"update s": seconds, "peak GB": peak / GB, "log_probs": found, "gradients": grads}


def distance(found: dict[str, Any], rows: dict[str, Any]) -> dict[str, float]:
    """Return how far log-probs and gradients are from those of rows."""
    log_probs = float((found["log_probs"] - rows["log_probs"]).abs().mean())
    return {"log-probs": log_probs, "gradients": relative_distance(found["gradients"], rows["gradients"])}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser, usual = case_parser("shared_prefix_peers", __doc__), PromptCase(4096, 512, 8)
    parser.add_argument("--case", type=PromptCase.of, default=usual, metavar="PROMPT+RESPONSExSAMPLES")
    parser.add_argument("--ways", nargs="+", choices=MAKERS, default=[*MAKERS][1:], help="beside rows (default: all)")
    options = parser.parse_args(arguments)
    device, case = chosen_device(options.device), options.case
    model = made(options, case.prompt + case.response, device)
    optimizer = AdamW(model.parameters(), lr=1e-9, fused=device.type != "cpu" or None)
    rows, advantages = case.rows(model.config.vocab_size), torch.linspace(-1, 1, case.samples, device=device)
    print(f"{title(device)}, {options.shape}, {options.layers} layers, {case.prompt}+{case.response}x{case.samples}")
    names = "".join(f"{name:>10}" for name in ("update s", "to rows", "peak GB"))
    print(f"{'':>6}{names}{'log-probs off':>15}{'gradients off':>15}", flush=True)
    figures: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for way in ["rows", *(way for way in options.ways if way != "rows")]:
        try:
            found = measure(model, optimizer, MAKERS[way](model, case, rows, options), advantages, options.rounds)
        except Exception as error:  # other libraries fail in their own ways; the rest still runs
            print(f"{way:>6} did not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        first = first or found
        off, seconds, peak = distance(found, first), found["update s"], found["peak GB"]
        costs = f"{cell(seconds, 4)}{cell(seconds / first['update s'], 3)}{cell(peak, 2)}"
        print(f"{way:>6}{costs}{off['log-probs']:>15.2e}{off['gradients']:>15.2e}", flush=True)
        figures[way] = {"update s": seconds, "peak GB": peak, "off": off}
    write_json(options, device, {"case": case, "shape": options.shape, "layers": options.layers, "ways": figures})


if __name__ == "__main__":
    main()
