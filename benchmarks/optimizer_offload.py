"""Measure how fast parameters are offloaded and fetched, next to plain copies, and the cost of a step with offloaded state.

python -m benchmarks.optimizer_offload --gb 8 --json hand_over.json
python -m benchmarks.optimizer_offload --gb 1 --shape qwen2-7b

With `--shape` the step is AdamW with fp32 masters over all weights of that shape in bf16, else AdamW over `--gb` of bf16 state.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import GB, benchmark_parser, cell, chosen_device, seconds_of, title, write_json
from benchmarks.offload.device import clock, peak_bytes, reset_peak, used_bytes
from rlx.config.schema import OptimConfig
from rlx.engine.optimizer import build_optimizer, state_bytes, step_in_parts
from rlx.engine.optimizer_state import PIECE_BYTES, OptimizerStateOnHost
from rlx.engine.residency import TensorOffload
from rlx.offload import HostArena
from rlx.offload.plan.shapes import SHAPES

LARGE_BYTES, SMALL_BYTES = 64 << 20, 8 << 10  # a weight and a norm


def make_tensors(nbytes: int, device: torch.device) -> list[Tensor]:
    """Return about `nbytes` of tensors with different contents, large and small ones in turn."""
    pairs = max(1, nbytes // (LARGE_BYTES + SMALL_BYTES))
    lengths = [LARGE_BYTES, SMALL_BYTES] * pairs
    return [torch.full((n,), i % 251, dtype=torch.uint8, device=device) for i, n in enumerate(lengths)]


def measure(nbytes: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Measure seconds and rates of each way to host memory and back, `rounds` times after a first one.

    Return bytes, tensors, host_reserved_bytes, freed_bytes (of the device, None on CPU) and by row its seconds and gb_per_s.
    """
    tensors = make_tensors(nbytes, device)
    moved = sum(tensor.nbytes for tensor in tensors)
    arena = HostArena(pinned=device.type != "cpu")
    offload, freed = TensorOffload(arena, "benchmark"), None
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def time(name: str, work: Callable[[], Any]) -> None:
        seconds[name].append(seconds_of(work, device))

    for turn in range(rounds + 1):
        before = _free_bytes(device)
        time("offload" if turn else "offload, first time", lambda: offload.offload(tensors))
        if device.type != "cpu":
            torch.accelerator.empty_cache()
            freed = _free_bytes(device) - before
        time("fetch", offload.fetch)
    if any(int(tensor[position]) != i % 251 for i, tensor in enumerate(tensors) for position in (0, -1)):
        raise RuntimeError("got other bytes back than were offloaded")
    on_host: list[Tensor] = []
    for _ in range(rounds):
        on_host.clear()
        time('tensor.to("cpu")', lambda: on_host.extend(t.to("cpu", copy=True) for t in tensors))
        tensors.clear()
        time("tensor.to(device)", lambda: tensors.extend(t.to(device, copy=True) for t in on_host))
    rows = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "bytes": moved,
        "tensors": len(tensors),
        "host_reserved_bytes": arena.reserved_bytes,
        "freed_bytes": freed,
        "rows": {name: {"seconds": value, "gb_per_s": moved / value / GB} for name, value in rows.items()},
    }


def weights_of(shape: str) -> list[torch.Size]:
    """Return the shapes of all weights of a model shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape]))
    return [parameter.shape for parameter in model.parameters()]


def measure_steps(
    nbytes: int, rounds: int, device: torch.device, piece_bytes: int, shape: str | None = None
) -> dict[str, Any]:
    """Measure AdamW's step with `nbytes` of bf16 state on the device, fetched as a whole, and fetched in pieces.

    With `shape` AdamW has fp32 masters of the weights of that shape, and its state is not fetched as a whole. Gradients are in
    bf16. Return state_bytes, and by row the seconds, the rate of fetching and offloading the state together (gb_per_s, None if it
    stays on the device), and the largest device memory beyond parameters and gradients (peak_bytes, None on CPU).
    """
    elements = max(1, min(LARGE_BYTES, nbytes // 16) // 2)
    sizes = [torch.Size([elements])] * max(1, nbytes // (4 * elements))  # two moments of 2 bytes
    parameters = [
        torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16, device=device))
        for size in (sizes if shape is None else weights_of(shape))
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = build_optimizer(parameters, OptimConfig(lr=1e-3, master_weights=shape is not None))
    arena = HostArena(pinned=device.type != "cpu")
    used = used_bytes(device)
    in_pieces = OptimizerStateOnHost(optimizer, arena, "benchmark", device, piece_bytes)
    whole = OptimizerStateOnHost(optimizer, arena, "benchmark", device, piece_bytes=1 << 62)

    def step_whole() -> None:
        whole.to_device()
        optimizer.step()
        whole.to_host()

    ways: dict[str, Callable[[], None]] = {"state on the device": partial(step_in_parts, optimizer)}
    if shape is None:
        ways["state whole"] = step_whole
    ways["state in pieces"] = in_pieces.step
    moved_bytes = sum(state_bytes(optimizer, parameter) for parameter in parameters)
    rows: dict[str, dict[str, float | None]] = {}
    for name, step in ways.items():
        step()
        clock(device)
        reset_peak(device)
        seconds = statistics.median(seconds_of(step, device) for _ in range(rounds))
        peak = None if device.type == "cpu" else peak_bytes(device) - used
        rate = None if name == "state on the device" else 2 * moved_bytes / seconds / GB
        rows[name] = {"seconds": seconds, "gb_per_s": rate, "peak_bytes": peak}
        whole.to_device()
    return {"state_bytes": moved_bytes, "rows": rows}


def _free_bytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = benchmark_parser("optimizer_offload", __doc__)
    parser.add_argument("--gb", type=float, default=4.0, help="amount to move [10^9 bytes]")
    parser.add_argument("--piece-gb", type=float, default=PIECE_BYTES / GB, help="state to fetch at a time [GB]")
    of_shape = "step the weights of this shape, with masters (default: --gb of state)"
    parser.add_argument("--shape", choices=sorted(SHAPES), help=of_shape)
    given = parser.parse_args(arguments)
    if given.gb <= 0 or given.rounds < 1 or given.piece_gb <= 0:
        got = f"--gb {given.gb} --rounds {given.rounds} --piece-gb {given.piece_gb}"
        parser.error(f"got {got}, expected more than 0, at least 1 and more than 0")
    device = chosen_device(given.device)
    figures = measure(int(given.gb * GB), given.rounds, device)
    print(f"{title(device)}: {figures['bytes'] / GB:.2f} GB in {figures['tensors']} tensors")
    print(f"{'':20}{'seconds':>10}{'GB/s':>8}")
    for row, values in figures["rows"].items():
        print(f"{row:20}{values['seconds']:10.3f}{values['gb_per_s']:8.1f}")
    if figures["freed_bytes"] is not None:
        print(f"device memory freed while offloaded: {figures['freed_bytes'] / GB:.2f} GB")
    print(f"reserved in host memory: {figures['host_reserved_bytes'] / GB:.2f} GB")
    steps = measure_steps(int(given.gb * GB), given.rounds, device, int(given.piece_gb * GB), given.shape)
    print(f"\nAdamW's step, {steps['state_bytes'] / GB:.2f} GB of state; the rate is that of both ways together")
    print(f"{'':20}{'seconds':>10}{'GB/s':>8}{'peak GB':>10}")
    for row, values in steps["rows"].items():
        peak = values["peak_bytes"] and values["peak_bytes"] / GB
        print(f"{row:20}{values['seconds']:10.3f}{cell(values['gb_per_s'], 1, 8)}{cell(peak, 2)}")
    write_json(given, device, {**figures, "steps": steps})


if __name__ == "__main__":
    main()
