"""Measure what it saves to compute a prompt once for all its responses, beside rows that each have their prompt.

python -m benchmarks.shared_prefix --cases 4096+512x8 16384+1024x16 256+2048x8

A case is PROMPT+RESPONSExSAMPLES. Both ways train the same rows in turn: `rows` packs as many of them into a micro-batch as
`--tokens` allows, `tree` has all in one. An update is forward, the loss of PPO, backward, clipping and AdamW, with weights,
gradients and states in bf16; nothing is recomputed but chunks of logits. `forward` is log-probs and entropies without
gradients, as for old log-probs. `peak GB` is what an update needs beside weights, gradients and states. With `--exact` the
log-probs and the gradients of both ways are compared with those of the rows in fp32: the tree should be as near as the rows.
"""

import copy
import re
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.common import (
    GB,
    benchmark_parser,
    chosen_device,
    peak_beside,
    random_model,
    seconds_of,
    title,
    write_json,
)
from rlx.algorithms.losses import LossSettings, vanilla
from rlx.models.log_probs import head_replaced
from rlx.models.packed_attention import use_packed_attention, why_not_packed
from rlx.models.prefix_tree import NEVER, Tree, tree_of_rows
from rlx.offload.plan.shapes import SHAPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAST_GAINS = {"rows": NEVER, "tree": 0.0}  # the share of tokens that a shared beginning has to save
FIGURES = ("tokens", "update s", "forward s", "peak GB")


class PromptCase(NamedTuple):
    """Tokens of a prompt and of each response to it, and the number of responses."""

    prompt: int
    response: int
    samples: int

    @classmethod
    def of(cls, text: str) -> "PromptCase":
        """Read a case such as 4096+512x8. Raises ValueError."""
        found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)x([1-9]\d*)", text)
        if found is None:
            raise ValueError(f"--cases: got {text}, expected such as 4096+512x8")
        return cls(*map(int, found.groups()))

    def rows(self, vocabulary: int) -> Tensor:
        """Return random tokens, (samples, prompt + response) int64."""
        source = torch.Generator().manual_seed(0)
        rows = torch.randint(vocabulary, (self.samples, self.prompt + self.response), generator=source)
        rows[:, : self.prompt] = rows[0, : self.prompt]
        return rows


class PackedRows(NamedTuple):
    """A micro-batch: what the model reads, the tokens that it predicts and their advantages (1, K), and the tokens computed."""

    inputs: dict[str, Any]
    targets: Tensor
    advantages: Tensor
    tokens: int


def packed(rows: Tensor, advantages: Tensor, least_gain: float, device: torch.device) -> PackedRows:
    """Lay rows (B, T) with advantages (B, R) out without their last tokens, which predict nothing."""
    prompt = rows.shape[1] - advantages.shape[1]
    tree, pieces, places = tree_of_rows(list(rows[:, :-1]), least_gain)
    ids = torch.cat([rows[row, slice(*columns)] for row, columns in pieces])
    inputs = named(ids.to(device), tree)
    inputs["logits_to_keep"] = torch.cat([own[prompt - 1 :] for own in places]).to(device)
    targets, weights = (x.flatten()[None].to(device) for x in (rows[:, prompt:], advantages))
    return PackedRows(inputs, targets, weights, len(ids))


def named(ids: Tensor, tree: Tree) -> dict[str, Any]:
    """Return the arguments of a model with packed attention."""
    return {
        "input_ids": ids[None],
        "position_ids": tree.positions()[None].to(ids.device),
        "cu_seq_lens_q": torch.tensor(tree.starts, dtype=torch.int32, device=ids.device),
        "sequence_tree": tree,
        "use_cache": False,
    }


def micro_batches(case: PromptCase, way: str, options: Namespace, model: "PreTrainedModel") -> list[PackedRows]:
    """Return the micro-batches of an update."""
    rows = case.rows(model.config.vocab_size)
    advantages = torch.linspace(-1, 1, case.samples)[:, None].expand(-1, case.response)
    each = case.samples if way == "tree" else max(1, options.tokens // rows.shape[1])
    parts = [slice(first, first + each) for first in range(0, case.samples, each)]
    return [packed(rows[part], advantages[part], LEAST_GAINS[way], model.device) for part in parts]


def log_probs(model: "PreTrainedModel", part: PackedRows, with_entropy: bool) -> Tensor:
    """Return log-probs (1, K, 1), or (1, K, 2) with entropies."""
    with head_replaced(model.get_output_embeddings(), part.targets, 1.0, with_entropy):
        found: Tensor = model(**part.inputs).logits
    return found


def backward(model: "PreTrainedModel", parts: Sequence[PackedRows]) -> None:
    """Add up the gradients of the mean loss over all micro-batches."""
    count = sum(part.targets.numel() for part in parts)
    for part in parts:
        found = log_probs(model, part, with_entropy=False)[..., 0]
        old, one = found.detach() - 0.01, torch.ones_like(found)
        loss, _ = vanilla(found, old, part.advantages, one.bool(), LossSettings(0.2, 0.2))
        (loss.sum() / count).backward()


@torch.no_grad()
def old_log_probs(model: "PreTrainedModel", parts: Sequence[PackedRows]) -> Tensor:
    """Return the log-probs and entropies of all micro-batches, (K, 2)."""
    return torch.cat([log_probs(model, part, with_entropy=True)[0] for part in parts])


@contextmanager
def gradients_at_zero(model: nn.Module) -> Iterator[None]:
    """Let gradients exist from the start, so that they are no part of the activations, and be zero at the end."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    yield
    torch._foreach_zero_([parameter.grad for parameter in model.parameters()])


def relative_distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the norm of the difference of all tensors together, over the norm of the exact ones."""
    off, whole = (
        torch.stack([x.float().norm() for x in each]).norm()
        for each in ([x - y for x, y in zip(found, exact, strict=True)], exact)
    )
    return float(off / whole)


class Exact(NamedTuple):
    """Log-probs (K,) and gradients of the rows in fp32."""

    log_probs: Tensor
    gradients: list[Tensor]

    @classmethod
    def of(cls, model: "PreTrainedModel", case: PromptCase, options: Namespace) -> "Exact":
        """Compute them with a copy of the model, a row in each micro-batch."""
        wide = copy.deepcopy(model).float()
        wide.zero_grad()
        one_row = Namespace(**{**vars(options), "tokens": 1})
        parts = micro_batches(case, "rows", one_row, model)
        log_probs = old_log_probs(wide, parts)[:, 0]
        backward(wide, parts)
        return cls(log_probs, [p.grad for p in wide.parameters() if p.grad is not None])


class Bench:
    """A model, its optimizer, and both ways of one case."""

    def __init__(self, model: "PreTrainedModel", optimizer: AdamW, case: PromptCase, options: Namespace):
        self.model, self.optimizer, self.device = model, optimizer, model.device
        self.parts = {way: micro_batches(case, way, options, model) for way in LEAST_GAINS}

    def update(self, way: str) -> None:
        """Take an optimizer step."""
        with gradients_at_zero(self.model):
            backward(self.model, self.parts[way])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()

    def peak(self, way: str) -> float:
        """Return the bytes that an update's forward and backward need beside weights, gradients and states [GB]."""
        with gradients_at_zero(self.model):
            return peak_beside(lambda: backward(self.model, self.parts[way]), self.device)[1] / GB

    def errors(self, exact: "Exact") -> dict[str, dict[str, float]]:
        """Return each way's mean error of the log-probs, and the relative one of all gradients together."""
        found = {}
        for way, parts in self.parts.items():
            log_prob = float((old_log_probs(self.model, parts)[:, 0] - exact.log_probs).abs().mean())
            with gradients_at_zero(self.model):
                backward(self.model, parts)
                grads = [p.grad for p in self.model.parameters() if p.grad is not None]
                found[way] = {"log-probs": log_prob, "gradients": relative_distance(grads, exact.gradients)}
        return found

    def figures(self, rounds: int) -> dict[str, dict[str, float]]:
        """Return the medians of both ways, which take turns."""
        works: dict[str, Callable[[str], Any]] = {
            "update s": self.update,
            "forward s": lambda way: old_log_probs(self.model, self.parts[way]),
        }
        found = {way: {"tokens": float(sum(part.tokens for part in self.parts[way]))} for way in LEAST_GAINS}
        for name, work in works.items():
            turns = range(rounds + 1)
            taken = [{way: seconds_of(partial(work, way), self.device) for way in found} for _ in turns]
            for way in found:
                found[way][name] = statistics.median(turn[way] for turn in taken[1:])
        for way in found:
            found[way]["peak GB"] = self.peak(way)
        return found


def made(options: Namespace, longest: int, device: torch.device) -> "PreTrainedModel":
    """Return a model of the shape with random weights and packed attention."""
    changes = {"num_hidden_layers": options.layers, "max_position_embeddings": longest}
    model = random_model(options.shape, device, **changes).train()

    def run() -> None:
        with torch.no_grad():
            model(**named(torch.zeros(3, dtype=torch.int64, device=device), Tree([1, 2])))

    if reason := why_not_packed(model, "sdpa") or use_packed_attention(model, "sdpa", run):
        raise ValueError(f"--shape: got {options.shape}, expected a model whose rows can be packed: {reason}")
    return model


def case_parser(name: str, description: str) -> ArgumentParser:
    """Return the parser of a benchmark of cases, with the model and the micro-batches of `rows`."""
    parser = benchmark_parser(name, description)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-7b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=36864, help="most tokens of a micro-batch of `rows`")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = case_parser("shared_prefix", __doc__)
    usual = ["4096+512x8", "16384+1024x16", "256+2048x8"]
    parser.add_argument("--cases", nargs="+", default=usual, metavar="PROMPT+RESPONSExSAMPLES")
    parser.add_argument("--exact", action="store_true", help="compare both ways with the rows in fp32")
    options = parser.parse_args(arguments)
    try:
        cases = [PromptCase.of(text) for text in options.cases]
    except ValueError as error:
        parser.error(str(error))
    device = chosen_device(options.device)
    model = made(options, max(case.prompt + case.response for case in cases), device)
    optimizer = AdamW(model.parameters(), lr=1e-9, fused=device.type != "cpu" or None)
    print(f"{title(device)}, {options.shape}, {options.layers} layers")
    print(f"{'case':>16}{'':>7}" + "".join(f"{name:>12}" for name in FIGURES), flush=True)
    found = []
    for text, case in zip(options.cases, cases, strict=True):
        bench = Bench(model, optimizer, case, options)
        figures = bench.figures(options.rounds)
        errors = bench.errors(Exact.of(model, case, options)) if options.exact else {}
        for way in LEAST_GAINS:
            print(f"{text:>16}{way:>7}" + "".join(f"{figures[way][name]:>12.4g}" for name in FIGURES))
        ratios = {name: figures["tree"][name] / figures["rows"][name] for name in FIGURES if figures["rows"][name]}
        print(f"{text:>16}{'ratio':>7}" + "".join(f"{ratios.get(name, 0.0):>12.3f}" for name in FIGURES))
        for way, each in errors.items():
            print(f"{text:>16}{way:>7} errors: " + ", ".join(f"{name} {x:.2e}" for name, x in each.items()), flush=True)
        found.append({"case": text, **figures, "ratio": ratios, "errors": errors})
    write_json(options, device, {"shape": options.shape, "layers": options.layers, "cases": found})


if __name__ == "__main__":
    main()
