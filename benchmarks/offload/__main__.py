"""Measure what activation offloading costs and saves on this machine.

Without arguments: the Qwen2-7B shape with an accelerator, a tiny one without. Examples:

    python -m benchmarks.offload --case 8192x28 --case 32768x14 --modes plain,checkpointing,boundary,attention
    python -m benchmarks.offload --model llama3-8b --modes checkpointing,boundary,boundary:prefetch_layers=0
    python -m benchmarks.offload --gpus 2 --modes checkpointing,boundary,attention
    python -m benchmarks.offload --frozen --case 32768 --case 8192
    python -m benchmarks.offload --frozen --quantization nf4 --model qwen2.5-72b --case 32768 --modes boundary:resident=0
    python -m benchmarks.offload --overhead
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import shlex
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload.distributed import run_on
from benchmarks.offload.measure import Benchmark, Ranks
from benchmarks.offload.models import Case, number_of_layers, read_shape
from benchmarks.offload.modes import ADAPTER_RANK, MODE_DESCRIPTIONS, Mode, add_adapters, parse_mode
from benchmarks.offload.overhead import run_overhead
from rlx.offload.layer_costs import device_name
from rlx.offload.plan.shapes import SHAPES
from rlx.offload.plan_command import positive
from rlx.offload.storage.disk import DiskError, extent_file

_DEFAULT_MODES = "plain,checkpointing,selective,boundary,attention,transformers-offload,save-on-cpu,trl"
_DEFAULT_MODES_FROZEN = "checkpointing,boundary,boundary:resident=0,axolotl"
_DEFAULT_MODES_FSDP2 = "checkpointing,boundary,attention"  # each has sharded weights of its own


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 1 if no mode could be measured."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        _check_effect(parser, given)
        device = _device(given)
        about = _about(argv, device)
        benchmark = None if given.overhead else _benchmark(given, device, about)
    except (ValueError, DiskError) as error:
        parser.error(str(error))
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: the folder {given.out} cannot be made: {error.strerror}; name another")
    print(", ".join(f"{key} {value}" for key, value in about.items() if key != "command"), flush=True)
    if benchmark is None:
        run_overhead(given.rounds or 300, given.out, about)
        return 0
    return int(not (benchmark.run(Ranks()) if given.gpus is None else run_on(given.gpus, benchmark)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload",
        description=__doc__,
        epilog="modes:\n" + "\n".join(f"  {name:22}{text}" for name, text in MODE_DESCRIPTIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"{', '.join(SHAPES)}, or the path of a HF config.json")
    add(
        "--case",
        action="append",
        type=_case,
        metavar="TOKENS[xLAYERS]",
        help="may be given several times; default: 8192 tokens, on the CPU 128, and as many layers as the model has",
    )
    add(
        "--modes",
        help=f"default: {_DEFAULT_MODES}, with --gpus {_DEFAULT_MODES_FSDP2}; rlx's take options of OffloadOptions, "
        "such as boundary:prefetch_layers=0; all take :tile=auto or :tile=TOKENS, last: MLPs and norms in tiles",
    )
    add("--rounds", type=positive, help="timed steps per mode; default 10, with --overhead 300")
    add("--seconds", type=positive, help="begin no further round of a case after this time")
    add("--warm-up", type=positive, metavar="STEPS", help="steps of each mode before timing; default 1, for auto 3")
    add("--plain-layers", type=positive, metavar="N", help="measure plain with N layers and scale its times")
    add("--tier", default="cpu", help="tier of rlx's modes: cpu or disk")
    add("--directory", help="folder of the disk tier")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--device", choices=("cpu", "accelerator"), help="default: the accelerator if there is one")
    gpus = "N processes with FSDP2, each with a GPU; default: one without FSDP2"
    add("--gpus", type=positive, metavar="N", help=gpus)
    add(
        "--frozen",
        action="store_true",
        help=f"train LoRA adapters of rank {ADAPTER_RANK} only; default modes {_DEFAULT_MODES_FROZEN}, where resident=N streams "
        "the frozen weights of all layers but N, and resident=N:weights_in=FOLDER does so from a disk",
    )
    add("--quantization", choices=("nf4",), help="of the frozen weights, with --frozen; default: none")
    add("--overhead", action="store_true", help="measure the Python overhead per layer instead, on the CPU")
    add("--no-picture", action="store_true", help="neither record memory over a step nor draw")
    add("--out", type=Path, default=Path("offload_benchmark"), metavar="DIR", help="default: ./offload_benchmark")
    return parser


def _check_effect(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Refuse arguments that would have no effect."""
    changed = {name for name, value in vars(given).items() if value != parser.get_default(name)}
    ignored = changed - {"overhead", "rounds", "out"} if given.overhead else set()
    if ignored:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(ignored))
        raise ValueError(f"--overhead has a model and modes of its own, but got {names}; leave it out")


def _benchmark(given: argparse.Namespace, device: torch.device, about: dict[str, Any]) -> Benchmark:
    name = given.model or ("tiny" if device.type == "cpu" else "qwen2-7b")
    shape = read_shape(name)
    options = {"tier": given.tier, "directory": given.directory}
    if device.type == "cpu":
        options["min_bytes"] = 1024  # tensors of a model that the CPU can run are small
    default = _DEFAULT_MODES_FROZEN if given.frozen else _DEFAULT_MODES if given.gpus is None else _DEFAULT_MODES_FSDP2
    modes = _modes(given.modes or default, options)
    if given.quantization and not given.frozen:
        raise ValueError("--quantization: quantised weights cannot be trained; add --frozen")
    if given.frozen and given.gpus is not None:
        raise ValueError("--frozen runs in one process; leave --gpus out")
    streams = (mode.name for mode in modes if mode.resident is not None or mode.kind == "axolotl")
    if not given.frozen and (streaming := list(streams)):
        what = "resident= and axolotl stream frozen weights, which models have with --frozen only"
        raise ValueError(f"--modes {streaming[0]}: {what}")
    cases = given.case or [Case(128 if device.type == "cpu" else 8192, 0)]
    about = {**about, "model": name, "shape": shape, "dtype": given.dtype, "processes": given.gpus or 1}
    about["quantization"] = given.quantization
    about["options"] = {mode.name: asdict(mode.options) for mode in modes if mode.options is not None}
    return Benchmark(
        shape=shape,
        modes=modes,
        cases=[Case(case.tokens, case.layers or number_of_layers(shape)) for case in cases],
        device=device,
        dtype=getattr(torch, given.dtype),
        rounds=given.rounds or 10,
        seconds=given.seconds,
        warm_up=given.warm_up,
        plain_layers=given.plain_layers,
        with_picture=not given.no_picture,
        title=f"{name} on {given.gpus or 1} x {about['device']}, {given.dtype}",
        about=about,
        folder=given.out,
        adapt=add_adapters if given.frozen else None,
        is_quantized=given.quantization is not None,
    )


def _modes(text: str, options: dict[str, Any]) -> list[Mode]:
    modes = [parse_mode(part.strip(), options) for part in text.split(",")]
    names = [mode.name for mode in modes]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"--modes names {', '.join(sorted(twice))} more than once")
    for mode in modes:
        if mode.options is not None and mode.options.directory is not None and mode.options.uses_disk:
            extent_file(mode.options.directory)  # refuses a folder that cannot be used before anything is measured
    return modes


def _device(given: argparse.Namespace) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if given.device == "accelerator" and found is None:
        raise ValueError("--device accelerator: torch finds none on this machine; use --device cpu")
    if found is None or given.device == "cpu" or given.overhead:
        return torch.device("cpu")
    if (given.gpus or 1) > torch.accelerator.device_count():
        raise ValueError(f"--gpus {given.gpus}: this machine has {torch.accelerator.device_count()}")
    return found


def _about(argv: list[str] | None, device: torch.device) -> dict[str, Any]:
    arguments = sys.argv[1:] if argv is None else argv
    versions = {}
    for name in ("torch", "transformers", "trl"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "device": device_name(device),
        **versions,
        "python": platform.python_version(),
        "command": shlex.join(["python", "-m", "benchmarks.offload", *arguments]),
    }


def _case(text: str) -> Case:
    """Parse `TOKENSxLAYERS`, or `TOKENS`, which gives 0 layers: as many as the model has."""
    tokens, times, layers = text.partition("x")
    try:
        return Case(positive(tokens), positive(layers) if times else 0)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected TOKENSxLAYERS, such as 8192x28, or TOKENS") from None


if __name__ == "__main__":
    sys.exit(main())
