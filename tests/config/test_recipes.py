"""The recipes of docs/algorithms.md are configurations that can run, and say nothing without effect."""

import re
from pathlib import Path

import pytest

from rlx.config.schema import ADV_ESTIMATORS, LOSS_MODES

PAGE = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
RECIPES = dict(re.findall(r"^\| ([^|]+) \| `(algorithm\.[^`]+)` \|$", PAGE, flags=re.MULTILINE))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_run_as_it_stands(verdict, name):
    found = verdict(["experiment=arithmetic", *RECIPES[name].split()])
    assert not found.faults and not found.warnings


def test_there_is_a_recipe_with_every_estimator_and_every_loss():
    every = " ".join(RECIPES.values())
    assert set(re.findall(r"adv_estimator=(\w+)", every)) == set(ADV_ESTIMATORS)
    assert {"vanilla", *re.findall(r"loss_mode=(\w+)", every)} == set(LOSS_MODES)
