"""Run the checks of one model type in processes of their own, so that a crash or a hang costs one check."""

import logging
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks.sweep.features import FEATURES
from benchmarks.sweep.reference import TOLERANCE

LIMIT_S = 120
Status = Literal["right", "refused", "wrong", "not makeable"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Args:
        status: right: the error is at most `TOLERANCE`. refused: before anything starts.
        error: the largest difference to transformers alone; None if the check did not end or had nothing to compare.
        note: the message of a refusal or failure, or a remark.
    """

    status: Status
    error: float | None = None
    note: str = ""


def outcomes_of(row: str, features: Sequence[str]) -> dict[str, CheckResult]:
    """Return the outcome of each feature for a row of the table.

    Args:
        row: a model type or a name in `VARIANTS`.
        features: names in `FEATURES`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.sweep.features"])
    found: dict[str, CheckResult] = {}
    with TemporaryDirectory() as folder:
        made = _in_processes(context, 1, _make, (row, folder), [""])[""]
        if made.status != "right":
            return dict.fromkeys(features, made)
        groups = sorted({(FEATURES[name].processes, FEATURES[name].fresh) for name in features})
        for processes, fresh in groups:
            of_group = multiprocessing.get_context("spawn") if fresh else context
            waiting = [name for name in features if FEATURES[name][1:] == (processes, fresh)]
            while waiting:  # a crash ends the processes, and others go on behind it
                found |= _in_processes(of_group, processes, _check, (folder, made.note), waiting)
                waiting = [name for name in waiting if name not in found]
    return found


def _in_processes(
    context: Any, size: int, work: Any, arguments: tuple[Any, ...], names: Sequence[str]
) -> dict[str, CheckResult]:
    """Let a group of processes work on the names until all are done, or the group has failed at one."""
    with TemporaryDirectory() as meeting:
        pipes = [context.Pipe() for _ in range(size)]
        group = [
            context.Process(target=_serve, args=(rank, size, meeting, pipe[1], work, arguments, names))
            for rank, pipe in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(group, pipes, strict=True):
            process.start()
            theirs.close()
        found: dict[str, CheckResult] = {}
        for name in names:
            answers = [_answer(process, mine) for process, (mine, _) in zip(group, pipes, strict=True)]
            found[name] = max(answers, key=_badness)
            if any(
                process.exitcode is not None or answer.note == LATE
                for process, answer in zip(group, answers, strict=True)
            ) or (found[name].status == "wrong" and size > 1):
                break  # its processes may wait for each other
        for process in group:
            process.kill()
            process.join()
    return found


LATE = f"it did not end within {LIMIT_S} s"


def _answer(process: ForkServerProcess, pipe: Connection) -> CheckResult:
    wait([pipe, process.sentinel], LIMIT_S)
    if pipe.poll():
        try:
            return pipe.recv()
        except EOFError:
            process.join()
    if process.exitcode is None:
        return CheckResult("wrong", None, LATE)
    return CheckResult("wrong", None, f"its process ended with exit code {process.exitcode}")


def _badness(outcome: CheckResult) -> tuple[int, float]:
    return ["right", "refused", "not makeable", "wrong"].index(outcome.status), outcome.error or 0.0


def _serve(
    rank: int, size: int, meeting: str, pipe: Connection, work: Any, arguments: tuple[Any, ...], names: Sequence[str]
) -> None:
    import torch
    import torch.distributed as dist
    import transformers

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    logging.getLogger("rlx").setLevel(logging.ERROR)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}/group", rank=rank, world_size=size)
    torch.manual_seed(rank)
    task = work(*arguments)
    for name in names:
        pipe.send(task(name))
    os._exit(0)


def _make(row: str, folder: str) -> Any:
    """Write the tiny model of a row. The note of the outcome is how it runs: the type and the attention."""
    import torch

    from benchmarks.sweep.trainer import TinyModel
    from rlx.config.schema import ModelConfig
    from rlx.models.preflight import faults_of
    from tests.tiny_models import config_of, write_tiny

    def make(_: str) -> CheckResult:
        reason = ""
        for dtype in (torch.float64, torch.float32):
            try:
                write_tiny(Path(folder), config_of(row), dtype)
                attention = "eager" if faults_of(ModelConfig(path=folder), "lm") else "sdpa"
                made = TinyModel(Path(folder), dtype, attention)
                other = {tensor.dtype for tensor in made.model("lm").parameters()} - {dtype}
                assert not other, f"a model in {dtype} has parameters in {other}"
                assert made.policy.figures["log_probs"].isfinite().all(), "its log-probs are not finite"
                return CheckResult("right", None, f"{dtype} {attention}".removeprefix("torch."))
            except BaseException as error:
                reason = _said(error).replace(folder, "MODEL")
        return CheckResult("not makeable", None, reason)

    return make


def _check(folder: str, how: str) -> Any:
    import torch

    from benchmarks.sweep.trainer import Refused, TinyModel

    dtype, attention = how.split()
    made = TinyModel(Path(folder), getattr(torch, dtype), attention)
    remark = "" if attention == "sdpa" else attention

    def check(name: str) -> CheckResult:
        try:
            error, note = FEATURES[name].check(made)
        except Refused as refusal:
            return CheckResult("refused", None, str(refusal).replace(folder, "MODEL"))
        except BaseException as failure:
            return CheckResult("wrong", None, _said(failure).replace(folder, "MODEL"))
        if error is None:
            return CheckResult("right", None, note)
        return CheckResult("right" if error <= TOLERANCE else "wrong", error, ", ".join(filter(None, (remark, note))))

    return check


def _said(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({Path(place.filename).name}:{place.lineno})"
