"""Select the samples of a step: penalties for length, dynamic sampling, and joining generations.

Pure functions of the driver. Shape letters as in `rlx/data/batch.py`.
"""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from rlx.algorithms.advantages import overlong_penalty
from rlx.config.schema import OverlongBufferConfig
from rlx.data.batch import Batch, concat
from rlx.errors import ExplainedError
from rlx.rewards.manager import Scores
from rlx.trainer.forked_conversations import written_tokens

Part = tuple[Batch, Scores]
"""Samples and the scores that the reward functions gave them."""


class SelectionError(ExplainedError, ValueError):
    """Dynamic sampling found too few prompts, or no reward function reports its metric."""


def with_scores(batch: Batch, scores: Scores, overlong: OverlongBufferConfig) -> Batch:
    """Write the scores of the reward functions, less the length penalty if configured.

    The penalty counts all tokens behind the prompt, and in a conversation that forked those of all its rows.
    """
    if not overlong.enable:
        return batch.with_(scores=scores.scores)
    lengths_B = written_tokens(batch)
    penalty_B = overlong_penalty(lengths_B, batch.response_length, overlong.len, overlong.penalty_factor)
    return batch.with_(scores=scores.scores + penalty_B)


def informative(batch: Batch, scores: Scores, metric: str) -> list[int]:
    """Return the rows of prompts whose samples differ in `metric`, in order.

    The metric is acc (`Scores.right`), score (of the reward function), seq_reward or seq_final_reward (scores of the batch), or
    a number that reward functions report. A sample without the number, or without a response token because its environment
    failed before the first turn, differs from no other. Raises SelectionError if nobody reports such a number.
    """
    named = {"acc": scores.right(), "score": scores.scores}
    named |= dict.fromkeys(("seq_reward", "seq_final_reward"), batch["scores"])
    named |= {name: torch.tensor(values) for name, values in scores.extra.items() if name not in named}
    if metric not in named:
        raise SelectionError(
            f"algorithm.filter_groups.metric: got {metric!r}, expected a number that a reward function reports, one of "
            f"{', '.join(named)}"
        )
    groups, found = batch["group_id"].tolist(), defaultdict[int, set[float]](set)
    answered = batch["response_mask"].any(dim=1).tolist()  # the others have no advantage, see `algorithms.advantages`
    for group, value, counts in zip(groups, named[metric].tolist(), answered, strict=True):
        if counts and not math.isnan(value):
            found[group].add(value)
    return [row for row, group in enumerate(groups) if len(found[group]) > 1]


def take_rows(part: Part, rows: Sequence[int]) -> Part:
    """Return these rows in this order."""
    batch, scores = part
    extra = {name: [values[i] for i in rows] for name, values in scores.extra.items()}
    return batch.rows(rows), Scores(scores.scores[list(rows)], extra)


def join(parts: Sequence[Part]) -> Part:
    """Join the rows of all parts. Prompts are left padded to the longest; numbers that a part lacks become NaN."""
    widest = max(batch.prompt_length for batch, _ in parts)
    batch = concat([batch.with_prompts(widest) for batch, _ in parts])
    extra: dict[str, list[float]] = {}
    for name in sorted({name for _, scores in parts for name in scores.extra}):
        extra[name] = [x for part, scores in parts for x in scores.extra.get(name, [math.nan] * len(part))]
    return batch, Scores(torch.cat([scores.scores for _, scores in parts]), extra)


class DynamicSampling:
    """Collects samples of prompts whose samples differ in `metric`, until a step has `wanted` prompts of `samples` each."""

    def __init__(self, metric: str, wanted: int, samples: int):
        self._metric, self._wanted, self._samples = metric, wanted, samples
        self._kept: list[Part] = []
        self._right = 0.0
        self.generations = self.prompts = 0

    def add(self, batch: Batch, scores: Scores) -> None:
        """Keep the informative samples of one generation."""
        self.generations += 1
        self.prompts += len(batch) // self._samples
        self._right += scores.right().sum().item()
        self._kept.append(take_rows((batch, scores), informative(batch, scores, self._metric)))

    @property
    def kept(self) -> int:
        """Number of prompts kept."""
        return sum(len(batch) for batch, _ in self._kept) // self._samples

    @property
    def enough(self) -> bool:
        """Whether enough prompts are kept."""
        return self.kept >= self._wanted

    def samples(self) -> Part:
        """Return the samples of the first kept prompts, as many as are wanted."""
        return take_rows(join(self._kept), range(self._wanted * self._samples))

    def metrics(self) -> dict[str, float]:
        """Return the number of generations of the step, and over all of them the share of prompts kept and the accuracy."""
        return {
            "filter_groups/generations": float(self.generations),
            "filter_groups/kept_share": self.kept / self.prompts,
            "filter_groups/accuracy": self._right / (self.prompts * self._samples),
        }

    def error(self, step: int) -> SelectionError:
        """Return the error to raise when no generation is left."""
        return SelectionError(
            f"step {step}: algorithm.filter_groups kept {self.kept} of {self.prompts} prompts, whose samples differ in "
            f"{self._metric}, expected data.train_batch_size={self._wanted} after {self.generations} generations. "
            f"{self.metrics()['filter_groups/accuracy']:.1%} of all answers were right; prompts that are too easy or too hard "
            "teach nothing. Raise algorithm.filter_groups.max_num_gen_batches (0: no limit), data.gen_batch_size or "
            "actor_rollout_ref.rollout.n, or choose other prompts"
        )
