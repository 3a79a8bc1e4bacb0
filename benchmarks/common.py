"""Functions that the benchmarks share: options, timing, and folders of random weights."""

import contextlib
import json
import os
import signal
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.offload.device import clean_up, clock, peak_bytes, reset_peak, used_bytes
from rlx.offload.layer_costs import device_name
from rlx.offload.plan.shapes import SHAPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GB = 1e9
T = TypeVar("T")


def benchmark_parser(name: str, description: str) -> ArgumentParser:
    """Return the parser of `python -m benchmarks.NAME`, with the options that most benchmarks have."""
    parser = ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--rounds", type=int, default=5, help="repetitions; the table shows their median (default 5)")
    parser.add_argument("--device", help="cpu or cuda (default: the accelerator if there is one)")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser


def chosen_device(given: str | None = None) -> torch.device:
    """Return the device that was asked for, else the accelerator, else the CPU."""
    return torch.device(given or torch.accelerator.current_accelerator(check_available=True) or "cpu")


def title(device: torch.device) -> str:
    """Return the device and the version of torch, such as "NVIDIA H200, torch 2.11.0"."""
    return f"{device_name(device)}, torch {torch.__version__}"


def cell(value: float | None, digits: int, width: int = 10) -> str:
    """Return a right-aligned number for a table; `-` for a missing one."""
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"


def join_alone(device: torch.device) -> None:
    """Initialise torch.distributed with this process alone, unless that has been done."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def peak_beside(work: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """Return the result of `work`, and the most device memory that it took beside the memory in use before [bytes]."""
    clean_up(device)
    before = used_bytes(device)
    reset_peak(device)
    result = work()
    return result, peak_bytes(device) - before


def write_json(options: Namespace, device: torch.device, figures: Mapping[str, Any]) -> None:
    """Write the figures with the device and the version of torch to the file of `--json`, if it was given."""
    if options.json is not None:
        text = json.dumps({"device": device_name(device), "torch": torch.__version__, **figures}, indent=2)
        options.json.write_text(f"{text}\n")


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that `work` takes, including the work that it queues on the device."""
    began = clock(device)
    work()
    return clock(device) - began


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that appends its output to `log`; afterwards end it and the processes that it left running.

    `options` are those of Popen. vLLM samples without flashinfer, which not every installation has.
    """
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", **options.pop("env", {})}
    with log.open("a") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


def wait_at_most(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Wait for a process and return its exit code; None if it still runs after `limit_s` seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(max(0.0, limit_s))
    return None


def random_model(shape: str, device: torch.device, **changes: Any) -> "PreTrainedModel":
    """Return a model with random bf16 weights, the same on every call.

    Args:
        shape: a name in `SHAPES`.
        device: where the weights are drawn.
        changes: fields of the model's configuration that replace those of the shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**SHAPES[shape], **changes})
    torch.manual_seed(0)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def write_random_model(folder: Path, shape: str, device: torch.device, **changes: Any) -> None:
    """Write a `random_model` as a Hugging Face folder. The device's free memory goes back to the system afterwards."""
    model = random_model(shape, device, **changes)
    model.save_pretrained(folder)
    del model
    clean_up(device)  # vLLM and child processes take memory from the device, not from torch
