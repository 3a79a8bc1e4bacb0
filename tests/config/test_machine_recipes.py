"""The recipes by model and machine: each composes, is valid on its machine, and tells the memory that the forecast gives."""

import json
import re
from pathlib import Path

import pytest

from rlx.config.check.validate import check
from rlx.config.compose.command_line import compose, config_folder
from rlx.config.forecast.forecast_text import gb
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import named_machine
from rlx.offload.plan.shapes import SHAPES

FILES = {file.stem: file.read_text() for file in sorted((config_folder() / "experiment").glob("*_*x*gb.yaml"))}
SHAPE_OF = {
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2-0.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2-7b",
    "Qwen/Qwen2.5-32B-Instruct": "qwen2.5-32b",
    "Qwen/Qwen3-8B": "qwen3-8b",
}
MODEL = "actor_rollout_ref.model.path"


def predicted(forecast: MemoryForecast) -> str:
    phases = [f"{phase.name} {gb(phase.peak)} of {gb(phase.limit or 0)}" for phase in forecast.phases()]
    host = max(phase.host for phase in forecast.phases()) * forecast.config.trainer.n_gpus_per_node
    return f"# Predicted GB on a GPU: {', '.join(phases)}; host memory {gb(host)}."


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_fits_the_machine_that_it_names(name, tmp_path: Path):
    machine = named_machine(re.search(r"^# Machine: (\w+)$", FILES[name], re.M)[1])
    path = compose([f"experiment={name}"]).config.actor_rollout_ref.model.path
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[SHAPE_OF[path]]))
    composed = compose([f"experiment={name}", f"{MODEL}={tmp_path}"])
    verdict = check(composed, machine)
    assert verdict.faults == () and verdict.warnings == ()
    assert predicted(MemoryForecast.of(composed.config, machine)) in FILES[name].splitlines()


def test_there_is_a_recipe_for_each_size_of_gpu():
    assert {re.search(r"x(\d+)gb$", name)[1] for name in FILES} == {"24", "80", "141"}
