"""The timeline of a run's start."""

import json
import os
import sys

import pytest

from benchmarks.start_up import main, timed

SPEAKS = """
import os, time
print("starting", flush=True)
time.sleep(1.2)
print("0/2  val", flush=True)
print("1/2  row", flush=True)
print("2/2  row", flush=True)
time.sleep(1.2)
"""


def test_lines_have_the_seconds_at_which_they_came():
    found = timed([sys.executable, "-c", SPEAKS], {})
    assert [text for _, text in found.lines] == ["starting", "0/2  val", "1/2  row", "2/2  row"]
    started = found.lines[0][0]
    # The lines may be read a second late.
    assert 0 < started < started + 0.2 <= found.first_row_s, "a validation is no step"
    assert found.end_s >= 0.2


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RLX_NIGHTLY"), reason="whole runs of a benchmark are tried nightly")
def test_a_whole_run_with_empty_caches(tmp_path, capsys):
    keys = ["actor_rollout_ref.rollout.name=hf", "trainer.device=cpu"]
    file = tmp_path / "figures.json"
    main(["--shape", "tiny", "--rounds", "0", "--device", "cpu", "--json", str(file), *keys])
    figures = json.loads(file.read_text())
    assert figures["first_row_s"][0] > 0 and figures["end_s"][0] > 0 and figures["keys"] == keys
    printed = capsys.readouterr().out
    assert "empty caches" in printed and "starting Ray and 1 process(es)" in printed
