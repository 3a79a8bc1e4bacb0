"""The timeline of a run's start."""

import json
import os
import sys

import pytest

from benchmarks.start_up import Round, main, show, timed

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


@pytest.mark.parametrize("program", ["print('1/1 row'); raise SystemExit(3)", "print('nothing')"])
def test_a_run_that_fails_or_trains_nothing_is_an_error(program):
    with pytest.raises(RuntimeError, match="ended with exit code"):
        timed([sys.executable, "-c", program], {})


def test_the_middle_round_is_shown_up_to_its_first_row(capsys):
    def lines(first):
        return Round([(1.0, "starting Ray"), (first, " 1/2  0.5"), (first + 1, " 2/2  0.5")], first + 3)

    show([lines(9.0), lines(7.0), lines(8.0)])
    assert capsys.readouterr().out.splitlines() == [
        "    1.0 s  starting Ray",
        "    8.0 s   1/2  0.5",
        "first row: median 8.0 s of 9.0, 7.0, 8.0",
        "end after the last row: median 2.0 s of 2.0, 2.0, 2.0",
    ]


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
