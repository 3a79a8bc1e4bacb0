"""Score the policy on held-out prompts and keep its responses. Shape letters: B samples, P prompts, N samples per prompt."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlx.checkpoint.folders import replacing_file
from rlx.data.batch import Batch, places_of
from rlx.errors import storing
from rlx.rewards.manager import Scores
from rlx.trainer.checkpoints import is_evaluation
from rlx.trainer.environment_rows import sampled_tokens
from rlx.trainer.run_state import Run
from rlx.trainer.samples import Part, SampleSource, dump, extras, generations
from rlx.trainer.tracking import finite

SHOWN = ("prompt_text", "response_text", "ground_truth", "data_source")
"""Info that the dump of a validation shows."""


class Validation:
    """Validates a run."""

    def __init__(self, run: Run, samples: SampleSource):
        self._run, self._samples = run, samples
        self.last: dict[str, float] = {}  # metrics of the last validation, with its step

    def run(self) -> dict[str, float]:
        """Score the policy on held-out prompts, keep its responses, and return the metrics."""
        run, config = self._run, self._run.config
        val, trainer = config.actor_rollout_ref.rollout.val_kwargs, config.trainer
        samples = val.n if val.do_sample else 1  # greedy samples of a prompt are equal
        assert run.val is not None, "loaded if the configuration asks for a validation"
        together = config.data.val_batch_size or max(len(run.val), 1)
        folder, step = Path(trainer.validation_data_dir or run.folder / "validation"), run.finished_steps
        parts = PartsFile(folder / f"{step}.parts.jsonl" if is_evaluation(config) else None)
        with run.progress.phase("validate"):
            for first in range(0, len(run.val), together):
                if first not in parts.found:
                    prompts = run.val.batch([*range(first, min(first + together, len(run.val)))])
                    batch = self._samples.responses(prompts, samples, "val", step=0, first=first)
                    parts.add(first, batch, self._samples.scores_of(batch))
        batch, scores = parts.joined()
        records = generations(batch, scores)
        of_the_run = is_evaluation(config) or not (trainer.val_only and step)
        dump(records, folder, str(step) if of_the_run else f"{step}.val_only")
        if shown := records[: trainer.log_val_generations]:
            run.progress.generations(shown)
            run.tracker.generations(shown, step)
        measured = summarise(batch, scores) | over_samples(batch, scores, samples)
        if is_evaluation(config):
            rows = [finite(row._asdict()) for row in estimates(batch, scores, samples)]
            with storing(folder), replacing_file(folder / f"{step}.json") as file:
                json.dump({"metrics": finite(measured), "rows": rows}, file, allow_nan=False)
            parts.remove()
        self.last = measured | {"step": float(step)}
        run.first_validation = run.first_validation or self.last
        return measured


class PartsFile:
    """What measures need of the parts of a validation, by the index of their first prompt.

    An evaluation keeps them in a file, a line for each, so that one that was interrupted continues.
    """

    def __init__(self, path: Path | None):
        self._path, self.found = path, dict[int, dict[str, Any]]()
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # torn by a kill
                    first, part = json.loads(line)
                    self.found[first] = part

    def add(self, first: int, batch: Batch, scores: Scores) -> None:
        part = {"lengths": sampled_tokens(batch).tolist(), "info": {name: batch.info[name] for name in SHOWN}}
        self.found[first] = part | {"scores": scores.scores.tolist(), "extra": scores.extra}
        if self._path is not None:
            with storing(self._path), self._path.open("a", encoding="utf-8") as file:
                # A line break first, which ends a torn line.
                file.write(f"\n{json.dumps([first, self.found[first]], default=str)}\n")

    def joined(self) -> Part:
        """Return a batch of the info and the responses' masks alone, and the scores; numbers that a part lacks become NaN."""
        parts = [self.found[first] for first in sorted(self.found)]
        lengths = torch.tensor([length for part in parts for length in part["lengths"]])
        mask = torch.arange(max([1, *lengths.tolist()])) < lengths[:, None]
        info = {name: [x for part in parts for x in part["info"][name]] for name in SHOWN}
        batch = Batch.of({"response_mask": mask}, info)
        return batch, Scores.joined([Scores(torch.tensor(part["scores"]), part["extra"]) for part in parts])

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Estimate(NamedTuple):
    """A mean over prompts with its 95 % interval: 1.96 standard errors on both sides, NaN for a single prompt."""

    data_source: str
    name: str
    value: float
    low: float
    high: float
    prompts: int


def estimates(batch: Batch, scores: Scores, samples: int) -> list[Estimate]:
    """Return avg@n and pass@k of accuracy, and avg@n of the score, by data source and, of several, of all.

    They are the numbers of `over_samples`: pass@k is best@k of an accuracy of zeros and ones, for which `best_of` is unbiased.
    """
    rows_of, found = places_of(batch.info["data_source"]), list[Estimate]()
    if len(rows_of) > 1:
        rows_of = {**rows_of, "all": [*range(len(batch))]}
    for source, rows in rows_of.items():
        for name, of_row_B in {"": scores.right(), "reward ": scores.scores.double()}.items():
            values_PN = of_row_B[rows].view(-1, samples)
            best = "pass" if ((values_PN == 0) | (values_PN == 1)).all() else "best"
            of_prompts = {f"{name}avg@{samples}": values_PN.mean(dim=1)}
            if not name:
                of_prompts |= {f"{best}@{k}": best_of(values_PN, k) for k in _sizes(samples)}
            for what, values_P in of_prompts.items():
                mean = values_PN.mean() if "avg" in what else values_P.mean()
                half = 1.96 * (values_P.std() / len(values_P) ** 0.5 if len(values_P) > 1 else math.nan)
                found.append(
                    Estimate(source, what, *(x.item() for x in (mean, mean - half, mean + half)), len(values_P))
                )
    return found


def summarise(batch: Batch, scores: Scores) -> dict[str, float]:
    """Return validation metrics: accuracy, reward, length, and accuracy by data source if there are several.

    Other numbers that reward functions report become `val/extra/...`, so that their names cannot hide these.
    """
    lengths = sampled_tokens(batch).float()
    right = scores.right()
    metrics = extras(scores, "val") | {
        "val/accuracy": right.mean().item(),
        "val/reward": scores.scores.mean().item(),
        "val/response_length": lengths.mean().item(),
    }
    rows_of = places_of(batch.info["data_source"])
    if len(rows_of) > 1:
        for source, rows in rows_of.items():
            metrics[f"val/accuracy/{source}"] = right[rows].mean().item()
    return metrics


def over_samples(batch: Batch, scores: Scores, samples: int) -> dict[str, float]:
    """Return metrics over several samples of each prompt, by data source; nothing for one sample.

    They are computed for the accuracy `acc` (see Scores.right) and the score `reward`. With n = `samples` they are means over
    the prompts of

        mean@n       the mean of a prompt's samples, which are in a row
        std@n        their standard deviation, of the n themselves (divided by n, not n - 1)
        best@k/mean  the expected best of k samples, for k = 2, 4, ... below n and for n: see `best_of`

    named `<section>/<data source>/<acc or reward>/<name>`. The section is `val-core` for mean@n and best@n/mean of `acc` if a
    reward function reports it, else of `reward`; for the rest it is `val-aux`.

    Source: names and sections as in verl-project/verl@018f23b. verl draws the k samples a thousand times with replacement, so
    its best@k is a little lower and its best@n is not the best of all n. Left out are its worst@k, the deviations of its draws,
    and maj@k, which needs answers as text.
    """
    if samples == 1:
        return {}
    numbers = {"acc": scores.right(), "reward": scores.scores.double()}
    own = scores.extra.get("acc", [math.nan] * len(batch))
    metrics = {}
    for source, rows in places_of(batch.info["data_source"]).items():
        core = "reward" if all(math.isnan(own[row]) for row in rows) else "acc"
        for name, of_row_B in numbers.items():
            values_PN = of_row_B[rows].view(-1, samples)
            found = {f"mean@{samples}": values_PN.mean(), f"std@{samples}": values_PN.std(dim=1, correction=0).mean()}
            found |= {f"best@{k}/mean": best_of(values_PN, k).mean() for k in _sizes(samples)}
            heads = (f"mean@{samples}", f"best@{samples}/mean") if name == core else ()
            for what, value in found.items():
                metrics[f"{'val-core' if what in heads else 'val-aux'}/{source}/{name}/{what}"] = value.item()
    return metrics


def _sizes(samples: int) -> list[int]:
    powers = (2**power for power in range(1, samples.bit_length()))
    return [*(each for each in powers if each < samples), samples] if samples > 1 else []


def best_of(values_PN: Tensor, k: int) -> Tensor:
    """Return the mean of the largest of k values over all choices of k of a row's n values: (P, n) float to (P,).

    It is unbiased for the expected best of k samples. With x_1 <= ... <= x_n it is the sum over i of C(i - 1, k - 1) / C(n, k)
    x_i, because x_i is the largest in C(i - 1, k - 1) of the C(n, k) choices.

    Source: for values 0 and 1 this is pass@k of arXiv:2107.03374, equation 1, 1 - C(n - c, k) / C(n, k) with c ones.
    """
    n = values_PN.shape[1]
    shares = [math.comb(i - 1, k - 1) / math.comb(n, k) for i in range(1, n + 1)]
    return values_PN.sort(dim=1).values @ torch.tensor(shares, dtype=values_PN.dtype)
