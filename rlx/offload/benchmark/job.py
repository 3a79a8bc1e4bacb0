"""A whole benchmark: every case measured, printed and written to files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from rlx.offload.benchmark.measure import CaseRun, Plan
from rlx.offload.benchmark.picture import draw
from rlx.offload.benchmark.ranks import Ranks
from rlx.offload.benchmark.report import table, write_json
from rlx.offload.benchmark.results import CaseResult
from rlx.offload.benchmark.shapes import Case


class Job(NamedTuple):
    """What was asked for.

    Args:
        plan: what to measure and how.
        cases: one after the other.
        title: of the pictures.
        about: what the JSON file says beside the figures.
        folder: where the files go; it exists.
        with_picture: whether to draw.
    """

    plan: Plan
    cases: Sequence[Case]
    title: str
    about: dict[str, Any]
    folder: Path
    with_picture: bool

    def run(self, ranks: Ranks, shard: Callable[[nn.Module], nn.Module] | None = None) -> bool:
        """Measure; the first of the processes reports.

        Args:
            ranks: the processes that take part.
            shard: called with each model where there are several.

        Returns:
            Whether a mode could be measured in each case.
        """
        say = _print if ranks.is_first else _keep_silent
        results: list[CaseResult] = []
        files: list[Path] = []
        for case in self.cases:
            result = CaseRun(self.plan, case, ranks, shard, say).run()
            results.append(result)
            if not ranks.is_first:
                continue
            say(f"\n{table(result)}\n")
            # After each case, so that an interrupted run leaves what it has.
            files[:1] = [self.folder / "results.json"]
            write_json(files[0], self.about, results)
            if self.with_picture:
                files += self._picture(result, say)
        say("written: " + ", ".join(map(str, files)))
        return all(any(row.median_s is not None for row in result.rows) for result in results)

    def _picture(self, result: CaseResult, say: Callable[[str], None]) -> list[Path]:
        path = self.folder / f"{result.tokens}x{result.layers}.png"
        if all(row.median_s is None for row in result.rows):
            say("no picture: no mode was measured")
            return []
        if self.plan.device.type == "cpu":
            say("picture without device memory: the CPU has none of its own")
        try:
            draw(path, self.title, result)
        except ImportError as error:
            say(f"no picture: {error}")
            return []
        return [path]


def _print(text: str) -> None:
    print(text, flush=True)


def _keep_silent(text: str) -> None:
    pass
