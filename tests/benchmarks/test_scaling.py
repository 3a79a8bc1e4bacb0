"""Several GPUs and recipes, in small: cases run one by one, are cut off, and are compared; a recipe stands beside its forecast."""

import json

import pytest
import torch

from benchmarks import recipe, scaling
from benchmarks.common import random_model
from benchmarks.race.inputs import end_by_chance, forbid, medians
from rlx.config.compose.command_line import compose
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import named_machine

ON_CPU = ["actor_rollout_ref.rollout.name=hf", "trainer.device=cpu"]
SIZES = ["--shape=tiny", "--samples=2", "--prompt=16", "--response=8", "--micro-batch=4"]


@pytest.fixture
def command(tmp_path):
    """A function that runs cases in small on two processes and returns the exit code and the lines of the file."""
    places = [f"--folder={tmp_path / 'work'}", f"--json={tmp_path / 'lines.jsonl'}"]
    lengths = ["--rounds=2", "--offload-case=64x2", "--ulysses-tokens=65", "--long-tokens=97", "--prompts=4"]

    def run(*arguments):
        code = scaling.main([*arguments, *SIZES, "--gpus=2", *places, *lengths, *ON_CPU])
        return code, [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]

    return run


@pytest.mark.e2e
@pytest.mark.nightly
def test_every_case_but_those_of_vllm_runs_in_small(command, capsys):
    code, lines = command("grpo", "lora", "offload", "ulysses", "long", "restart", "resume")
    assert code == 0, capsys.readouterr().out
    found = {line["case"]: line["figures"] for line in lines if "figures" in line}
    assert {"offload attention", "ulysses 1", "ulysses 2", "long"} < found.keys()
    for case in ("grpo", "lora"):
        assert found[case]["update tokens/s/GPU"] > found[case]["step tokens/s/GPU"] > 0
        assert found[case]["response_length/mean"] == 8 and found[case]["perf/tokens"] == 4 * 2 * 24
    assert found["restart"]["save GB"] > 0 and found["restart"]["from kill to row s"] > found["restart"]["load s"]
    assert found["resume"]["from command to row s"] > 0


@pytest.mark.slow
@pytest.mark.e2e
def test_a_case_that_is_cut_off_or_lacks_what_it_needs_says_so_and_the_next_one_begins(command, capsys):
    code, lines = command("grpo", "resume", "--limit=3")
    assert code == 1
    assert "cut off after 3 s" in lines[0]["error"] and "needs the checkpoint of the case restart" in lines[1]["error"]
    assert "tiny, grpo, 2 GPUs: RuntimeError: cut off" in capsys.readouterr().out


def test_seconds_of_an_update_are_those_of_its_micro_batches():
    keys = ["experiment=qwen3_8b_lora_1x80gb"]
    forecast = MemoryForecast.of(compose(keys).config, named_machine("1xh100")).decided()
    one = recipe.update_s(forecast, 16_384)
    assert recipe.update_s(forecast, 10 * 16_384) == pytest.approx(10 * one)
    operations = 8 * 8.2e9 * 16_384  # forward, recomputation, and backward as if all weights had gradients
    assert operations / 989e12 < one < 3 * operations / 989e12


@pytest.mark.e2e
@pytest.mark.nightly
def test_a_recipe_runs_in_small_beside_its_forecast(tmp_path):
    small = ["--shape=tiny", "--prompts=4", "--prompt=16", "--response=8", f"--json={tmp_path / 'figures.json'}"]
    assert recipe.main(["qwen3_8b_lora_1x24gb", *small, *ON_CPU, "actor_rollout_ref.rollout.n=2"]) == 0
    found = json.loads((tmp_path / "figures.json").read_text())
    assert len(found["steps"]) == 3
    for phase in ("rollout", "old_log_prob", "update_actor", "sync"):
        assert all(found["phases"][phase][column] > 0 for column in ("seconds", "measured GB", "predicted GB"))


def test_responses_end_by_chance_at_any_token():
    model = random_model("tiny", torch.device("cpu"), max_position_embeddings=64)
    forbid(model, [0, 1])
    end_by_chance(model, 1, 50.0)
    ends = model(torch.randint(2, 200, (8, 32))).logits.float().softmax(-1)[..., 1]
    assert ends.mean().item() == pytest.approx(1 / 50, rel=0.3) and ends.min() > 1 / 250


def test_steps_count_that_have_a_full_queue_and_train_on_its_oldest_samples():
    queued, staleness = (32.0, 32.0, 32.0, 32.0, 16.0), (0.0, 1.0, 2.0, 2.0, 2.0)
    rows = {
        step: {"timing_s/step": float(step), "partial/queued_prompts": prompts, "staleness/max": most}
        for step, (prompts, most) in enumerate(zip(queued, staleness, strict=True), start=1)
    }
    assert medians(rows)["timing_s/step"] == 3.5
    assert medians({step: {"timing_s/step": float(step)} for step in (1, 2, 3)})["timing_s/step"] == 2.5
