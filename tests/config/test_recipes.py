"""The recipes of docs/algorithms.md and the nightly tasks are configurations that can run, and say nothing without effect."""

import re
from pathlib import Path

import pytest

from benchmarks.learns import SEEDS, TASKS
from rlx.config.machine import Machine
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


@pytest.mark.parametrize("name", TASKS)
def test_a_nightly_task_can_run_as_it_stands(verdict, name):
    machine = Machine(gpus=0, cpus=4, packages=frozenset({"peft"}))
    found = verdict([*TASKS[name].settings, *(f"{key}=7" for key in SEEDS)], machine)
    assert not found.faults and not found.warnings
