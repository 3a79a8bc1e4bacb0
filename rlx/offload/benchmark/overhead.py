"""How much Python each layer costs: a model too small to compute anything, on one thread of the CPU."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlx.offload.benchmark.modes import parse_mode
from rlx.offload.benchmark.report import aligned
from rlx.offload.benchmark.shapes import Case, build, read_shape, share

_CASE = Case(tokens=16, layers=8)
_MODES = ("checkpointing", "boundary", "attention", "all")
_WARM_UP_ROUNDS = 5


class _Runs:
    """What is timed, in turn: steps and forwards of a plain model, and of one for each mode on the same weights."""

    def __init__(self, modes: Sequence[str]) -> None:
        plain = build(read_shape("tiny"), _CASE, torch.device("cpu"), torch.float32)
        self._ids = torch.randint(0, 1024, (1, _CASE.tokens), generator=torch.Generator().manual_seed(1))
        self._runs: dict[str, Callable[[], object]] = {"forward": functools.partial(self._forward, plain)}
        for name in ("plain", *modes):
            model = share(plain)
            parse_mode(name, {"min_bytes": 0}).prepare(model)
            self._runs[name] = functools.partial(self._step, model)
            self._runs[f"{name}, no_grad"] = functools.partial(torch.no_grad()(self._forward), model)

    def cpu_us(self, rounds: int) -> dict[str, list[float]]:
        """CPU time of each run in each round [us]; unlike the clock's it does not count what others do meanwhile."""
        names = list(self._runs)
        times: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-_WARM_UP_ROUNDS, rounds):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                start = time.process_time()
                self._runs[name]()
                if number >= 0:
                    times[name].append((time.process_time() - start) * 1e6)
        return times

    def _forward(self, model: nn.Module) -> torch.Tensor:
        output: torch.Tensor = model(input_ids=self._ids).last_hidden_state
        return output

    def _step(self, model: nn.Module) -> None:
        output = self._forward(model)
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]


def run_overhead(rounds: int, folder: Path, about: dict[str, Any]) -> None:
    """Measure, print, and write `overhead.json`.

    What a mode costs is the time of its step less that of a plain step and, where it recomputes, of one more forward. They
    are compared within a round, for the machine may be shared and its speed change; the median over the rounds counts.

    Args:
        rounds: how often each is run, in turn.
        folder: where the file goes.
        about: what the file says beside the figures.
    """
    torch.set_num_threads(1)
    times = _Runs(_MODES).cpu_us(rounds)
    in_round = [dict(zip(times, values, strict=True)) for values in zip(*times.values(), strict=True)]
    least = {name: min(values) for name, values in times.items()}
    figures = {
        name: {
            "us_per_layer": statistics.median(_us_per_layer(name, us) for us in in_round),
            "us_per_layer_of_minima": _us_per_layer(name, least),
            "no_grad_ratio": statistics.median(_no_grad_ratio(name, us) for us in in_round),
            "no_grad_ratio_of_minima": _no_grad_ratio(name, least),
        }
        for name in _MODES
    }
    titles = ("mode", "us per layer over plain", "of minima", "no_grad ratio", "of minima")
    rows = [
        (name, *(f"{v:.0f}" if "us" in key else f"{v:.4f}" for key, v in found.items()))
        for name, found in figures.items()
    ]
    print(
        f"tiny Qwen2, {_CASE}, float32, one thread, {rounds} rounds; where layers are recomputed, less one more forward"
    )
    print("\n".join(aligned([titles, *rows])))
    print(f"plain step {least['plain']:.0f} us at least, forward {least['forward']:.0f} us")
    path = folder / "overhead.json"
    path.write_text(json.dumps({**about, "rounds": rounds, "modes": figures, "cpu_us": times}, indent=1) + "\n")
    print(f"written: {path}")


def _us_per_layer(name: str, us: dict[str, float]) -> float:
    recomputed = us["forward"] if name != "all" else 0.0
    return (us[name] - us["plain"] - recomputed) / _CASE.layers


def _no_grad_ratio(name: str, us: dict[str, float]) -> float:
    return us[f"{name}, no_grad"] / us["plain, no_grad"]
