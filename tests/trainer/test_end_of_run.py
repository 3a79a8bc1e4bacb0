"""A run that is resumed after its last step is known before Ray starts."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from rlx.checkpoint.manifest import seal
from rlx.config.compose.command_line import compose
from rlx.driver import main
from rlx.supervisor import link
from rlx.trainer.checkpoints import DriverState, end_of_run, write_driver_state

ON = ("trainer.resume_mode=auto", "trainer.device=cpu")

STATE = DriverState(4, 0, 4, {"epoch": 0, "position": 0}, {"type": "fixed", "coef": 0.0}, 0, {})


@pytest.fixture
def runs(tmp_path: Path) -> str:
    """The key of a folder with a run whose newest checkpoint is of step 4."""
    step = tmp_path / "2026-01-01_00-00-00" / "checkpoints" / "global_step_4"
    step.mkdir(parents=True)
    write_driver_state(step, STATE)
    seal(step, {})
    assert json.loads((step / "driver.json").read_text()) | {"queue": []} == asdict(STATE)
    return f"trainer.default_local_dir={tmp_path}"


@pytest.mark.parametrize(
    ("keys", "is_over"),
    [
        (("trainer.total_training_steps=4",), True),
        (("trainer.total_training_steps=5",), False),
        (("trainer.total_training_steps=4", "trainer.val_only=True"), False),
        (("trainer.total_training_steps=4", "trainer.resume_mode=disable"), False),
        (
            ("trainer.total_training_steps=4", "trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/such"),
            False,
        ),
        (("trainer.total_training_steps=null", "data.arithmetic.train_size=256", "trainer.total_epochs=1"), True),
        (("trainer.total_training_steps=null", "data.arithmetic.train_size=256", "trainer.total_epochs=2"), False),
    ],
)
def test_a_run_is_finished_if_no_step_is_left(runs: str, keys: tuple[str, ...], is_over: bool, monkeypatch):
    over = end_of_run(compose([runs, *ON, *keys]).config)
    assert (over is not None) == is_over
    if over:
        assert over[1].startswith("nothing to train: the checkpoint is of step 4 and the run ends at 4; raise ")
        assert over[1].endswith("checkpoints/global_step_4)")
    monkeypatch.setenv(link.FOLDER, "anything")
    assert end_of_run(compose([runs, *ON, *keys]).config) is None, "a driver that was started again is not judged"


def test_the_driver_says_so_and_starts_nothing(runs: str, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("rlx.driver.launch", lambda *_: pytest.fail("it started"))
    monkeypatch.setenv("PATH", "/nowhere")
    (folder,) = Path(runs.partition("=")[2]).glob("2026*")
    (folder / "tensorboard").mkdir()
    command = [runs, *ON, "trainer.total_training_steps=4"]
    assert main(command) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"{Path(sys.executable).with_name('tensorboard')} --logdir {folder}" in told, "no shell would find its name"
    assert told.startswith("nothing to train: the checkpoint is of step 4") and "rlx.export" in told
    assert main(["--check", *command]) == 0
    printed = capsys.readouterr()
    assert "warning: nothing to train" in printed.err and "rlx check: valid" in printed.out
