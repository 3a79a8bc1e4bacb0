import os
import subprocess
import sys

import psutil
import pytest

from benchmarks.soak import Sample, growth, main, name_of, table


def test_growth_compares_medians_of_both_ends():
    samples = [Sample(step, 10**7 + (10**4 * step if step >= 500 else 10**5 * step)) for step in range(0, 2001, 10)]
    grown = growth("worker 1", samples, 500)
    assert (grown.first_step, grown.last_step) == (500, 2000)
    assert grown.first_mb == pytest.approx(15.2) and grown.last_mb == pytest.approx(29.8)
    assert growth("worker 1", samples[:51], 500) is None
    assert str(grown).split() == ["worker", "1", "500", "15.2", "2000", "29.8", "+14.60", "+9.73"]
    assert all(len(line) <= 100 for line in table({"worker 1": grown}).splitlines())


def test_a_process_is_known_by_its_command():
    command = [sys.executable, "-c", "print('up', flush=True); input()", "rlx.driver"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        assert name_of(psutil.Process(process.pid)) == f"driver {process.pid}"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RLX_NIGHTLY"), reason="whole runs of a benchmark are tried nightly")
@pytest.mark.e2e
def test_a_short_run_is_measured(capfd: pytest.CaptureFixture[str]):
    assert main(["--steps=12", "--from-step=0", "--limit-mb=1000", "--pause-s=0.2"]) == 0
    printed = capfd.readouterr().out
    for name in ("driver", "worker", "gcs_server", "raylet"):
        assert f"\n{name} " in printed
