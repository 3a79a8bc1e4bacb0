"""Benchmarks of whole runs, in small on the CPU: the race against TRL, the soak, the timeline of a start."""

import json

import pytest

from benchmarks import soak, start_up
from benchmarks.race.__main__ import main as race
from benchmarks.race.real import main as real_race

pytestmark = pytest.mark.nightly
ON_CPU = ["actor_rollout_ref.rollout.name=hf", "trainer.device=cpu"]


def test_rlx_and_trl_do_the_same_steps(tmp_path, capsys):
    work = {"shape": "tiny", "prompts": 2, "samples": 4, "prompt": 40, "response": 8, "steps": 3}
    size = [f"--{name}={value}" for name, value in work.items()]
    file = tmp_path / "figures.json"
    race([*ON_CPU, f"--json={file}", *size, "--updates=2", "--micro-batch=4", "--frameworks", "rlx", "TRL"])
    found = json.loads(file.read_text())["frameworks"]
    assert set(found) == {"rlx", "TRL"}, capsys.readouterr().out
    for row in found.values():
        assert row["steps"] == 2 and row["tokens"] == work["response"]
        assert all(row[phase] > 0 for phase in ("generation", "old", "ref", "update")) and row["rest"] >= 0
    assert found["rlx"]["grad norm"] == pytest.approx(found["TRL"]["grad norm"], rel=0.5)


def test_rlx_and_trl_learn_the_same_task(untrained, tmp_path, capsys):
    size = ["--prompts=2", "--samples=2", "--updates=1", "--micro-batch=4", "--steps=4", "--limit=120"]
    real_race([f"--model={untrained}", f"--out={tmp_path / 'race'}", *ON_CPU, *size, "--frameworks", "rlx", "TRL"])
    found = json.loads((tmp_path / "race" / "race.json").read_text())
    assert set(found["table"]) == {"rlx", "TRL"}, capsys.readouterr().out
    for name, curve in found["curves"].items():
        assert len(curve) == found["table"][name]["steps"] == 4
        assert curve == sorted(curve) and all(0 < seconds < 120 and 0 <= reward <= 1 for seconds, reward in curve)


@pytest.mark.e2e
def test_a_soak_measures_every_process(capfd):
    assert soak.main(["--steps=12", "--from-step=0", "--limit-mb=1000", "--pause-s=0.2"]) == 0
    printed = capfd.readouterr().out
    for name in ("driver", "worker", "gcs_server", "raylet"):
        assert f"\n{name} " in printed


def test_a_start_with_empty_caches(tmp_path, capsys):
    file = tmp_path / "figures.json"
    start_up.main(["--shape", "tiny", "--rounds", "0", "--device", "cpu", "--json", str(file), *ON_CPU])
    figures = json.loads(file.read_text())
    assert figures["first_row_s"][0] > 0 and figures["end_s"][0] > 0 and figures["keys"] == ON_CPU
    printed = capsys.readouterr().out
    assert "empty caches" in printed and "starting Ray and 1 process(es)" in printed
