"""What tests of checkpoints share: small checkpoints, and workers that only write a file."""

from dataclasses import replace
from pathlib import Path

from rlx.checkpoint.manifest import seal
from rlx.config.schema import AlgorithmConfig, PPOConfig
from rlx.errors import StorageError
from rlx.trainer import checkpoints as ck
from rlx.trainer.saver import Saver

STATE = ck.DriverState(
    step=3,
    seed=1,
    policy_version=4,
    sampler={"epoch": 0, "position": 6},
    kl_controller={"type": "fixed", "coef": 0.1},
    skipped_steps=0,
    first_validation={"val/accuracy": 0.25},
)


def make(run, step, *roles):
    folder = run / "checkpoints" / f"global_step_{step}"
    folder.mkdir(parents=True)
    for role in roles:
        (folder / role).mkdir()
        (folder / role / "weights").write_bytes(bytes(range(256)))
        seal(folder / role, {})
    ck.write_driver_state(folder, replace(STATE, step=step))
    seal(folder, {})
    return folder


class Disk:
    """Workers of one process with an actor: `busy` polls pass before the file is written, or the disk fails."""

    def __init__(self, busy=0, fails=None):
        self.busy, self.fails, self.calls = busy, fails, []

    def call(self, role, method, *arguments):
        self.calls.append(method)
        if method == self.fails:
            raise StorageError("the disk is full")
        if method == "begin_save":
            self.folder = Path(arguments[0])
            self.folder.mkdir()
            (self.folder / "weights").write_text("weights")
        if method == "finish_save":
            seal(self.folder, {})
        if method == "is_written":
            self.busy -= 1
            return [self.busy < 0]
        return [None]


def saver_of(folder, workers, clock=lambda: 0.0, **trainer):
    base = PPOConfig(algorithm=AlgorithmConfig(adv_estimator="grpo"))
    return Saver(replace(base, trainer=replace(base.trainer, **trainer)), workers, folder, clock)
