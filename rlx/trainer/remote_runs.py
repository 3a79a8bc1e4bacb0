"""Runs whose `trainer.default_local_dir` is a URL: they work in a local folder, and finished checkpoints are copied.

<url>/<run>/                           top-level files of the run: config.yaml, metrics.jsonl, report.png
<url>/<run>/checkpoints/global_step_N/ manifest.json is copied last
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock

from rlx.checkpoint.manifest import MANIFEST
from rlx.checkpoint.remote import RemoteFolder
from rlx.config.check.folders import is_url, runs_folder
from rlx.config.schema import PPOConfig
from rlx.step_folders import step_of, steps_in
from rlx.trainer.checkpoints import is_finished, order_of, refusal_of, require_step
from rlx.trainer.run_lock import LOCK_FILE


class RemoteRun:
    """Copies finished checkpoints of one run in a thread, one after the other.

    A checkpoint may be due for removal before its copy is complete, if storage is slower than saves. The one that is being
    copied stays, so that copies arrive at all; those that wait may be removed, so that the disk does not fill, and are not
    copied then.

    Args:
        remote: the folder of all runs.
        folder: of this run, local.
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
        return cls(RemoteFolder(url), folder) if url is not None and is_url(url) else None

    def send(self, checkpoint: Path | None, removed: list[str]) -> None:
        """Copy the run's own files and a checkpoint later, and remove the copies of checkpoints that were removed.

        Raises:
            StorageError: an earlier copy failed.
        """
        self.wait(0.0)
        self._sent.append(self._thread.submit(self._copy, checkpoint, removed))

    @contextmanager
    def paused(self) -> Iterator[Path | None]:
        """Begin to copy no other checkpoint in this context; yields the one that is being copied, which must stay."""
        with self._chosen:
            yield self._copied

    def wait(self, at_most_s: float | None = None) -> None:
        """Wait for all copies, or at most so long. Raises StorageError if one failed."""
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

    Raises:
        StorageError: a URL cannot be used.
        ResumeError: a URL does not end in <run>/checkpoints/global_step_N.
    """
    trainer = config.trainer
    named, runs = trainer.resume_from_path, trainer.default_local_dir
    if runs is not None and is_url(runs):
        RemoteFolder(runs)  # so that a missing package shows now
        if trainer.resume_mode == "auto":
            fetch_newest(config, runs)
    if trainer.resume_mode == "resume_path" and named is not None and is_url(named):
        return replace(config, trainer=replace(trainer, resume_from_path=str(fetch_named(config, named))))
    return config


def fetch_named(config: PPOConfig, url: str) -> Path:
    """Download the checkpoint that a URL names to this experiment's local folder, unless it is there; return its path.

    Raises:
        StorageError: it does not exist or cannot be read.
        ResumeError: the URL does not end in <run>/checkpoints/global_step_N.
    """
    runs_url, run, _, name = url.rstrip("/").rsplit("/", 3)
    local = runs_folder(config) / run / "checkpoints" / name
    require_step(local)
    remote = RemoteFolder(runs_url)
    if not is_finished(local):
        remote.download(f"{run}/checkpoints/{name}", local)
        _fetch_files(remote, run, runs_folder(config) / run)
    return local


def fetch_newest(config: PPOConfig, url: str) -> None:
    """Download the newest checkpoint of the newest run, and older ones while it is damaged, unless local ones are as new."""
    remote, base = RemoteFolder(url), runs_folder(config)
    found = {
        run: [name for name in remote.names(f"{run}/checkpoints") if step_of(Path(name)) is not None]
        for run in remote.names()
    }
    run = max((run for run, names in found.items() if names), key=order_of, default=None)
    if run is None or any(
        order_of(folder.name) > order_of(run) and steps_in(folder / "checkpoints") for folder in base.glob("*")
    ):
        return
    for name in sorted(found[run], key=lambda name: require_step(Path(name)), reverse=True):
        local = base / run / "checkpoints" / name
        if not is_finished(local) and remote.has(f"{run}/checkpoints/{name}/{MANIFEST}"):
            remote.download(f"{run}/checkpoints/{name}", local)
            _fetch_files(remote, run, base / run)
        if is_finished(local) and not refusal_of(local).faults:
            return


def _fetch_files(remote: RemoteFolder, run: str, folder: Path) -> None:
    for name in remote.names(run):
        if (
            Path(name).suffix in (".yaml", ".jsonl") and not (folder / name).exists()
        ):  # rows, and all kept configurations
            remote.get(f"{run}/{name}", folder / name)
