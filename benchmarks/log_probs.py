"""Measure log-probs from hidden states in chunks against log-probs from whole logits, forward and backward.

python -m benchmarks.log_probs --tokens 4096 32768 --json log_probs.json
"""

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import benchmark_parser, cell, chosen_device, seconds_of, title, write_json
from benchmarks.offload.device import peak_bytes, reset_peak, used_bytes
from rlx.engine.sharded import TRAINING_DTYPES
from rlx.models import head_log_probs as head_module
from rlx.models.head_log_probs import head_log_probs
from rlx.models.log_probs import token_log_probs

Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden (N, H), weight (V, H), ids (N,) -> a scalar


def forms(with_entropy: bool) -> dict[str, Form]:
    """Return the functions to compare; each returns the sum of log-probs, plus that of entropies if asked for.

    `naive` applies log_softmax to fp32 logits, `logits` applies `token_log_probs` to logits. `liger` is there if liger-kernel is
    installed and no entropy is asked for; it computes gradients already in forward.
    """

    def total(figures: tuple[Tensor, Tensor | None]) -> Tensor:
        return sum(x.sum() for x in figures if x is not None)  # type: ignore[return-value]

    def naive(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        every = F.linear(hidden, weight).float().log_softmax(-1)
        chosen = every.gather(-1, ids[:, None])[:, 0]
        return total((chosen, -(every.exp() * every).sum(-1) if with_entropy else None))

    found: dict[str, Form] = {
        "naive": naive,
        "logits": lambda hidden, weight, ids: total(token_log_probs(F.linear(hidden, weight), ids, 1.0, with_entropy)),
        "chunked": lambda hidden, weight, ids: total(head_log_probs(hidden, weight, ids, 1.0, with_entropy)),
    }
    if importlib.util.find_spec("liger_kernel") is not None and not with_entropy:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        found["liger"] = lambda hidden, weight, ids: -liger(weight, hidden, ids)
    return found


def measure(
    tokens: int, vocabulary: int, width: int, dtype: torch.dtype, with_entropy: bool, rounds: int, device: torch.device
) -> dict[str, dict[str, float | None]]:
    """Measure each form's median seconds of forward and backward together, and the peak of memory they add [bytes].

    The peak includes the gradients of hidden states and weight; it is None on CPU. Both are None if memory is too small.
    """
    source = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=source, device=device, dtype=dtype).requires_grad_()
    weight = (
        torch.randn(vocabulary, width, generator=source, device=device, dtype=dtype) * width**-0.5
    ).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,), generator=source, device=device)
    compared = forms(with_entropy)
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    peaks: dict[str, int | None] = dict.fromkeys(compared)
    for _ in range(rounds + 1):  # the first one warms up; the forms take turns, so that a slow moment affects all
        for name, form in compared.items():
            try:
                took, peaks[name] = _once(form, hidden, weight, ids, device)
                seconds[name].append(took)
            except torch.OutOfMemoryError:
                torch.accelerator.empty_cache()
    return {
        name: {"seconds": statistics.median(took[1:]) if len(took) > 1 else None, "peak_bytes": peaks[name]}
        for name, took in seconds.items()
    }


def _once(form: Form, hidden: Tensor, weight: Tensor, ids: Tensor, device: torch.device) -> tuple[float, int | None]:
    hidden.grad = weight.grad = None
    reset_peak(device)
    before = used_bytes(device)
    took = seconds_of(lambda: form(hidden, weight, ids).backward(), device)
    return took, None if device.type == "cpu" else peak_bytes(device) - before


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = benchmark_parser("log_probs", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--vocabulary", type=int, default=152064, help="default: Qwen2-7B's")
    parser.add_argument("--width", type=int, default=3584, help="default: Qwen2-7B's")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--entropy", action="store_true", help="with the entropy and its gradient")
    parser.add_argument("--chunk-bytes", type=int, default=head_module.HEAD_CHUNK_BYTES, help="logits of a chunk")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or min(given.tokens) < 1:
        parser.error(f"got --tokens {given.tokens} --rounds {given.rounds}, expected at least 1")
    device = chosen_device(given.device)
    head_module.HEAD_CHUNK_BYTES = given.chunk_bytes
    print(f"{title(device)}: V {given.vocabulary}, H {given.width}, {given.dtype}, forward and backward")
    print(f"{'tokens':>8} {'form':10}{'ms':>10}{'of naive':>10}{'peak GiB':>10}")
    rows: list[dict[str, Any]] = []
    for tokens in given.tokens:
        found = measure(
            tokens, given.vocabulary, given.width, TRAINING_DTYPES[given.dtype], given.entropy, given.rounds, device
        )
        for form, figures in found.items():
            rows.append({"tokens": tokens, "form": form, **figures})
            seconds, naive, peak = figures["seconds"], found["naive"]["seconds"], figures["peak_bytes"]
            ratio = seconds and naive and seconds / naive
            columns = (seconds and 1000 * seconds, 1), (ratio, 2), (peak and peak / 2**30, 2)
            print(f"{tokens:8} {form:10}" + "".join(cell(*column) for column in columns), flush=True)
    setting = {key: str(value) for key, value in vars(given).items() if key != "json"}
    write_json(given, device, {"setting": setting, "rows": rows})


if __name__ == "__main__":
    main()
