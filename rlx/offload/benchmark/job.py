"""A whole benchmark: every case measured, printed and written to files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlx.offload.benchmark.measure import BenchmarkPlan, CaseRun
from rlx.offload.benchmark.models import Case
from rlx.offload.benchmark.picture import draw
from rlx.offload.benchmark.ranks import Ranks
from rlx.offload.benchmark.report import table, write_json
from rlx.offload.benchmark.results import CaseResult


class Job(NamedTuple):
    """What was asked for.

    Args:
        plan: what to measure and how.
        cases: one after the other.
        title: of the pictures.
        about: what the JSON file says beside the figures.
        folder: where the files go; it exists.
    """

    plan: BenchmarkPlan
    cases: Sequence[Case]
    title: str
    about: dict[str, Any]
    folder: Path

    def run(self, ranks: Ranks) -> bool:
        """Measure; the first of the processes reports.

        Returns:
            Whether a mode could be measured in each case.
        """
        results: list[CaseResult] = []
        files = [self.folder / "results.json"]
        for case in self.cases:
            result = CaseRun(self.plan, case, ranks).run()
            results.append(result)
            if ranks.is_first:
                ranks.say(f"\n{table(result)}\n")
                # After each case, so that an interrupted run leaves what it has.
                write_json(files[0], self.about, results)
                files += self._picture(result, ranks)
        ranks.say("written: " + ", ".join(map(str, files)))
        return all(any(row.median_s is not None for row in result.rows) for result in results)

    def _picture(self, result: CaseResult, ranks: Ranks) -> list[Path]:
        if not self.plan.with_picture or all(row.median_s is None for row in result.rows):
            return []
        if self.plan.device.type == "cpu":
            ranks.say("picture without device memory: the CPU has none of its own")
        path = self.folder / f"{result.tokens}x{result.layers}.png"
        try:
            draw(path, self.title, result)
        except ImportError as error:
            ranks.say(f"no picture: {error}")
            return []
        return [path]
