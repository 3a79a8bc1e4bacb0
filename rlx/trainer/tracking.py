"""Loggers of metrics behind one small protocol: a JSONL file, tensorboard, wandb."""

import errno
import json
import math
import os
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml

from rlx.errors import ExplainedError, storing

METRICS_FILE = "metrics.jsonl"
VAL_ONLY_FILE = "metrics.val_only.jsonl"
"""Rows of validations of a checkpoint (trainer.val_only), which belong to no step of the run."""
SUPERSEDED_FILE = "metrics.superseded.jsonl"
"""Rows of steps that the run took again, after it was resumed from an earlier step."""


class TrackingError(ExplainedError, ValueError):
    """A logger cannot start."""


class Logger(ABC):
    """A store of metrics."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the metrics of one step."""

    @abstractmethod
    def close(self) -> None:
        """Write pending data."""

    def generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:  # noqa: B027, most loggers may skip it
        """Keep some generations of the validation at `step`; each row maps a name to its value."""


class JsonlLogger(Logger):
    """Writes `metrics.jsonl`: one object per step with `step`, `time` [s since 1970] and the metrics. See `rewind`.

    NaN and infinity become null, because JSON lacks them. Generations are left out, because the dump of the validation holds them.
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        self._path = path
        if resume_step is not None and path.exists():
            rewind(path, resume_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a line, on disk before this returns. The file is opened each time, so that a lost folder shows."""
        row: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        row |= {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        _append(self._path, (json.dumps(row, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Do nothing: no file is open."""


class TensorboardLogger(Logger):
    """Writes event files in `tensorboard/`. After a resume it hides the former run's entries beyond `resume_step`."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write one text per generation."""
        for index, row in enumerate(rows):
            # Indented, so that Markdown shows the text verbatim.
            texts = (f"**{name}**\n\n{textwrap.indent(str(value), '    ')}" for name, value in row.items())
            text = "\n\n".join(texts)
            self._writer.add_text(f"val/generation_{index}", text, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbLogger(Logger):
    """Continues a wandb run with the configuration; its id is kept in the run's folder for a resumed run."""

    def __init__(self, run_dir: Path, config_yaml: str, project: str, experiment: str) -> None:
        import wandb

        self._wandb = wandb
        id_file = run_dir / "wandb_run_id"
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
        config = yaml.safe_load(config_yaml)
        self._run = wandb.init(
            project=project, name=experiment, dir=str(run_dir), config=config, id=run_id, resume="allow"
        )
        # wandb's own step may only grow, but a resumed run repeats steps, so steps are an axis of their own.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        id_file.write_text(self._run.id, encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one history row."""
        self._run.log({"step": step, **metrics})

    def generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write one table per validation."""
        if rows:
            names = list(rows[0])
            table = self._wandb.Table(columns=names, data=[[str(row.get(name)) for name in names] for row in rows])
            self._run.log({"step": step, "val/generations": table})

    def close(self) -> None:
        """Upload the rest and end the wandb run."""
        self._run.finish()


class Tracker:
    """Sends metrics to every logger that the user asked for, and always to `metrics.jsonl` for the report.

    A context that closes the loggers.

    Args:
        loggers: as `trainer.logger`; `console` is skipped, because `Progress` handles it.
        run_dir: folder of the run; it must exist. Existing files are appended to.
        config_yaml, project, experiment: for wandb.
        resume_step: the step after which the run goes on, and later ones are replaced; None: nothing is replaced.
        metrics_file: name of the file in `run_dir`.
        may_write: is called before each row, and raises if the run must end.

    Raises:
        TrackingError: a logger cannot start.
        StorageError: the folder cannot be written, at the start or later.
    """

    def __init__(
        self,
        loggers: Sequence[str],
        run_dir: Path,
        config_yaml: str,
        project: str,
        experiment: str,
        resume_step: int | None = None,
        metrics_file: str = METRICS_FILE,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._file, self._may_write = run_dir / metrics_file, may_write
        self._replaces_rows = resume_step is not None
        makers: dict[str, Callable[[], Logger]] = {
            "jsonl": lambda: JsonlLogger(self._file, resume_step),
            "tensorboard": lambda: TensorboardLogger(run_dir, resume_step),
            "wandb": lambda: WandbLogger(run_dir, config_yaml, project, experiment),
        }
        self._loggers: list[Logger] = []
        with ExitStack() as started:
            for name in dict.fromkeys(("jsonl", *(name for name in loggers if name != "console"))):
                with storing(self._file):
                    self._loggers.append(_start(name, makers[name]))
                started.callback(self._loggers[-1].close)
            self._until_closed = started.pop_all()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self._until_closed.close()

    def rewind(self, step: int) -> None:
        """Let the run go on from an earlier step than `resume_step`."""
        if self._replaces_rows and self._file.exists():
            with storing(self._file):
                rewind(self._file, step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send one step's metrics to all loggers."""
        self._may_write()
        with storing(self._file):
            for logger in self._loggers:
                logger.log(metrics, step)

    def generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send some generations of a validation to all loggers."""
        with storing(self._file):
            for logger in self._loggers:
                logger.generations(rows, step)


def _start(name: str, make: Callable[[], Logger]) -> Logger:
    remedy = f"or remove {name} from trainer.logger"
    try:
        return make()
    except ModuleNotFoundError as error:
        package = (error.name or name).partition(".")[0]
        raise TrackingError(
            f"logger {name}: the package {package} is not installed; run `pip install {package}`, {remedy}"
        ) from None
    except ExplainedError:
        raise
    except Exception as error:
        raise TrackingError(
            f"logger {name} cannot start ({type(error).__name__}: {error}); fix that, {remedy}"
        ) from error


def rewind(path: Path, step: int) -> None:
    """Keep the rows of a metrics file up to `step`, from which the run goes on, so that each step has one row.

    Later rows move to SUPERSEDED_FILE beside it. A last line that a kill has torn is dropped. The file is replaced as a whole.

    Raises:
        TrackingError: a line before the last is no row.
    """
    kept, later = [], []
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            (kept if json.loads(line)["step"] <= step else later).append(line + b"\n")
        except (ValueError, TypeError, KeyError):
            raise TrackingError(
                f"{path}, line {number}: got {line[:60]!r}, expected a JSON object with `step`; correct or remove the line"
            ) from None
    if later:
        _append(path.with_name(SUPERSEDED_FILE), b"".join(later))
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    _append(part, b"".join(kept))
    os.replace(part, path)


def _append(path: Path, data: bytes) -> None:
    """Append to a file, wholly on disk or not at all."""
    with path.open("ab", buffering=0) as file:
        begin = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(begin)
            raise
