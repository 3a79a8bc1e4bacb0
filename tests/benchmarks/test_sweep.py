"""Model types compared with transformers alone: three in all tests, five drawn ones nightly."""

import random
from pathlib import Path

import pytest
import torch

from benchmarks.sweep.page import COLUMNS, FAMILIES, RESULTS, page, read_results
from benchmarks.sweep.replay import replay_error
from benchmarks.sweep.run import outcomes_of
from benchmarks.sweep.trainer import TinyModel
from rlx.models.experts import _Choice
from tests.tiny_models import config_of, rows, write_tiny

ROOT = Path(__file__).parents[2]
FEATURES = ["packed", "value", "boundary", "lora", "replay", "hf sampler"]
DRAW = 0  # fixed, so that a change is not blamed for a type that it did not touch


def wrong(row, features):
    """The outcomes that are wrong, without those that the page lists as wrong."""
    found, known = outcomes_of(row, features), read_results(ROOT / RESULTS)[0].get(row, {})
    assert set(found) == set(features)
    listed = {name for name, outcome in known.items() if outcome.status == "wrong"}
    return {name: outcome for name, outcome in found.items() if outcome.status == "wrong" and name not in listed}


@pytest.mark.slow
@pytest.mark.parametrize("row", ["qwen2: tied", "deepseek_v3", "bert: no decoder"])
def test_no_outcome_of_these_is_wrong(row):
    assert wrong(row, [*FEATURES, "fsdp2"]) == {}


@pytest.mark.nightly
def test_no_outcome_of_five_drawn_types_is_wrong():
    drawn = random.Random(DRAW).sample(rows(), 5)
    assert {row: found for row in drawn if (found := wrong(row, FEATURES))} == {}


@pytest.mark.slow
def test_outcomes_tell_what_happened():
    found = outcomes_of("bert: no decoder", ["packed"])["packed"]
    assert found.status == "refused" and "is_decoder=true" in found.note
    assert outcomes_of("musicgen", ["packed"])["packed"].status == "not makeable"


def test_a_replay_without_effect_is_noticed(tmp_path, monkeypatch):
    write_tiny(tmp_path, config_of("qwen3_moe"), torch.float64)
    monkeypatch.setattr(_Choice, "_given", None)  # routers keep their own choice, in the reference too
    with pytest.raises(AssertionError, match="other experts change log-probs by 0e\\+00 only"):
        replay_error(TinyModel(tmp_path, torch.float64, "sdpa"))


def test_the_page_is_current_and_complete():
    results, versions = read_results(ROOT / RESULTS)
    assert (ROOT / "docs" / "models.md").read_text() == page(results, versions), (
        "python -m benchmarks.sweep.page > docs/models.md"
    )
    assert {row for members in FAMILIES.values() for row in members} <= set(results)
    features = {name for names in COLUMNS.values() for name in names}
    assert {name for of_row in results.values() for name in of_row} <= features
