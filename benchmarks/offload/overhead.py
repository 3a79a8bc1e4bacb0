"""The Python overhead per layer, from a model with almost nothing to compute, on one thread of the CPU."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.offload.models import Case, build, read_shape, share
from benchmarks.offload.modes import OWN_MODES, parse_mode
from rlx.offload.plan.text_table import aligned

_CASE = Case(tokens=16, layers=8)
# Default options do not offload tensors as small as this model's; min_bytes=0 does.
_MODES = ("checkpointing", *OWN_MODES, *(f"{name}:min_bytes=0" for name in OWN_MODES))
_WARM_UP_ROUNDS = 2
# Of a run in each round: the first after another model's is slower, for the interpreter specialises its code.
_REPEATS = 5


class Overhead(NamedTuple):
    """The overhead of a mode, in CPU time."""

    # A step minus a plain step and, if layers are recomputed, one forward: the median of the differences within a round, because
    # the speed of a shared machine changes [us].
    us_per_layer: float
    us_per_layer_of_minima: float  # the same from the shortest times
    # A forward under `no_grad` over that of a model that is not enabled, the median within a round; None for a peer.
    no_grad_ratio: float | None


class _TinyModel:
    def __init__(self) -> None:
        self._plain = build(read_shape("tiny"), _CASE, torch.device("cpu"), torch.float32)
        self._ids = torch.randint(0, 1024, (1, _CASE.tokens), generator=torch.Generator().manual_seed(1))

    def forward(self, mode: str) -> Callable[[], torch.Tensor]:
        """Return a forward of a new copy of the model in a mode."""
        model = share(self._plain)
        parse_mode(mode, {}).prepare(model)
        return lambda: model(input_ids=self._ids).last_hidden_state

    def step(self, mode: str) -> Callable[[], None]:
        """Return a forward and backward, likewise."""
        forward = self.forward(mode)

        def step() -> None:
            output = forward()
            output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]

        return step


def run_overhead(rounds: int, folder: Path, about: dict[str, Any]) -> None:
    """Measure in so many rounds, print, and write `overhead.json` to a folder; `about` goes into the file as well."""
    torch.set_num_threads(1)
    model = _TinyModel()
    steps = {name: model.step(name) for name in ("plain", *_MODES)}
    steps_us = _cpu_us({"forward": model.forward("plain"), **steps}, rounds)
    with torch.no_grad():
        forwards = {name: model.forward(name) for name in ("plain", *OWN_MODES)}
        no_grad_us = _cpu_us({"plain again": model.forward("plain"), **forwards}, rounds)
    found = {name: overhead_of(name, steps_us, no_grad_us) for name in _MODES}
    about_it = "where layers are recomputed, less one more forward"
    print(f"tiny Qwen2, {_CASE}, float32, one thread, {rounds} rounds; {about_it}")
    rows = [[name, *("-" if value is None else f"{value:.4g}" for value in row)] for name, row in found.items()]
    print("\n".join(aligned([["mode", "us per layer", "of minima", "no_grad ratio"], *rows])))
    print(f"plain step {min(steps_us['plain']):.0f} us at least, forward {min(steps_us['forward']):.0f} us")
    noise = _median_ratio(no_grad_us["plain again"], no_grad_us["plain"])
    print(f"no_grad ratio of a second model that is not enabled: {noise:.4g}")
    path = folder / "overhead.json"
    modes = {name: row._asdict() for name, row in found.items()}
    path.write_text(json.dumps({**about, "modes": modes, "step_cpu_us": steps_us, "no_grad_cpu_us": no_grad_us}) + "\n")
    print(f"written: {path}")


def overhead_of(name: str, steps_us: Mapping[str, list[float]], no_grad_us: Mapping[str, list[float]]) -> Overhead:
    """Return the figures of a mode, from the times of each round."""
    forward = steps_us["forward"] if name.split(":")[0] != "all" else [0.0] * len(steps_us[name])
    in_round = zip(steps_us[name], steps_us["plain"], forward, strict=True)
    return Overhead(
        statistics.median(step - plain - more for step, plain, more in in_round) / _CASE.layers,
        (min(steps_us[name]) - min(steps_us["plain"]) - min(forward)) / _CASE.layers,
        _median_ratio(no_grad_us[name], no_grad_us["plain"]) if name in no_grad_us else None,
    )


def _median_ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def _cpu_us(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the CPU times of each run by round; unlike clock time, they do not count other processes [us]."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffled = random.Random(0)
    for number in range(-_WARM_UP_ROUNDS, rounds):
        for name in shuffled.sample(list(runs), len(runs)):  # a run changes the caches for the next one
            start = time.process_time()
            for _ in range(_REPEATS):
                runs[name]()
            if number >= 0:
                times[name].append((time.process_time() - start) / _REPEATS * 1e6)
    return times
