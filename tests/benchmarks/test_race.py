"""Inputs of the race, and a small one on the CPU."""

import json

import pytest

from benchmarks.race.__main__ import main

WORK = {"shape": "tiny", "prompts": 2, "samples": 4, "prompt": 40, "response": 8, "steps": 3}
SIZE = [f"--{name}={value}" for name, value in WORK.items()]


@pytest.mark.nightly
def test_rlx_and_trl_do_the_same_steps(tmp_path, capsys):
    on_cpu = ["actor_rollout_ref.rollout.name=hf", "trainer.device=cpu", f"--json={tmp_path / 'figures.json'}"]
    main([*on_cpu, *SIZE, "--updates=2", "--micro-batch=4", "--frameworks", "rlx", "TRL"])
    found = json.loads((tmp_path / "figures.json").read_text())["frameworks"]
    assert set(found) == {"rlx", "TRL"}, capsys.readouterr().out
    for row in found.values():
        assert row["steps"] == 2 and row["tokens"] == WORK["response"]
        assert all(row[phase] > 0 for phase in ("generation", "old", "ref", "update")) and row["rest"] >= 0
    assert found["rlx"]["grad norm"] == pytest.approx(found["TRL"]["grad norm"], rel=0.5)
