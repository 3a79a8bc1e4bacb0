"""Scores for a batch of responses: each sample goes to the reward function of its data source."""

import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlx.config.schema import CustomRewardConfig, RewardConfig
from rlx.data.batch import Batch
from rlx.errors import ExplainedError
from rlx.rewards import gsm8k
from rlx.rewards import math as math_reward
from rlx.rewards.function import RewardFunction, load_function


class RewardError(ExplainedError, ValueError):
    """A reward function failed, or no function is known for a data source."""


class Scores(NamedTuple):
    """One score per sample, and what else the reward functions reported.

    Args:
        scores: (B,) fp32.
        extra: B-long lists by name; NaN for a sample whose function reported no such number.
    """

    scores: Tensor
    extra: dict[str, list[float]]


class RewardManager:
    """Knows the reward function of each data source.

    Args:
        reward: options of the built-in functions.
        custom: with a path, that function scores every sample, whatever its data source.

    Raises:
        UserCodeError: the user's function cannot be loaded.
    """

    def __init__(self, reward: RewardConfig, custom: CustomRewardConfig):
        self._custom = load_function(custom) if custom.path is not None else None
        self._custom_label = f"{custom.name} in {custom.path}"
        by_rule = partial(gsm8k.compute_score, format_score=reward.format_score)
        self._known: dict[str, RewardFunction] = dict.fromkeys(gsm8k.SOURCES, by_rule)
        self._known |= dict.fromkeys(math_reward.SOURCES, math_reward.compute_score)

    def score(self, batch: Batch, dump_dir: str | Path) -> Scores:
        """Scores every sample, in order.

        Args:
            batch: with info response_text, data_source, ground_truth, extra_info.
            dump_dir: where the sample that made a reward function fail is kept; made when needed.

        Raises:
            RewardError: unknown data source; a function that raised or returned no finite number: names the sample, the
                function and the file with a copy of the sample.
        """
        samples = [_sample(batch, i) for i in range(len(batch))]
        functions = [self._function_for(sample["data_source"]) for sample in samples]
        # Gradings of mathematics wait for processes, so threads run them side by side; other functions are called here.
        threads = ThreadPoolExecutor(max_workers=math_reward.PARALLEL, thread_name_prefix="rlx-reward")
        try:
            calls: list[Callable[[], Any]] = [
                threads.submit(function, **sample).result
                if function is math_reward.compute_score
                else partial(function, **sample)
                for function, sample in zip(functions, samples, strict=True)
            ]
            reports = [self._call(call, samples[i], i, Path(dump_dir)) for i, call in enumerate(calls)]
        finally:
            threads.shutdown(cancel_futures=True)
        names = sorted({name for report in reports for name in report} - {"score"})
        extra = {name: [report.get(name, math.nan) for report in reports] for name in names}
        return Scores(torch.tensor([report["score"] for report in reports], dtype=torch.float32), extra)

    def _function_for(self, data_source: Any) -> RewardFunction:
        if self._custom is not None:
            return self._custom
        if data_source not in self._known:
            raise RewardError(
                f"no reward function for data source {data_source!r}; known: {', '.join(sorted(self._known))}; "
                "set custom_reward_function.path and .name, or name the right column in data.reward_fn_key"
            )
        return self._known[data_source]

    def _call(self, call: Callable[[], Any], sample: dict[str, Any], row: int, dump_dir: Path) -> dict[str, float]:
        """The numbers a function reported, `score` among them."""
        try:
            result = call()
        except Exception as fault:
            raise self._error(sample, row, f"raised {type(fault).__name__}: {fault}", dump_dir) from fault
        numbers = _numbers(result)
        if not math.isfinite(numbers.get("score", math.nan)):
            what = f"returned {result!r}, expected a finite number or a dict whose `score` is one"
            raise self._error(sample, row, what, dump_dir)
        return numbers

    def _error(self, sample: dict[str, Any], row: int, what: str, dump_dir: Path) -> RewardError:
        source, index = sample["data_source"], (sample["extra_info"] or {}).get("index", row)
        label = self._custom_label if self._custom is not None else f"rlx's reward function of {source!r}"
        dump_dir.mkdir(parents=True, exist_ok=True)
        copy = dump_dir / f"reward_error_{re.sub(r'[^0-9A-Za-z]+', '-', str(source))}_{index}.json"
        report = {**sample, "index": index, "function": label, "fault": what}
        text = json.dumps(report, indent=2, ensure_ascii=False, default=str) + "\n"
        copy.write_text(text, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair stays valid JSON
        return RewardError(f"{label} {what}; data source {source!r}, sample {index}, a copy of it is in {copy}")


def _sample(batch: Batch, row: int) -> dict[str, Any]:
    """The arguments of a reward function, which are called by keyword as verl does."""
    info = batch.info
    return {
        "data_source": info["data_source"][row],
        "solution_str": info["response_text"][row],
        "ground_truth": info["ground_truth"][row],
        "extra_info": info["extra_info"][row],
    }


def _numbers(result: Any) -> dict[str, float]:
    """The numbers of a report, by name; text and lists in a dict are for the user's own use."""
    report = result if isinstance(result, dict) else {"score": result}
    # A bool of numpy's and an array of one number are no `Real` before .item().
    scalars = {name: value.item() if _is_scalar(value) else value for name, value in report.items()}
    return {str(name): float(value) for name, value in scalars.items() if isinstance(value, Real)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, np.generic) or (isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1)
