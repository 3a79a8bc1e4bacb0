import pytest

from benchmarks.soak import main


@pytest.mark.nightly
@pytest.mark.e2e
def test_a_short_run_is_measured(capfd: pytest.CaptureFixture[str]):
    assert main(["--steps=12", "--from-step=0", "--limit-mb=1000", "--pause-s=0.2"]) == 0
    printed = capfd.readouterr().out
    for name in ("driver", "worker", "gcs_server", "raylet"):
        assert f"\n{name} " in printed
