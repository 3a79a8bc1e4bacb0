"""Where samples come from: prompts, the sampler's responses, their scores, and what dynamic sampling selects of them.

Shape letters as in `rlx/data/batch.py`.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlx.algorithms.advantages import ESTIMATORS, overlong_penalty
from rlx.cluster.group import BegunCall, Meanwhile
from rlx.cluster.placement import share_ranges
from rlx.config.schema import OverlongBufferConfig
from rlx.config.schema.roles import has_environment, has_reward_model, takes_sampled_log_probs
from rlx.data.batch import Batch, concat
from rlx.environments.conversation import Conversation
from rlx.environments.role import batch_of, rows_of
from rlx.errors import ExplainedError, storing
from rlx.rewards.manager import Scores
from rlx.rollout.protocol import Kept
from rlx.rollout.sampler import samples_of
from rlx.trainer import environment_rows, prompt_queue
from rlx.trainer.environment_rows import FailedConversations, all_rows, texts_of, written_tokens
from rlx.trainer.learning import balanced
from rlx.trainer.prompt_queue import Draw, not_begun, spread
from rlx.trainer.run_state import Run
from rlx.trainer.tracking import finite

Metrics = dict[str, float]
Part = tuple[Batch, Scores]
"""Samples and the scores that the reward functions gave them."""


class Samples(NamedTuple):
    """Responses to prompts."""

    batch: Batch  # a row for each; with `greedy_scores` if the estimator reads them
    scores: Scores | None  # of each; None: not scored yet
    metrics: Metrics  # of how they were found


class SampleSource:
    """Generates and scores samples for training and validation."""

    def __init__(self, run: Run):
        self._run, self._config = run, run.config
        self._unfinished: Metrics = {}  # of the last step with a queue
        self._phase: tuple[list[tuple[Draw, int]], BegunCall] | None = None  # draw and row of each sample, and the call
        self._failed = FailedConversations(run.config.environment, run.progress)
        self._has_judge, self._has_environment = has_reward_model(run.config), has_environment(run.config)
        self._least_gain = run.config.actor_rollout_ref.model.least_gain

    def generate(self, step: int) -> Samples:
        """Return samples of train_batch_size prompts; with filter_groups scored ones, only of prompts whose samples differ.

        With filter_groups it draws prompts until there are enough and drops the surplus; the next step draws others.
        """
        filters, data, queue = self._config.algorithm.filter_groups, self._config.data, self._run.queue
        epoch = {"train/epoch": float(queue[0].epoch if queue else self._run.sampler.epoch)}
        if not filters.enable:
            drawn = self._drawn(step, first=0)
            return Samples(drawn, None, epoch | self._unfinished)
        found = DynamicSampling(filters.metric, data.train_batch_size, self._config.actor_rollout_ref.rollout.n)
        while found.kept < data.train_batch_size:
            if found.generations == filters.max_num_gen_batches > 0:
                raise found.error(step)
            found.add(*self._scored(self._drawn(step, first=found.prompts)))
        return Samples(*found.samples(), epoch | found.metrics() | self._unfinished)

    def score(self, step: int, samples: Samples) -> tuple[Batch, Metrics]:
        """Score samples unless they are; return the rows for the models, dealt to processes, and the metrics of all."""
        trainer = self._config.trainer
        batch, scores, metrics = samples
        if scores is None:
            batch, scores = self._scored(batch)
        if trainer.rollout_data_dir:
            dump(generations(batch, scores), Path(trainer.rollout_data_dir), str(step))
        batch = all_rows(batch.with_({"numbers": numbers(scores)}))
        if trainer.balance_batch:
            batch = batch.rows(balanced(batch, self._run.workers.mesh("actor").shares, self._least_gain))
        if takes_sampled_log_probs(self._config):
            batch = batch.with_(old_log_probs=batch["rollout_log_probs"])
        return batch, {**metrics, **extras(scores, "reward"), "reward/accuracy": scores.right().mean().item()}

    def responses(self, prompts: Batch, samples: int, purpose: str, step: int, first: int = 0) -> Batch:
        """Generate `samples` responses per prompt, sampled as configured for `purpose` ("train", "val" or "greedy")."""
        rows = spread(prompts, samples, self._run.seed, purpose, step, first)
        sent = rows.select("prompt_ids", "prompt_mask", "seed")
        sent = sent.with_(rows.info) if self._has_environment else sent
        answers: list[Batch | None] = [None]
        while None in answers:
            answers = self._answers(self._begin(rows, sent, purpose))
        return self._received(rows, concat([each for each in answers if each is not None]))

    def _begin(self, rows: Batch, sent: Batch, purpose: str) -> BegunCall:
        """Begin to sample; what is finished is scored while this process waits for any workers."""
        if self._run.sampler_lost:
            self._run.send_weights(updates=0)
        scores_early = not self._has_environment and self._run.rewards.scores_early(rows)
        meanwhile = self._scoring(rows) if scores_early else None
        return self._run.workers.begin("rollout", "generate", purpose, batch=sent, meanwhile=meanwhile)

    def _answers(self, call: BegunCall) -> list[Batch | None]:
        """Return the answer of each of the sampler's shares.

        None is that of a sampler in processes of its own that failed, which has begun anew and waits for weights.
        """
        answers: list[Batch | None] = self._run.workers.results(call)
        self._run.sampler_lost |= None in answers
        return answers

    def _received(self, rows: Batch, written: Batch) -> Batch:
        self._failed.judge(written)
        return environment_rows.received(rows, written, self._run.tokenizer, self._config.actor_rollout_ref.rollout)

    def _scoring(self, rows: Batch) -> Meanwhile:
        """Return what scores the samples that are finished while others of these rows are generated."""
        run, rollout = self._run, self._config.actor_rollout_ref.rollout
        row_of = {seed: row for row, seed in enumerate(rows["seed"].tolist())}

        def score(finished: list[tuple[int, list[int]]], wait_s: float) -> bool:
            # Others are of the call before
            if known := {row_of[seed]: tokens for seed, tokens in finished if seed in row_of}:
                texts = texts_of([*known.values()], run.tokenizer, rollout)
                run.rewards.begin(rows.rows([*known]).with_({"response_text": texts}))
            return run.rewards.work(wait_s)

        return score

    def scores_of(self, batch: Batch) -> Scores:
        """Score each response with the reward functions, a reward model, its environment, or several of them."""
        rewards, model_scores = self._run.rewards, None
        if self._has_judge:
            sequences = rewards.sequences(batch)
            model_scores = self._run.workers.split("reward", "scores", sequences)["model_scores"]
        by_functions = partial(rewards.score, batch, self._run.folder / "failed_rewards", model_scores)
        return environment_rows.scores(self._config, batch, by_functions)

    def _drawn(self, step: int, first: int) -> Batch:
        """Return samples of the next prompts; the step has drawn `first` prompts before."""
        run = self._run
        with run.progress.phase("rollout"):
            if run.queue or self._config.actor_rollout_ref.rollout.partial.max_staleness:
                return self._from_queue(step, first)
            self._unfinished = {}
            prompts = run.train.batch(run.sampler.next())
            batch = self.responses(prompts, self._config.actor_rollout_ref.rollout.n, "train", step, first)
            if "greedy_scores" not in ESTIMATORS[self._config.algorithm.adv_estimator].reads:
                return batch
            greedy = self.responses(prompts, 1, "greedy", step, first)
        return batch.with_(greedy_scores=self._scored(greedy)[0]["scores"][batch["group_id"] - first])

    def _from_queue(self, step: int, first: int) -> Batch:
        """Return the samples of the oldest draw, all ended, after a phase in which those of later draws went on.

        A sampler in processes of its own then begins the next phase, which runs while this step trains; see `meet`.
        """
        run, config, draws = self._run, self._config, self._run.queue
        rollout, room = config.actor_rollout_ref.rollout, prompt_queue.room(config, step)
        is_apart = config.trainer.n_rollout_gpus > 0
        went_on = int(self._unfinished["partial/continued_tokens"]) if first else 0  # of all generations of the step
        self._end_phase()
        while len(draws) < room:
            label, epoch, prompts = step + len(draws), run.sampler.epoch, run.sampler.next()
            place = run.sampler.place if config.algorithm.filter_groups.enable else 0  # steps differ in their draws
            rows = spread(run.train.batch(prompts), rollout.n, run.seed, "train", label, place)
            draws.append(Draw(label, place, epoch, prompts, rows, [not_begun(config) for _ in range(len(rows))]))
        is_due = not is_apart
        while is_due or draws[0].open_rows:  # again if a sampler in processes of its own failed
            went_on += self._begin_phase(draws[: 1 if is_apart else room])
            self._end_phase()
            is_due = False
        draw = draws.pop(0)
        if is_apart:
            went_on += self._begin_phase(draws[: room - 1])
        waiting = [kept for each in draws for kept in each.kept if not kept.is_finished]
        self._unfinished = {
            "partial/queued_prompts": float(sum(len(each.prompts) for each in draws)),
            "partial/unfinished_samples": float(sum(prompt_queue.token_count(each) > 0 for each in waiting)),
            "partial/continued_tokens": float(went_on),
        }
        group_id = draw.rows["group_id"] - draw.first + first
        length, pad = config.data.max_response_length, int(run.tokenizer.pad_token_id)
        rows = draw.rows.with_(group_id=group_id)
        if self._has_environment:
            ran = [each for each in draw.kept if isinstance(each, Conversation)]
            written = batch_of(ran, rows_of(rows), pad, length, run.policy_version, with_log_probs=True)
        else:
            kept = [each for each in draw.kept if isinstance(each, Kept)]
            written = samples_of(rows, kept, pad, length, with_log_probs=True)
        return self._received(rows, written)

    def _begin_phase(self, draws: Sequence[Draw]) -> int:
        """Begin to sample the open rows of these draws, the first to their end; return how many kept tokens are read again."""
        if not any(draw.open_rows for draw in draws):
            return 0
        budget, shares = prompt_queue.round_tokens(self._config), self._run.workers.mesh("rollout").shares
        rows, places = prompt_queue.phase_rows(draws, budget, shares)
        sent = rows.select("prompt_ids", "prompt_mask", "seed", "budget")
        sent = sent.with_(rows.info if self._has_environment else {"kept": rows.info["kept"]})
        self._phase = [(draws[number], row) for number, row in places], self._begin(rows, sent, "train")
        return sum(map(prompt_queue.token_count, rows.info["kept"]))

    def _end_phase(self) -> None:
        """Wait for the phase that runs, if one does, and keep what it sampled; the share of a sampler that failed stays as it was."""
        if self._phase is None:
            return
        places, call = self._phase
        self._phase = None
        answers = self._answers(call)
        for share, answer in zip(share_ranges(len(places), len(answers)), answers, strict=True):
            for at, kept in zip(share, answer.info["kept"] if answer else (), strict=answer is not None):
                draw, row = places[at]
                draw.kept[row] = kept

    def meet(self) -> None:
        """Wait for a sampler in processes of its own, which has worked on later steps while this one trained."""
        if self._phase is not None:
            with self._run.progress.phase("rollout"):
                self._end_phase()

    def _scored(self, batch: Batch) -> Part:
        with self._run.progress.phase("reward"):
            scores = self.scores_of(batch)
            return with_scores(batch, scores, self._config.reward.overlong_buffer), scores


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
    batch, scores = part
    extra = {name: [values[i] for i in rows] for name, values in scores.extra.items()}
    return batch.rows(rows), Scores(scores.scores[list(rows)], extra)


def join(parts: Sequence[Part]) -> Part:
    """Join the rows of all parts. Prompts are left padded to the longest; numbers that a part lacks become NaN."""
    widest = max(batch.prompt_length for batch, _ in parts)
    batch = concat([batch.with_prompts(widest) for batch, _ in parts])
    return batch, Scores.joined([scores for _, scores in parts])


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
        return sum(len(batch) for batch, _ in self._kept) // self._samples

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


def extras(scores: Scores, prefix: str) -> dict[str, float]:
    """Return means of the numbers that reward functions report with the score, over the samples that have them."""
    return {
        f"{prefix}/extra/{name}": torch.tensor(values, dtype=torch.float64).nanmean().item()
        for name, values in scores.extra.items()
    }


def numbers(scores: Scores) -> list[dict[str, float | None]]:
    """Return the numbers of each sample; a missing one is None."""
    extra = scores.extra.items()
    return [finite({name: values[row] for name, values in extra}) for row in range(len(scores.scores))]


def generations(batch: Batch, scores: Scores) -> list[dict[str, Any]]:
    """Return one readable record per sample."""
    return [
        {
            **own,
            "prompt": batch.info["prompt_text"][i],
            "response": batch.info["response_text"][i],
            "ground_truth": batch.info["ground_truth"][i],
            "data_source": batch.info["data_source"][i],
            "score": score,
        }
        for i, (score, own) in enumerate(zip(scores.scores.tolist(), numbers(scores), strict=True))
    ]


def dump(records: Iterable[dict[str, Any]], folder: Path, name: str) -> None:
    """Write <folder>/<name>.jsonl, one record per line."""
    file = folder.expanduser() / f"{name}.jsonl"
    with storing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Half a surrogate pair becomes its escape, which is valid JSON.
        with file.open("w", encoding="utf-8", errors="backslashreplace") as out:
            out.writelines(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
