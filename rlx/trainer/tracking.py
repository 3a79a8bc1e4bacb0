"""Where metrics go: the file `metrics.jsonl`, and loggers: tensorboard, wandb."""

import errno
import json
import math
import os
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from rlx.checkpoint.folders import replacing_file
from rlx.errors import ExplainedError, storing

METRICS_FILE = "metrics.jsonl"
VAL_ONLY_FILE = "metrics.val_only.jsonl"
"""Rows of validations of a checkpoint (trainer.val_only), which belong to no step of the run."""
SUPERSEDED_FILE = "metrics.superseded.jsonl"
"""Rows of steps that the run took again, after it was resumed from an earlier step."""


class TrackingError(ExplainedError, ValueError):
    """A logger cannot start, or a file of metrics cannot be read."""


class TensorboardLogger:
    """Writes an event file in `tensorboard/`, in which entries of earlier files are hidden beyond the step of `rewind`."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        (run_dir / "tensorboard").mkdir(exist_ok=True)
        self._purge_step: int | None = None
        self._open = cache(lambda: SummaryWriter(str(run_dir / "tensorboard"), purge_step=self._purge_step))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._open().add_scalar(name, value, step)
        self._open().flush()

    def generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        for index, row in enumerate(rows):
            # Indented, so that Markdown shows the text verbatim.
            texts = (f"**{name}**\n\n{textwrap.indent(str(value), '    ')}" for name, value in row.items())
            self._open().add_text(f"val/generation_{index}", "\n\n".join(texts), step)

    def rewind(self, step: int) -> None:
        self._purge_step = step + 1

    def close(self) -> None:
        self._open().close()


class WandbLogger:
    """Continues a wandb run with the configuration; its id is kept in the run's folder for a resumed run."""

    def __init__(self, run_dir: Path, config_yaml: str, project: str, experiment: str) -> None:
        import wandb
        import yaml  # not above, because `rlx view` reads metrics without it

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
        self._run.log({"step": step, **metrics})

    def generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        if rows:
            names = list(rows[0])
            table = self._wandb.Table(columns=names, data=[[str(row.get(name)) for name in names] for row in rows])
            self._run.log({"step": step, "val/generations": table})

    def rewind(self, step: int) -> None:
        """Do nothing: wandb cannot remove rows of a continued run, so repeated steps are there twice."""

    def close(self) -> None:
        self._run.finish()


Logger = TensorboardLogger | WandbLogger


class Tracker:
    """Writes metrics to `metrics.jsonl`, and sends them to every logger that the user asked for.

    A logger that fails later, for example for want of a network, does not end the run: its first failure gives a notice. A
    failure of `metrics.jsonl` does. A context that closes the loggers.

    Raises TrackingError if a logger cannot start or a row is damaged, and StorageError, also later, if `metrics.jsonl` cannot be written.
    """

    def __init__(
        self,
        loggers: Sequence[str],  # as `trainer.logger`; `Progress` handles `console`
        run_dir: Path,
        config_yaml: str,  # this and the next two for wandb
        project: str,
        experiment: str,
        metrics_file: str = METRICS_FILE,
        may_write: Callable[[], None] = lambda: None,  # is called before each row, and raises if the run must end
        notice: Callable[[str], None] = print,
    ) -> None:
        self._file = run_dir / metrics_file
        self._may_write, self._notice = may_write, notice
        if metrics_file == METRICS_FILE and os.path.lexists(self._file):
            deque(_rows(self._file), 0)  # so that damage shows before the workers start
        makers: dict[str, Callable[[], Logger]] = {
            "tensorboard": lambda: TensorboardLogger(run_dir),
            "wandb": lambda: WandbLogger(run_dir, config_yaml, project, experiment),
        }
        self._loggers: dict[str, Logger] = {}
        self._failed: set[str] = set()
        try:
            for name, make in makers.items():
                if name in loggers:
                    self._loggers[name] = _start(name, make)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self._let_all("close")

    def rewind(self, step: int) -> None:
        """Let the run continue from this step, before anything is logged; rows of later ones are replaced. -1: all are."""
        rewind(self._file, step)
        self._let_all("rewind", step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._may_write()
        append_row(self._file, metrics, step)
        self._let_all("log", metrics, step)

    def generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Send some generations of a validation to the loggers; the dump of the validation holds all of them."""
        self._let_all("generations", rows, step)

    def _let_all(self, method: str, *arguments: Any) -> None:
        for name, logger in self._loggers.items():
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:
                if name not in self._failed:
                    self._failed.add(name)
                    self._notice(
                        f"logger {name} has failed and may lack metrics ({type(error).__name__}: {error}); the run continues, "
                        f"and {self._file.name} has them all. Further failures of {name} are not shown."
                    )


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


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with None for NaN and infinity, which JSON lacks."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}


def append_row(path: Path, metrics: Mapping[str, float], step: int) -> None:
    """Append an object to a metrics file, on disk before this returns: `step`, `time` [s since 1970] and the metrics.

    NaN and infinity become null. The file is opened each time, so that a lost folder shows. Raises StorageError if it cannot
    be written.
    """
    row = {"step": step, "time": round(time.time(), 3), **finite({name: float(x) for name, x in metrics.items()})}
    with storing(path):
        _append(path, (json.dumps(row, allow_nan=False) + "\n").encode())


def rewind(path: Path, step: int) -> None:
    """Keep the rows of a metrics file, if it exists, up to `step`, from which the run continues, so that each step has one row.

    Later rows move to SUPERSEDED_FILE beside it. A last line that a kill has torn is dropped. The file is replaced as a whole.
    Raises TrackingError if a line before the last is no row, StorageError if the file cannot be written.
    """
    if not os.path.lexists(path):
        return
    kept, later = [], []
    for line, row in _rows(path):
        (kept if row["step"] <= step else later).append(line + b"\n")
    with storing(path):
        if later:
            _append(path.with_name(SUPERSEDED_FILE), b"".join(later))
        with replacing_file(path) as file:
            file.write(b"".join(kept).decode())


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return metrics by step, in order, without nulls and without a last line that is still being written.

    If a row's step is lower than the last, a run was resumed there. Its rows replace those of the same and later steps. Raises
    TrackingError if a line is no JSON object with a `step` and numbers.
    """
    by_step: dict[int, dict[str, float]] = {}
    for line, row in _rows(path):
        step = row.pop("step")
        try:
            if any(isinstance(value, str | bool) for value in row.values()):
                raise TypeError
            own = {name: float(value) for name, value in row.items() if name != "time" and value is not None}
        except (TypeError, ValueError, OverflowError):
            raise TrackingError(
                f"{path}: got {line[:80].decode(errors='replace')!r}, expected numbers; correct or remove the line"
            ) from None
        if by_step and step < next(reversed(by_step)):
            by_step = {s: metrics for s, metrics in by_step.items() if s < step}
        by_step.setdefault(step, {}).update(own)
    return by_step


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each whole line of a metrics file and its row, which is checked."""
    if not path.is_file():  # a pipe would never end
        raise TrackingError(f"{path}: is no regular file; remove it")
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int:
                raise TypeError
        except (ValueError, KeyError, AttributeError, TypeError, OverflowError, RecursionError):
            raise TrackingError(
                f"{path}, line {number}: got {line[:80].decode(errors='replace')!r}, expected a JSON object with `step` and numbers; "
                "correct or remove the line"
            ) from None
        yield line, row


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
