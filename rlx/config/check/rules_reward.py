"""Reward functions, reward models and environments that cannot score. Each rule yields the faults it finds."""

import json
import re
from pathlib import Path
from typing import Any

from rlx.config.check.context import CheckContext, Faults
from rlx.config.check.folders import correct_path, is_hub_name
from rlx.config.schema import FORMS, TOKENIZER_FILES
from rlx.config.schema.roles import has_reward_model

MODEL, FORM = "reward_model.model.path", "reward.format"


def form_is_an_expression(s: CheckContext) -> Faults:
    """The form is a known name or a valid regular expression."""
    form = s.config.reward.format
    if form is None or form in FORMS:
        return
    try:
        re.compile(form)
    except re.error as error:
        expected, got = f"{', '.join(FORMS)}, or a regular expression", f"{FORM}={form}: {error}"
        yield s.fault("the form of responses cannot be read", expected, f"correct {FORM}", FORM, got=got)


def reward_model_is_one(s: CheckContext) -> Faults:
    """The reward model has a path, gives one score, and its folder holds its tokenizer; the hub is not asked."""
    path = s.config.reward_model.model.path
    if not has_reward_model(s.config) or path is None:
        return
    expected = "a folder or hub name of a model for sequence classification with one label"
    folder = Path(path).expanduser()
    if not folder.exists() and is_hub_name(path):
        return
    found = _config_of(folder)
    if found is None:
        yield s.fault("the reward model's folder has no config.json to read", expected, correct_path(MODEL), MODEL)
        return
    kinds, labels = found.get("architectures") or ["of no named class"], _labels(found)
    if labels != 1 or not any("SequenceClassification" in kind or "RewardModel" in kind for kind in kinds):
        got = f"{MODEL}={path}: {', '.join(kinds)}, {labels} labels"
        remedy = f"set {MODEL} to a reward model; a language model scores nothing before it is trained to"
        yield s.fault("the reward model does not give one score", expected, remedy, MODEL, got=got)
    elif not any((folder / name).exists() for name in TOKENIZER_FILES):
        remedy = "save the tokenizer that it was trained with in its folder"
        yield s.fault("the reward model has no tokenizer", "a tokenizer in its folder", remedy, MODEL)


def _config_of(folder: Path) -> dict[str, Any] | None:
    try:
        found: Any = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _labels(config: dict[str, Any]) -> int:
    """Return the number of labels as transformers counts them: two by default."""
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels", 2))


NAME, PATH, REWARDS = "environment.name", "environment.path", "environment.rewards"
REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


REWARD_RULES = (form_is_an_expression, reward_model_is_one)
