"""When the driver saves, and how a checkpoint of several roles becomes whole."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rlx.checkpoint import folders
from rlx.checkpoint.manifest import few, seal
from rlx.cluster.group import WorkerGroup
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import trained_roles
from rlx.errors import storing
from rlx.trainer.checkpoints import (
    DriverState,
    checkpoints_in,
    is_finished,
    keep_newest,
    newest_whole,
    none_is_whole,
    require_parts,
    require_step,
    unusable,
    write_driver_state,
)
from rlx.trainer.remote_runs import RemoteRun

POLL_S = 0.05


def due(frequency: int, step: int, last: int) -> bool:
    """Whether an action is due that runs every `frequency` steps and after the last one; -1 means never."""
    return frequency > 0 and (step % frequency == 0 or step == last)


class Saver:
    """Writes checkpoints of a run, one at a time. See Note [when a checkpoint is whole].

    Note [when a checkpoint is whole]
    `begin` lets the workers write, at once or in the background. `settle` and `finish` let each role seal its folder, then seal
    and rename the checkpoint. The driver calls them after it has written the metrics of the step, so that a whole checkpoint
    never lacks a row. If anything fails before, no folder of that name appears.

    Args:
        config: how often to save, and how many checkpoints to keep.
        workers: host the trained roles.
        folder: of the run's checkpoints.
        clock: seconds; a parameter for tests.
    """

    def __init__(
        self, config: PPOConfig, workers: WorkerGroup, folder: Path, clock: Callable[[], float] = time.monotonic
    ):
        self._config, self._workers, self._folder, self._clock = config, workers, folder, clock
        self._roles = [role.name for role in trained_roles(config)]
        self._remote = RemoteRun.of(config, folder.parent)
        self._begun: Path | None = None
        self._last_s = clock()
        for leftover in folder.glob(".global_step_*.partial"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)

    def undamaged(self, checkpoint: Path, falls_back: bool) -> tuple[Path | None, list[str]]:
        """Return a checkpoint whose tensors have their digests, and the newer ones that do not; each worker reads a share.

        Args:
            checkpoint: the first to check; whole as far as `newest_whole` can tell.
            falls_back: take an older one of the run instead of a damaged one; None if all are damaged.

        Raises:
            ResumeError: it is damaged and may not fall back, or the configuration asks only for a validation.
            WorkerFailure: a worker cannot read files that the driver found, for example because its node lacks the file system.
        """
        passed_over: list[str] = []
        trainer = self._config.trainer
        while damage := self._damage_of(checkpoint):
            if not falls_back:
                raise unusable(checkpoint, damage)
            passed_over.append(f"passed over {checkpoint.name}: {few(damage)}")
            older = newest_whole(checkpoint.parent, before=require_step(checkpoint))
            passed_over += older.passed_over
            if older.checkpoint is None:
                if trainer.val_only:
                    raise none_is_whole(checkpoint.parent, passed_over)
                return None, passed_over
            checkpoint = older.checkpoint
            require_parts(self._config, checkpoint)
        return checkpoint, passed_over

    def _damage_of(self, checkpoint: Path) -> list[str]:
        found = self._workers.broadcast("process", "damage", str(checkpoint))
        return sorted({fault for each in found for fault in each})

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save after this step, of which `last` is the last one."""
        trainer = self._config.trainer
        minutes = trainer.save_every_minutes
        if minutes is not None and (self._clock() - self._last_s >= 60 * minutes or step == last):
            return True
        return due(trainer.save_freq, step, last)

    def begin(self, state: DriverState, in_background: bool | None = None) -> None:
        """Start a save. The workers return when their state may change again, at the latest when it is on the disk.

        Args:
            state: of the driver, at the end of a step.
            in_background: whether the workers write in the background; None: as configured.

        Raises:
            StorageError, WorkerFailure: a process could not write; what was written is removed.
        """
        self.finish()
        checkpoint = self._folder / f"global_step_{state.step}"
        with storing(checkpoint):
            partial = folders.begin(checkpoint)
        self._begun, self._last_s = checkpoint, self._clock()
        with _removed_on_failure(partial):
            write_driver_state(partial, state)
            for role in self._roles:
                self._workers.broadcast(role, "begin_save", str(partial / role), in_background)

    def settle(self) -> None:
        """Let the checkpoint appear if all processes have written it; call this after each step's row."""
        if self._begun is not None and self._is_written():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is written, and let it appear. Do nothing without one.

        Raises: see `begin`.
        """
        if self._begun is None:
            return
        checkpoint, self._begun = self._begun, None
        with _removed_on_failure(folders.partial_of(checkpoint)):
            for role in self._roles:
                self._workers.broadcast(role, "finish_save")
            with storing(checkpoint):
                seal(folders.partial_of(checkpoint), {})
                folders.commit(checkpoint)
        removed = self._remove_old()
        if self._remote is not None:
            self._remote.send(checkpoint, removed)

    def close(self) -> None:
        """Finish the save, and wait for copies to object storage; call this at the end of the run."""
        self.finish()
        if self._remote is not None:
            self._remote.wait()
            self._remote.send(None, self._remove_old())
            self._remote.wait()

    def _remove_old(self) -> list[str]:
        """Remove the checkpoints beyond those to keep, but not one that is being copied; return the names of the removed."""
        limits, before = self._config.trainer, checkpoints_in(self._folder)
        with nullcontext() if self._remote is None else self._remote.paused() as copied:
            for role, keep in (("actor", limits.max_actor_ckpt_to_keep), ("critic", limits.max_critic_ckpt_to_keep)):
                keep_newest(self._folder, role, keep, spare=copied)
        return [each.name for each in before if not is_finished(each)]

    def save_now(self, state: DriverState, within_s: float) -> Path | None:
        """Save at once, for a run that is about to be ended. Call this between steps, after the row of the last one.

        Args:
            state: of the driver.
            within_s: gives up after this time, counted from now.

        Returns:
            The checkpoint, or None if the time did not suffice; then the older ones are unchanged.
        """
        deadline_s = self._clock() + within_s
        if not self._settled(deadline_s):
            return None  # an earlier save is not written
        checkpoint = self._folder / f"global_step_{state.step}"
        if not checkpoint.is_dir():
            self.begin(state, in_background=True)
        return checkpoint if self._settled(deadline_s) else None

    def wait_for_copies(self, at_most_s: float) -> None:
        """Wait for copies to object storage, if there are any, but at most so long. Raises StorageError if one failed."""
        if self._remote is not None:
            self._remote.wait(at_most_s)

    def _settled(self, deadline_s: float) -> bool:
        self.settle()
        while self._begun is not None and self._clock() < deadline_s:
            time.sleep(POLL_S)
            self.settle()
        return self._begun is None

    def _is_written(self) -> bool:
        return all(all(self._workers.broadcast(role, "is_written")) for role in self._roles)


@contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for _ in range(3):  # a worker that is being ended may still add a file
            shutil.rmtree(partial, ignore_errors=True)
        raise
