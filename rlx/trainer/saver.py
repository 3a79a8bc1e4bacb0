"""When the driver saves, how a checkpoint of several roles becomes whole, and its copy in object storage.

A run whose `trainer.default_local_dir` is a URL works in a local folder, and finished checkpoints are copied:

<url>/<run>/                           top-level files of the run: config.yaml, metrics.jsonl, report.png
<url>/<run>/checkpoints/global_step_N/ manifest.json is copied last
"""

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Lock

from rlx.checkpoint import folders
from rlx.checkpoint.folders import MANIFEST, RemoteFolder
from rlx.checkpoint.manifest import few, seal
from rlx.cluster.group import WorkerGroup
from rlx.config.check.folders import is_url, runs_folder
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import trained_roles
from rlx.errors import storing
from rlx.step_folders import step_of, steps_in
from rlx.trainer import checkpoints
from rlx.trainer.checkpoints import DriverState, ResumeError, is_finished, require_step
from rlx.trainer.run_lock import LOCK_FILE

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

    `folder` is that of the run's checkpoints; `clock` returns seconds.
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

        With `falls_back` it is an older one of the run instead of a damaged one, None if all are damaged.

        Raises ResumeError: it is damaged and may not fall back, or the configuration asks only for a validation. WorkerFailure:
        a worker cannot read files that the driver found, for example because its node lacks the file system.
        """
        passed_over: list[str] = []
        trainer = self._config.trainer
        while damage := sorted({*chain(*self._workers.call("process", "damage", str(checkpoint)))}):
            if not falls_back:
                raise checkpoints.unusable(checkpoint, damage)
            passed_over.append(f"passed over {checkpoint.name}: {few(damage)}")
            older = checkpoints.newest_whole(checkpoint.parent, before=require_step(checkpoint))
            passed_over += older.passed_over
            if older.checkpoint is None:
                if trainer.val_only:
                    raise checkpoints.none_is_whole(checkpoint.parent, passed_over)
                return None, passed_over
            checkpoint = older.checkpoint
            checkpoints.require_parts(self._config, checkpoint)
        return checkpoint, passed_over

    def is_due(self, step: int, last: int) -> bool:
        """Whether to save after this step; `last` is the run's last one."""
        trainer = self._config.trainer
        minutes = trainer.save_every_minutes
        if minutes is not None and (self._clock() - self._last_s >= 60 * minutes or step == last):
            return True
        return due(trainer.save_freq, step, last)

    def begin(self, state: DriverState, in_background: bool | None = None, without: str | None = None) -> None:
        """Start a save. The workers return when their state may change again, at the latest when it is on the disk.

        `in_background` None is as configured; `without` is a part of the configured contents to leave out.
        Raises StorageError, WorkerFailure: a process could not write; what was written is removed.
        """
        self.finish()
        checkpoint = self._folder / f"global_step_{state.step}"
        with storing(checkpoint):
            partial = folders.begin(checkpoint)
        self._begun, self._last_s = checkpoint, self._clock()
        with _removed_on_failure(partial):
            checkpoints.write_driver_state(partial, state)
            for role in self._roles:
                self._workers.call(role, "begin_save", str(partial / role), in_background, without)

    def settle(self) -> None:
        """Let the checkpoint appear if all processes have written it; call this after each step's row."""
        if self._begun is not None and all(all(self._workers.call(role, "is_written")) for role in self._roles):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is written, and let it appear. Do nothing without one. Raises as `begin`."""
        if self._begun is None:
            return
        checkpoint, self._begun = self._begun, None
        with _removed_on_failure(folders.partial_of(checkpoint)):
            for role in self._roles:
                self._workers.call(role, "finish_save")
            with storing(checkpoint):
                seal(folders.partial_of(checkpoint), {})
                folders.commit(checkpoint)
        removed = self._remove_old()
        if self._remote is not None:
            self._remote.send(checkpoint, removed)

    def close(self, last: DriverState | None = None) -> None:
        """Finish the save, save the `last` state without the optimizer's if no save was due, and wait for copies to object storage."""
        self.finish()
        asked = last if self._config.trainer.save_last else None
        if asked is not None and not is_finished(self._folder / f"global_step_{asked.step}"):
            self.begin(asked, without="optimizer")
            self.finish()
        if self._remote is not None:
            self._remote.wait()
            self._remote.send(None, self._remove_old())
            self._remote.wait()

    def _remove_old(self) -> list[str]:
        """Remove the checkpoints beyond those to keep, but not one that is being copied; return the names of the removed."""
        limits, before = self._config.trainer, checkpoints.checkpoints_in(self._folder)
        with nullcontext() if self._remote is None else self._remote.paused() as copied:
            for role, keep in (("actor", limits.max_actor_ckpt_to_keep), ("critic", limits.max_critic_ckpt_to_keep)):
                checkpoints.keep_newest(self._folder, role, keep, spare=copied)
        return [each.name for each in before if not is_finished(each)]

    def save_now(self, state: DriverState, within_s: float) -> Path | None:
        """Save at once, for a run that is about to be ended, and return the checkpoint. Call this between steps, after the last row.

        Return None if the time does not suffice; the older ones are then unchanged.
        """
        deadline_s = self._clock() + within_s
        if not self._settled(deadline_s):
            return None  # an earlier save is not written
        checkpoint = self._folder / f"global_step_{state.step}"
        if not checkpoint.is_dir():
            self.begin(state, in_background=True)
        return checkpoint if self._settled(deadline_s) else None

    def wait_for_copies(self, at_most_s: float) -> None:
        """Wait for copies to object storage, if there are any, up to the limit. Raises StorageError if one failed."""
        if self._remote is not None:
            self._remote.wait(at_most_s)

    def _settled(self, deadline_s: float) -> bool:
        self.settle()
        while self._begun is not None and self._clock() < deadline_s:
            time.sleep(POLL_S)
            self.settle()
        return self._begun is None


@contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for _ in range(3):  # a worker that is being ended may still add a file
            shutil.rmtree(partial, ignore_errors=True)
        raise


class RemoteRun:
    """Copies finished checkpoints of one run in a thread, one after the other.

    A checkpoint may be due for removal before its copy is complete, if storage is slower than saves. The one that is being
    copied stays, so that copies arrive at all; those that wait may be removed, so that the disk does not fill, and are not
    copied then. `remote` is the folder of all runs, `folder` that of this run.
    """

    def __init__(self, remote: RemoteFolder, folder: Path) -> None:
        self._remote, self._folder = remote, folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._sent: list[Future[None]] = []
        self._copied: Path | None = None
        self._chosen = Lock()  # held while the next checkpoint to copy is chosen

    @classmethod
    def of(cls, config: PPOConfig, folder: Path) -> "RemoteRun | None":
        """Return the copier of a run, or None if its configuration names no URL."""
        url = config.trainer.default_local_dir
        return cls(RemoteFolder(url), folder) if is_url(url) else None

    def send(self, checkpoint: Path | None, removed: list[str]) -> None:
        """Copy the run's files and a checkpoint later, and remove copies of removed ones. Raises StorageError if an earlier copy failed."""
        self.wait(0.0)
        self._sent.append(self._thread.submit(self._copy, checkpoint, removed))

    @contextmanager
    def paused(self) -> Iterator[Path | None]:
        """Begin to copy no other checkpoint in this context; yields the one that is being copied, which must stay."""
        with self._chosen:
            yield self._copied

    def wait(self, at_most_s: float | None = None) -> None:
        """Wait for all copies, up to the limit. Raises StorageError if one failed."""
        wait(self._sent, at_most_s, FIRST_EXCEPTION)
        for each in self._sent:
            if each.done():
                each.result()

    def _copy(self, checkpoint: Path | None, removed: list[str]) -> None:
        run = self._folder.name
        for path in self._folder.iterdir():
            # The lock is removed when the run ends, perhaps between this look and the copy.
            if path.is_file() and not path.name.startswith((".", LOCK_FILE)):
                self._remote.put(path, f"{run}/{path.name}")
        with self._chosen:
            self._copied = checkpoint if checkpoint is not None and is_finished(checkpoint) else None
        try:
            if self._copied is not None:
                self._remote.upload(self._copied, f"{run}/checkpoints/{self._copied.name}")
        finally:
            self._copied = None
        for name in removed:
            self._remote.remove(f"{run}/checkpoints/{name}")


def fetch(config: PPOConfig) -> PPOConfig:
    """Download the checkpoint to resume from, if it is in object storage; return the configuration with its local path.

    Raises StorageError if a URL cannot be used, ResumeError if one does not end in <run>/checkpoints/global_step_N.
    """
    trainer = config.trainer
    named, runs = trainer.resume_from_path, trainer.default_local_dir
    if is_url(runs):
        remote = RemoteFolder(runs)  # so that a missing package shows now
        if trainer.resume_mode == "auto":
            _fetch_newest(remote, runs_folder(config))
    if trainer.resume_mode == "resume_path" and is_url(named):
        return replace(config, trainer=replace(trainer, resume_from_path=str(_fetch_named(named, runs_folder(config)))))
    return config


def _fetch_named(url: str, base: Path) -> Path:
    """Download the checkpoint that a URL names to this experiment's local folder, unless it is there; return its path."""
    runs_url, run, parent, name = ["", "", "", *url.rstrip("/").rsplit("/", 3)][-4:]
    if parent != "checkpoints" or step_of(Path(name)) is None or run in ("", ".", "..") or "://" not in runs_url:
        raise ResumeError(
            f"trainer.resume_from_path: got {url}, expected the URL of a checkpoint, <folder of runs>/RUN/checkpoints/global_step_N"
        )
    return _fetch_one(RemoteFolder(runs_url), run, name, base)


def _fetch_newest(remote: RemoteFolder, base: Path) -> None:
    """Download the newest checkpoint of the newest run, and older ones while it is damaged, unless local ones are as new."""
    found = {
        run: [name for name in remote.names(f"{run}/checkpoints") if step_of(Path(name)) is not None]
        for run in remote.names()
    }
    run = max((run for run, names in found.items() if names), key=checkpoints.order_of, default=None)
    if run is None or any(
        checkpoints.order_of(folder.name) > checkpoints.order_of(run) and steps_in(folder / "checkpoints")
        for folder in base.glob("*")
    ):
        return
    for name in sorted(found[run], key=lambda name: require_step(Path(name)), reverse=True):
        local = base / run / "checkpoints" / name
        if is_finished(local) or remote.has(f"{run}/checkpoints/{name}/{MANIFEST}"):
            _fetch_one(remote, run, name, base)
        if is_finished(local) and not checkpoints.refusal_of(local).faults:
            return


def _fetch_one(remote: RemoteFolder, run: str, name: str, base: Path) -> Path:
    """Download a checkpoint, and the run's rows and configurations, unless it is there; return its local path."""
    local = base / run / "checkpoints" / name
    if not is_finished(local):
        remote.download(f"{run}/checkpoints/{name}", local)
        for file in remote.names(run):
            if Path(file).suffix in (".yaml", ".jsonl") and not (base / run / file).exists():
                remote.get(f"{run}/{file}", base / run / file)
    return local
