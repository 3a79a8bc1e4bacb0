"""Measure packed attention both ways: torch's kernel for variable lengths, and one call per sequence.

python -m benchmarks.packed_attention --lengths 32x1024 8x4096 1x32768

`LONG_TOKENS` of `rlx.models.packed_attention` should be the length from which on the second is faster.
"""

import statistics
import sys

import torch
from torch import Tensor

from benchmarks.common import benchmark_parser, chosen_device, seconds_of, title, write_json
from rlx.models import packed_attention
from rlx.models.prefix_tree import Tree

WAYS = {"kernel": sys.maxsize, "each": 0}  # the LONG_TOKENS that selects it


def measure(
    count: int, length: int, heads: int, key_heads: int, width: int, rounds: int, device: torch.device
) -> dict[str, float]:
    """Return each way's median seconds of forward and backward, taking turns, for `count` sequences of `length` tokens."""
    tokens, dtype = count * length, torch.bfloat16 if device.type == "cuda" else torch.float32
    # In a model's layout: the heads of each token are adjacent.
    query, key, value = (
        torch.randn(1, tokens, h, width, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for h in (heads, key_heads, key_heads)
    )
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
    grad, tree = torch.randn(1, tokens, heads, width, device=device, dtype=dtype), Tree([length] * count)

    def both_ways() -> None:
        result: Tensor = packed_attention.packed_attention(query, key, value, starts, tree)
        torch.autograd.grad(result, (query, key, value), grad)

    def step(long_tokens: int) -> float:
        packed_attention.LONG_TOKENS = long_tokens
        return seconds_of(both_ways, device)

    before = packed_attention.LONG_TOKENS
    try:
        taken = [{name: step(limit) for name, limit in WAYS.items()} for _ in range(rounds + 2)][2:]
    finally:
        packed_attention.LONG_TOKENS = before
    return {name: statistics.median(turn[name] for turn in taken) for name in WAYS}


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = benchmark_parser("packed_attention", __doc__)
    usual = ["128x256", "64x512", "32x1024", "16x2048", "8x4096", "4x8192", "1x32768"]
    parser.add_argument("--lengths", nargs="+", default=usual, metavar="SEQUENCESxTOKENS")
    parser.add_argument("--heads", type=int, default=28, help="default: Qwen2-7B's")
    parser.add_argument("--key-heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="of a head")
    given = parser.parse_args(arguments)
    device = chosen_device(given.device)
    note = (
        ""
        if device.type == "cuda"
        else ": there is no kernel for variable lengths here, so both ways are one call per sequence"
    )
    print(f"{title(device)}, forward and backward{note}")
    print(f"{'sequences':>10}{'tokens':>10}{'kernel ms':>12}{'each ms':>12}{'each/kernel':>13}")
    rows = []
    for text in given.lengths:
        count, times, length = text.partition("x")
        if not times or not count.isdecimal() or not length.isdecimal() or not int(count) * int(length):
            parser.error(f"--lengths: got {text}, expected such as 8x4096")
        found = measure(int(count), int(length), given.heads, given.key_heads, given.width, given.rounds, device)
        rows.append({"sequences": int(count), "tokens": int(length), **found})
        kernel, each = found["kernel"] * 1e3, found["each"] * 1e3
        print(f"{count:>10}{length:>10}{kernel:>12.2f}{each:>12.2f}{each / kernel:>13.2f}", flush=True)
    write_json(given, device, {"rows": rows})


if __name__ == "__main__":
    main()
