"""A whole benchmark: measure every case, print it and write it to files."""

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
    """A benchmark as the user asked for it.

    Args:
        plan: modes, device and number of steps.
        cases: measured one after the other.
        title: of the pictures.
        about: further content of the JSON file.
        folder: an existing folder for the files.
    """

    plan: BenchmarkPlan
    cases: Sequence[Case]
    title: str
    about: dict[str, Any]
    folder: Path

    def run(self, ranks: Ranks) -> bool:
        """Measure all cases; the first process reports.

        Returns:
            Whether at least one mode was measured in each case.
        """
        results: list[CaseResult] = []
        files = [self.folder / "results.json"]
        for case in self.cases:
            result = CaseRun(self.plan, case, ranks).run()
            results.append(result)
            if ranks.is_first:
                ranks.say(f"\n{table(result)}\n")
                # After each case, so that an interrupted run leaves the results so far.
                write_json(files[0], self.about, results)
                files += self._picture(result, ranks)
        ranks.say("written: " + ", ".join(map(str, files)))
        return all(any(row.median_s is not None for row in result.rows) for result in results)

    def _picture(self, result: CaseResult, ranks: Ranks) -> list[Path]:
        if not self.plan.with_picture or all(row.median_s is None for row in result.rows):
            return []
        if self.plan.device.type == "cpu":
            ranks.say("the picture shows no device memory: the CPU has none of its own")
        path = self.folder / f"{result.tokens}x{result.layers}.png"
        try:
            draw(path, self.title, result)
        except ImportError as error:
            ranks.say(f"no picture: {error}")
            return []
        return [path]
