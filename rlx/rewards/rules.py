"""rlx's own rules: the data sources that have one, and the score of a response's form.

`rlx check` imports this module, so it loads neither torch nor math-verify.
"""

import re
from collections.abc import Collection
from typing import Any

from rlx.config.schema import PLAIN_SOURCE, CustomRewardConfig
from rlx.rewards import gsm8k

MATH_SOURCES = (
    *("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "HuggingFaceH4/aime_2024"),
    *("math", "math_dapo", "math_dapo_reasoning", "aime24", "aime25"),
)

NAMELESS = "rows without a data source"


def scored_sources(custom: CustomRewardConfig) -> frozenset[str] | None:
    """Return the data sources that a function of rlx or the user's scores; None if the user's function scores all."""
    scores_own = custom.is_set and not custom.asks_rule
    if scores_own and not custom.data_sources:
        return None
    return frozenset((*gsm8k.SOURCES, *MATH_SOURCES, *(custom.data_sources if scores_own else ())))


def remedy_for(unknown: Collection[str], custom: CustomRewardConfig) -> str:
    """Return the remedy for data sources that no function scores."""
    own = "set custom_reward_function.path to a file with a compute_score"
    if custom.asks_rule:
        own = "give the part without path or model, which rlx's own function scores, a function of yours"
    elif custom.is_set:
        nameless = f" ({NAMELESS})" if PLAIN_SOURCE in unknown else ""
        own = f"add {_listed(unknown)}{nameless} to custom_reward_function.data_sources"
    return f"{own}, or name the right column in data.reward_fn_key"


def no_function_for(unknown: Collection[str]) -> str:
    """Return what is wrong with data sources that no function scores."""
    named = set(unknown) - {PLAIN_SOURCE}
    missing = [f"data source {_listed(named)}"] if named else []
    return f"no reward function for {' and '.join([*missing, NAMELESS] if PLAIN_SOURCE in unknown else missing)}"


def _listed(sources: Collection[str]) -> str:
    return ", ".join(sorted(map(repr, sources)))


FORM_PATTERNS = {
    "tags": r"\s*<think>(?:(?!</?(?:think|answer)>).)*</think>\s*<answer>(?:(?!</?(?:think|answer)>).)+</answer>\s*",
    "hashes": r".*####[ \t]*\S[^\n#]*\s*",
    "boxed": r".*\\boxed\{\s*[^\s}].*\}.*",
}
"""Regular expressions by the names in `reward.format`."""


def score_form(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    form: str = "hashes",
) -> float:
    """Return 1.0 if the whole response matches, else 0.0; the other arguments of reward functions are not used.

    The form is a name in FORM_PATTERNS, or a regular expression in which `.` also matches line ends.
    """
    return float(re.fullmatch(FORM_PATTERNS.get(form, form), solution_str, re.DOTALL) is not None)
