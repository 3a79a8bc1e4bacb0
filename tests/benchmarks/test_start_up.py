"""The timeline of a run's start."""

import json

import pytest

from benchmarks.start_up import main


@pytest.mark.nightly
def test_a_whole_run_with_empty_caches(tmp_path, capsys):
    keys = ["actor_rollout_ref.rollout.name=hf", "trainer.device=cpu"]
    file = tmp_path / "figures.json"
    main(["--shape", "tiny", "--rounds", "0", "--device", "cpu", "--json", str(file), *keys])
    figures = json.loads(file.read_text())
    assert figures["first_row_s"][0] > 0 and figures["end_s"][0] > 0 and figures["keys"] == keys
    printed = capsys.readouterr().out
    assert "empty caches" in printed and "starting Ray and 1 process(es)" in printed
