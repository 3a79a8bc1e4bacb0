"""Score a batch of responses: each sample goes to the reward function of its data source."""

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlx.config.schema import CustomRewardConfig, RewardConfig
from rlx.data.batch import SEQUENCE, Batch, left_padded, places_of
from rlx.errors import ExplainedError, cause_of, storing
from rlx.rewards import gsm8k
from rlx.rewards.function import BATCHED, LARGEST_SCORE, SINGLE, Function, Outcome, Part, outcome_of, own_parts, raised
from rlx.rewards.rules import MATH_SOURCES, no_function_for, remedy_for, scored_sources
from rlx.rewards.scoring_pool import RewardCall, ScoringPool
from rlx.user_code import TEMPLATE_LIMIT_S, call_within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MATHS = "rlx.rewards.math"
MATH_LIMIT_S, MATH_CPU_LIMIT_S = 60.0, 2.0
"""math-verify grades most answers in milliseconds. The first limit holds also in code that cannot be interrupted; it is long because
beside ten busy processes on two cores, two seconds of CPU time took a process of low priority more than 20."""
POOL_FIGURES = ("errors", "timeouts", "crashes", "retries", "processes")
MOST_WORKERS = 16
TRIAL_S, TRIED_AT_ONCE = 30.0, 1000
"""For trying answers before the start, and how many between two looks at the clock."""
SMALLEST_PART = 8
"""A failing list is halved down to 1 / SMALLEST_PART of its rows, and further once its function has answered a part."""
SCORED_INFO = ("data_source", "response_text", "ground_truth", "extra_info")
"""The entries of a batch's info that become the arguments SINGLE of a reward function."""

Sample = dict[str, Any]


class RewardError(ExplainedError, ValueError):
    """A reward function failed, or a data source has none."""


class Scores(NamedTuple):
    """One score per sample, and the other numbers that reward functions report."""

    scores: Tensor  # (B,) fp32
    # Lists of length B by name; NaN for a sample whose function did not report the number
    extra: dict[str, list[float]]

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        """Return the scores of all parts in order; numbers that a part lacks become NaN."""
        names = sorted({name for each in parts for name in each.extra})
        extra = {
            name: [x for each in parts for x in each.extra.get(name, [math.nan] * len(each.scores))] for name in names
        }
        return cls(torch.tensor([score for each in parts for score in each.scores.tolist()]), extra)

    def right(self) -> Tensor:
        """Return 1 for right answers (B,) fp64: the function's own `acc` if it reports one, else a score of at least 1."""
        by_score_B = (self.scores >= 1.0).double()
        own_B = torch.tensor(self.extra.get("acc", [math.nan] * len(self.scores)), dtype=torch.float64)
        return torch.where(own_B.isnan(), by_score_B, own_B)


class ConversationError(ExplainedError, ValueError):
    """A conversation cannot be written for the reward model."""


class Conversations:
    """Turns samples into the sequences of a reward model.

    If policy and judge have the same vocabulary and chat template, these are the policy's own tokens. Otherwise the judge's
    template formats the prompt's messages and the response's text; behind a prompt of plain text the response follows directly.
    """

    def __init__(self, policy: "PreTrainedTokenizerBase", judge: "PreTrainedTokenizerBase"):
        self._judge = judge
        self.same = policy.get_vocab() == judge.get_vocab() and policy.chat_template == judge.chat_template

    def of(self, batch: Batch) -> Batch:
        """Return the columns SEQUENCE to score, row by row, of a batch with them and with info raw_prompt and response_text."""
        if self.same:
            return batch.select(*SEQUENCE)
        if "raw_prompt" not in batch.info:
            raise ConversationError(
                "the reward model has another tokenizer than the policy and needs the prompts' messages, but the data set "
                "gives no info raw_prompt (text, or a list of messages, for each row); let its batch() give them"
            )
        texts = zip(batch.info["raw_prompt"], batch.info["response_text"], strict=True)
        ids_BT, mask_BT = left_padded([self._tokens(*each) for each in texts])
        # The model scores the whole sequence, so any part of it may count as the response.
        return Batch.of({"input_ids": ids_BT, "attention_mask": mask_BT, "response_mask": mask_BT[:, -1:]})

    def _tokens(self, prompt: str | list[dict[str, Any]], response: str) -> list[int]:
        if isinstance(prompt, str):
            return list(self._judge(prompt + response)["input_ids"])
        messages = [*prompt, {"role": "assistant", "content": response}]
        try:
            template = self._judge.apply_chat_template
            return list(call_within(TEMPLATE_LIMIT_S, template, messages, tokenize=True, return_dict=False))
        except Exception as fault:  # templates raise any kind of error
            raise ConversationError(
                f"the reward model's tokenizer does not take a chat ({type(fault).__name__}: {fault}); expected a chat template "
                "for these roles; save one with the tokenizer, or use prompts of plain text"
            ) from None


class RewardFailure(NamedTuple):
    """The reason why a sample has no score (error, timeout or crash of its function) in words, with the traceback."""

    kind: str
    function: Function
    what: str
    traceback: str


Report = dict[str, float] | RewardFailure


class RewardManager:
    """Scores samples with the reward function of each data source. A context that ends the reward processes.

    If `custom` is set, its function or parts score every sample, or those of its `data_sources`. The sampler takes `sampler_cores` of
    this machine. `judge` writes the input of a model that scores, too; to its score that of the functions is added `rule_weight` times:
    with 0 they are not called, and None is without a model. Raises UserCodeError if the user's function cannot be loaded.
    """

    def __init__(
        self,
        reward: RewardConfig,
        custom: CustomRewardConfig,
        sampler_cores: int = 0,
        judge: Conversations | None = None,
        rule_weight: float | None = None,
    ):
        self._config, self._custom, self._conversations, self._rule_weight = reward, custom, judge, rule_weight
        self._calls_functions = rule_weight != 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        size = reward.num_workers or min(MOST_WORKERS, cores)
        self._beside_sampler = reward.num_workers or max(1, min(size, cores - sampler_cores))
        self._pool = ScoringPool(size, reward.memory_limit_gb, reward.max_concurrent)
        # By the seed of a sample and the place of a part: the response, and the call's number
        self._begun: dict[tuple[int, int], tuple[str, int]] = {}
        limit_s, options = reward.timeout_s, {"format_score": reward.format_score}
        grade_number = Function("rlx.rewards.gsm8k", "compute_score", limit_s, options=options)
        wall_s, cpu_s = (min(most_s, limit_s) for most_s in (MATH_LIMIT_S, MATH_CPU_LIMIT_S))
        grade_maths = Function(MATHS, "compute_score", wall_s, cpu_limit_s=cpu_s)
        self._known = dict.fromkeys(gsm8k.SOURCES, grade_number) | dict.fromkeys(MATH_SOURCES, grade_maths)
        # Rules that always take microseconds run in this process.
        self._here: dict[Function, Callable[..., Any]] = {grade_number: gsm8k.compute_score}
        self._taken: Counter[str] = Counter()
        self._own, self._form = own_parts(reward, custom), list[Part]()
        if reward.format is not None:
            form = Function("rlx.rewards.rules", "score_form", limit_s, options={"form": reward.format})
            self._form = [Part("format", reward.format_weight, form)]
        for part in self._own:
            if part.function is not None:
                self._pool.check(part.function)

    def __enter__(self) -> "RewardManager":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """Raise RewardError that names all of these data sources without a reward function, before the first sample comes."""
        known = scored_sources(self._custom) if self._calls_functions else None
        if known is not None and (unknown := set(data_sources) - known):
            remedy = remedy_for(unknown, self._custom)
            raise RewardError(f"{no_function_for(unknown)}; known: {', '.join(sorted(known))}; {remedy}")

    def faults_of_answers(self, answers: Mapping[int, tuple[str, Any]]) -> dict[int, str]:
        """Score each answer (data source and ground truth by index) as its own response, and return why some cannot be scored.

        Only built-in functions are tried, and none if errors score 0. Trying ends after TRIAL_S.
        """
        if self._config.on_error != "stop" or not self._calls_functions:
            return {}
        same: dict[tuple[Function, str], list[int]] = {}
        for index, (source, truth) in answers.items():
            rule = self._known.get(source)
            if rule is not None and any(part.function is rule for part in self._parts_of(source)):
                same.setdefault((rule, repr(truth)), []).append(index)
        faults: dict[int, str] = {}
        until, asked = time.monotonic() + TRIAL_S, list(same.items())
        for start in range(0, len(asked), TRIED_AT_ONCE):
            part = asked[start : start + TRIED_AT_ONCE]
            firsts = [answers[rows[0]] for _, rows in part]
            samples = [dict(zip(SINGLE, (source, str(truth), truth, None), strict=True)) for source, truth in firsts]
            asked_now = zip((function for (function, _), _ in part), samples, strict=True)
            reports = self._ask([(function, sample, None) for function, sample in asked_now])
            for (_, rows), report in zip(part, reports, strict=True):
                if isinstance(report, RewardFailure):
                    faults |= dict.fromkeys(rows, f"the answer cannot be scored: {report.what}")
            tried = start + len(part)
            if tried < len(asked) and time.monotonic() > until:
                logger.warning(
                    "answers: tried %d of %d in %g s; the others are tried when they come", tried, len(asked), TRIAL_S
                )
                break
        self._taken.clear()
        return dict(sorted(faults.items()))

    def scores_early(self, rows: Batch) -> bool:
        """Whether `begin` can do anything for samples of these rows."""
        return self._calls_functions and any(map(self._early_parts, set(rows.info["data_source"])))

    def begin(self, batch: Batch) -> None:
        """Begin to score finished samples, with info as for `score` and the column seed, by which `score` finds them."""
        for seed, sample in zip(batch["seed"].tolist(), _samples(batch), strict=True):
            for place, function in self._early_parts(sample["data_source"]).items():
                number = self._number_of(_call(function, sample), (seed, place))
                self._begun[seed, place] = sample["solution_str"], number

    def work(self, wait_s: float) -> bool:
        """Score what has begun until this time has passed or a call has ended; return False at once if there is nothing to do."""
        return self._pool.work(self._beside_sampler, wait_s)

    def _parts_of(self, source: str) -> list[Part]:
        """Return the parts of the score of a source's samples, the form last."""
        is_own = self._own and (not self._custom.data_sources or source in self._custom.data_sources)
        parts = self._own if is_own else [Part("", 1.0, None)]
        return [part._replace(function=part.function or self._known.get(source)) for part in parts] + self._form

    def _early_parts(self, source: str) -> dict[int, Function]:
        """Return the functions that score single samples of a source in processes, by the place of their part."""
        found = {place: part.function for place, part in enumerate(self._parts_of(source))}
        return {place: each for place, each in found.items() if each and not each.batched and each not in self._here}

    def _number_of(self, call: RewardCall, begun: tuple[int, int] | None) -> int:
        """Return the number of a call in the pool; add it unless it has begun."""
        if begun in self._begun:
            response, number = self._begun.pop(begun)
            if response == call.arguments["solution_str"]:
                return number
            self._pool.forget(number)  # the sampler failed, and sampled another response after its restart
        return self._pool.add(call)

    def sequences(self, batch: Batch) -> Batch:
        """Return the reward model's input for the batch. Raises ConversationError."""
        assert self._conversations is not None, "only called with a reward model"
        return self._conversations.of(batch)

    def score(self, batch: Batch, dump_dir: str | Path, model_scores: Tensor | None = None) -> Scores:
        """Score every sample, in order, of a batch with info response_text, data_source, ground_truth and extra_info.

        With `model_scores` (B,): model + rule_weight * function, with both numbers in `extra`, and `acc` from the function's score
        alone. Raises RewardError if a model's score is not finite, a data source is unknown, or a function failed and
        `reward.on_error` or `reward.on_crash` says stop or it failed for all samples. Then a copy of the sample is in `dump_dir`.
        """
        if model_scores is None or self._rule_weight is None:
            return self._by_function(batch, Path(dump_dir))
        if not model_scores.isfinite().all():
            row = int((~model_scores.isfinite()).nonzero()[0])
            raise RewardError(
                f"the reward model's score of sample {row} is {model_scores[row].item()}, expected a finite number; try "
                "reward_model.model.fsdp_config.mixed_precision.param_dtype=fp32"
            )
        if self._rule_weight == 0:
            return Scores(model_scores, {})
        rule = self._by_function(batch, Path(dump_dir))
        own = {"acc": rule.right(), "model_score": model_scores, "rule_score": rule.scores}
        extra = rule.extra | {name: numbers.tolist() for name, numbers in own.items()}
        return Scores(model_scores + self._rule_weight * rule.scores, extra)

    def _by_function(self, batch: Batch, dump_dir: Path) -> Scores:
        samples = _samples(batch)
        self.check_sources(batch.info["data_source"])
        seeds = batch["seed"].tolist() if "seed" in batch else None
        parts_B = [self._parts_of(source) for source in batch.info["data_source"]]
        calls = [
            (part.function, samples[row], (seeds[row], place) if seeds else None)
            for row, parts in enumerate(parts_B)
            for place, part in enumerate(parts)
        ]
        answers = iter(self._ask(calls))
        reports = [self._sum(parts, [next(answers) for _ in parts]) for parts in parts_B]
        failures = {row: report for row, report in enumerate(reports) if isinstance(report, RewardFailure)}
        if failures:
            self._judge(failures, samples, dump_dir)
        numbers = [{"score": 0.0} if isinstance(report, RewardFailure) else report for report in reports]
        names = sorted({name for report in numbers for name in report} - {"score"})
        extra = {name: [report.get(name, math.nan) for report in numbers] for name in names}
        return Scores(torch.tensor([report["score"] for report in numbers], dtype=torch.float32), extra)

    def usage(self) -> dict[str, float]:
        """Return the cost of scoring since the last call: samples that scored 0 because their call raised, took too long or ended
        its process, calls sent again, and processes that ended in a call."""
        taken, self._taken = self._taken, Counter()
        return {f"reward/{name}": float(taken[name]) for name in POOL_FIGURES}

    def _ask(self, calls: list[tuple[Function, Sample, tuple[int, int] | None]]) -> list[Report]:
        """Return the report of each call of a function with a sample, which may have begun."""
        reports: dict[int, Report] = {}
        asked: dict[int, tuple[list[int], RewardCall]] = {}
        for function, places in places_of(function for function, _, _ in calls).items():
            if function in self._here:
                reports |= {place: self._call_here(function, calls[place][1]) for place in places}
            elif function.batched:
                samples = [calls[place][1] for place in places]
                lists = {name: [each[one] for each in samples] for one, name in zip(SINGLE, BATCHED, strict=True)}
                call = RewardCall(function, lists, len(places))
                asked[self._pool.add(call)] = places, call
            else:
                for place in places:
                    _, sample, begun = calls[place]
                    call = _call(function, sample)
                    asked[self._number_of(call, begun)] = [place], call
        reports |= self._reports_of(asked)
        return [reports[place] for place in range(len(calls))]

    def _reports_of(self, calls: dict[int, tuple[list[int], RewardCall]]) -> dict[int, Report]:
        """Return the reports of calls by row. Divide a failing list in halves if failures score 0."""
        reports: dict[int, Report] = {}
        answered: set[Function] = set()  # functions that answered at least a part of their lists
        smallest = {call.function: len(rows) // SMALLEST_PART for rows, call in calls.values()}
        while calls:
            outcomes, counts = self._pool.take(calls)
            self._taken.update(counts)
            answered |= {call.function for number, (_, call) in calls.items() if not outcomes[number].kind}
            asked, calls = calls, {}
            for number, (rows, call) in asked.items():
                outcome = outcomes[number]
                may_be_cut = call.function in answered or len(rows) > smallest[call.function]
                if outcome.kind and len(rows) > 1 and may_be_cut and not self._stops_at(outcome.kind):
                    middle = len(rows) // 2
                    for part in (slice(None, middle), slice(middle, None)):
                        lists = {name: values[part] for name, values in call.arguments.items()}
                        half = RewardCall(call.function, lists, len(rows[part]))
                        calls[self._pool.add(half)] = rows[part], half
                else:
                    reports |= dict(zip(rows, _reports(call.function, outcome, len(rows)), strict=True))
            self._taken["retries"] += len(calls)
        return reports

    def _stops_at(self, kind: str) -> bool:
        """Whether the run stops at an error, a timeout or a crash."""
        return (self._config.on_error if kind == "error" else self._config.on_crash) == "stop"

    def _call_here(self, function: Function, sample: Sample) -> Report:
        arguments = _call(function, sample).arguments
        try:
            outcome = outcome_of(function, self._here[function](**arguments, **function.options), 1)
        except Exception as fault:
            outcome = raised(fault)
        return _reports(function, outcome, 1)[0]

    def _sum(self, parts: list[Part], reports: list[Report]) -> Report:
        """Return the weighted sum with the numbers of each part, or the reason why one failed. The first part tells what is right."""
        failures = [report for report in reports if isinstance(report, RewardFailure)]
        if failures:
            return min(failures, key=lambda failure: not self._stops_at(failure.kind))
        if not any(part.name for part in parts):
            return reports[0]
        score, numbers = 0.0, {"acc": reports[0].pop("acc", float(reports[0]["score"] >= 1.0))}
        for part, report in zip(parts, reports, strict=True):
            own = report.pop("score")
            score += part.weight * own
            numbers |= {f"{part.name}/{name}": value for name, value in report.items()} if part.name else report
            numbers |= {part.name: own} if part.name else {}
        if abs(score) <= LARGEST_SCORE:
            return numbers | {"score": score}
        what = f"and the other parts give the sum {score}, expected a finite number (in fp32); lower their weights"
        return RewardFailure("error", parts[0].function, what, "")

    def _judge(self, failures: dict[int, RewardFailure], samples: list[Sample], dump_dir: Path) -> None:
        """Stop the run if configured or if no sample has a score; otherwise warn of the samples that score 0."""
        stopping = [row for row, failure in failures.items() if self._stops_at(failure.kind)]
        row = (stopping or list(failures))[0]
        failure, sample, function = failures[row], samples[row], failures[row].function
        source, index = sample["data_source"], (sample["extra_info"] or {}).get("index", row)
        label, culprit = f"rlx's reward function of {source!r}", "the ground truth"
        if function.is_own:
            label, culprit = f"{function.name} in {function.source}", "the function"
        elif function.is_judge:
            label, culprit = f"the judge of {function.key}", "its keys, template or server"
        # Its name is a number, because names of files must not come from data.
        copy = dump_dir / f"reward_error_{len(list(dump_dir.glob('reward_error_*.json'))) + 1}.json"
        report = {name: sample[name] for name in SINGLE} | {"index": index, "function": label}
        report |= {"fault": failure.what, "traceback": failure.traceback}
        text = json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n"
        with storing(copy):
            dump_dir.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair stays valid JSON
        what = f"{label} {failure.what}; data source {source!r}, sample {index}, a copy of it is in {copy}"
        none = len(failures) == len(samples) > 1
        if stopping or none:
            key = "reward.on_error" if failure.kind == "error" else "reward.on_crash"
            remedy = f"correct {culprit}"
            remedy += f", or let such samples score 0: {key}=zero" if not none else ""
            text = f"{what}{'; no sample of the batch got a score' if none else ''}; {remedy}"
            raise RewardError(text) from cause_of(failure.traceback)
        plural = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}
        self._taken.update(plural[each.kind] for each in failures.values())
        logger.warning("%d of %d samples score 0: %s", len(failures), len(samples), what)


def _samples(batch: Batch) -> list[Sample]:
    columns = [batch.info[name] for name in SCORED_INFO]
    prompts = batch.info.get("raw_prompt") or batch.info.get("prompt_text") or [""] * len(batch)
    names = (*SINGLE, "prompt")
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, prompts, strict=True)]


def _call(function: Function, sample: Sample) -> RewardCall:
    return RewardCall(function, {name: sample[name] for name in function.parameters})


def _reports(function: Function, outcome: Outcome, samples: int) -> list[Report]:
    if outcome.kind:
        limit_s = function.cpu_limit_s or function.limit_s
        is_fixed = function.source == MATHS and limit_s == MATH_CPU_LIMIT_S
        whose = "math-verify's limit, which reward.timeout_s does not raise" if is_fixed else "reward.timeout_s"
        limit = f"took longer than {limit_s:g} s ({whose})"
        what = {"timeout": limit, "crash": f"{outcome.fault}, twice"}.get(outcome.kind, outcome.fault)
        return [RewardFailure(outcome.kind, function, what, outcome.traceback)] * samples
    return [RewardFailure("error", function, each, "") if isinstance(each, str) else each for each in outcome.answers]
