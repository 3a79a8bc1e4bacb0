"""Measure whole optimizer steps of an actor by length, to find the longest sequence, with memory by part.

python -m benchmarks.optimizer_step --tokens 32768,131072,393216 --optimizer-state 58

Each step runs in a process of its own: forward, loss over all tokens but the first, backward, clipping, AdamW. Weights are bf16.
`rlx` has fp32 masters and moments, of which `--optimizer-state` says where they are; with `--lossy` its AdamW has bf16 moments
alone, as the other modes: less memory, but at RL's learning rates rounding hides most updates. `--micro-batches` of so many
sequences each are summed before AdamW, in fp32 for `rlx`; the other modes have one. With `--gpus` processes share weights, gradients
and state, and `--ulysses` of them each sequence; device memory and seconds are then those of the fullest and slowest, and the figures of
the host are sums.
Seconds by phase are measured between events on the device: layers forward, the head both ways, layers backward, the work
between backward and AdamW (gradients of embeddings, FSDP's last sum, clipping), and AdamW with the rest. `hand-over` follows
the step and is not in its seconds, because an engine returns memory once per update, after its last step. A peer returns none.
A first step of one micro-batch makes the optimizer's state and compiles the head for its length; if that takes long, use
`--first-tokens 4096`. Of `--rounds` steps after it the one with the median time is shown. `reserved` is the device memory that
torch has taken, gaps included, and `process` the host memory of the whole process, both at their largest. After running out
of memory a mode is not tried with longer sequences. `rlx` is an `Engine`: activations offloaded, MLPs and norms in tiles,
log-probs without logits. The others are the transformers model, with whole logits, and a mode of
`python -m benchmarks.offload`.
"""

import argparse
import datetime
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from benchmarks.common import GB, cell, chosen_device, join_alone, write_random_model
from benchmarks.offload.device import clock, used_bytes
from benchmarks.offload.distributed import in_processes
from benchmarks.offload.modes import PEERS
from benchmarks.step_phases import STEP_PHASES, TIMES, Figures, PhasePeaks
from rlx.algorithms.losses import LossSettings, vanilla
from rlx.config.schema import ActivationOffloadConfig, ActorConfig, FSDPConfig, ModelConfig, OptimConfig
from rlx.data.batch import Batch
from rlx.engine.engine import Engine
from rlx.engine.micro_batches import MicroBatchRule
from rlx.engine.objectives import PolicyObjective
from rlx.offload.layer_costs import device_name
from rlx.offload.plan.shapes import SHAPES

RLX = "rlx"
HAND_OVER = "hand-over"
MEMORY_PARTS = ("weights", "gradients", "optimizer", "rest")
TOTALS = ("reserved", "host", "process")
SUMMED = ("host_bytes", "process_bytes")  # over processes
WIDTH = 12
PROGRESS = "measuring"  # begins a child's lines about its progress
TIMEOUT = datetime.timedelta(hours=1)  # longer than any step


def engine_step(folder: str, options: argparse.Namespace, device: torch.device) -> tuple[Any, ...]:
    """Return the model, its optimizer, a step on some tokens, and a hand-over that returns the reserved host memory [bytes]."""
    engine = Engine(
        ModelConfig(
            path=folder,
            enable_activation_offload=True,
            activation_offload=ActivationOffloadConfig(
                save=options.save,
                directory=options.directory,
                max_host_bytes=None if options.max_host_gb is None else int(options.max_host_gb * GB),
            ),
            tiled_mlp="auto",
        ),
        FSDPConfig(model_dtype="bf16", optimizer_state=options.optimizer_state[0]),
        strategy="fsdp2",
        device=device,
        optim=OptimConfig(lr=1e-6, master_weights=not options.lossy),
        sequence_parallel=options.ulysses,
    )

    def step(ids_T: Tensor, rows: int) -> None:
        response = len(ids_T) - 1
        ones = torch.ones(rows, response)
        batch = Batch.of(
            {
                "input_ids": ids_T.expand(rows, -1),
                "attention_mask": torch.ones(rows, len(ids_T), dtype=torch.bool),
                "response_mask": ones.bool(),
                "old_log_probs": -ones,
                "advantages": ones,
            }
        )
        objective = PolicyObjective(ActorConfig(), temperature=1.0, horizon=response)
        engine.update(batch, MicroBatchRule(rows=1), objective)

    def hand_over() -> int:
        engine.memory.to_host(parameters=False)
        return int(engine.memory.stats()["reserved_bytes"])

    assert engine.stepper is not None
    return engine.root, engine.stepper.optimizer, step, hand_over


def peer_step(folder: str, mode: str, device: torch.device) -> tuple[Any, ...]:
    """Return the same of the transformers model with whole logits; it hands nothing over, and its host memory is not known."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(device).train()
    model.config.use_cache = False
    optimizer, prepared = AdamW(model.parameters(), lr=1e-6), PEERS[mode](model)

    def step(ids_T: Tensor, rows: int) -> None:
        ids = ids_T[None].to(device)
        ones = torch.ones(1, len(ids_T) - 1, device=device)
        with prepared.around_step():
            with prepared.around_forward():
                logits = model(input_ids=ids[:, :-1]).logits
                log_probs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                loss, _ = vanilla(log_probs, -ones, ones, ones.bool(), LossSettings(0.2, 0.2))
            loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, None


def measure(folder: str, mode: str, tokens: int, options: argparse.Namespace, device: torch.device) -> Figures:
    """Return the figures of the measured step with the median time, and `rounds`, the seconds of all measured steps."""
    ids_T = torch.randint(0, 250, (tokens,), generator=torch.Generator().manual_seed(0))
    if mode == RLX:
        model, optimizer, step, hand_over = engine_step(folder, options, device)
    else:
        model, optimizer, step, hand_over = peer_step(folder, mode, device)
    peaks = PhasePeaks(model, optimizer, device)
    first = min(tokens, options.first_tokens or tokens)
    measured: list[Figures] = []
    for number in range(options.rounds + 1):
        ids, rows = (ids_T, options.micro_batches) if number else (ids_T[:first], 1)
        show(f"{mode}: step {number + 1} of {options.rounds + 1}, {rows} x {len(ids)} tokens")
        peaks.begin()
        began = clock(device)
        step(ids, rows)
        if number:
            seconds = clock(device) - began
            measured.append({"seconds": seconds, **peaks.finish()})
            show(f"{mode}: {json.dumps(measured[-1])}")
    figures = sorted(measured, key=lambda each: float(each["seconds"]))[len(measured) // 2]
    began, host_bytes = clock(device), hand_over and hand_over()
    figures["times"][HAND_OVER] = clock(device) - began if hand_over else None
    return {
        **figures,
        "rounds": [each["seconds"] for each in measured],
        "host_bytes": host_bytes,
        "left_bytes": used_bytes(device),
        "reserved_bytes": 0 if device.type == "cpu" else torch.accelerator.max_memory_reserved(device),
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def show(progress: str) -> None:
    """Print a line about the first process's progress."""
    if dist.get_rank() == 0:
        print(f"{PROGRESS} {progress}", file=sys.stderr, flush=True)


def measure_and_print(device: torch.device, options: argparse.Namespace) -> None:
    """Measure in all processes of the group; the first prints the figures of all together, in one line."""
    each: list[Figures] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(each, measure(options.folder, options.modes[0], options.tokens[0], options, device))
    if dist.get_rank() == 0:
        print(json.dumps(together(each)), flush=True)


def together(each: Sequence[Figures]) -> Figures:
    """Return the figures of all processes: the largest of times and device memory, the sums of host memory."""
    found: Figures = {}
    for name, first in each[0].items():
        values = [figures[name] for figures in each]
        if isinstance(first, dict):
            found[name] = together(values)
        elif isinstance(first, list):
            found[name] = [max(of_round) for of_round in zip(*values, strict=True)]
        else:
            found[name] = None if first is None else sum(values) if name in SUMMED else max(values)
    return found


def parts(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the device memory of the largest phase by part [GB]; `rest` holds the working set of a layer or the head."""
    static, peak = figures["static"], max(figures["peaks"].values())
    known = {name: static[name] / GB for name in MEMORY_PARTS[:-1]}
    return {**known, "rest": max(0.0, peak / GB - sum(known.values()))}


def draw(rows: Sequence[tuple[str, int, Figures]], path: Path) -> None:
    """Draw the memory of the largest phase by part, a bar for each step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.45 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes, left = figure.subplots(), [0.0] * len(rows)
    names = [f"{mode}, {tokens}" for mode, tokens, _ in rows]
    for part in MEMORY_PARTS:
        widths = [parts(figures)[part] for *_, figures in rows]
        axes.barh(names, widths, left=left, label=part)
        left = [one + other for one, other in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("device memory [GB]")
    axes.legend(frameon=False, ncols=len(MEMORY_PARTS), loc="lower right", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=130)


def line(mode: str, tokens: int, figures: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    if "error" in figures:
        return f"{mode:>24}{tokens:>10}  {figures['error']}"
    seconds = [figures["seconds"], *(figures["times"][name] for name in (*TIMES, HAND_OVER))]
    peaks = (figures["peaks"][name] / GB for name in STEP_PHASES)
    totals = (figures[f"{name}_bytes"] for name in TOTALS)
    totals_gb = (None if nbytes is None else nbytes / GB for nbytes in totals)
    times = "".join(cell(value, 3, WIDTH) for value in seconds)
    memory = "".join(cell(value, 2, WIDTH) for value in (*parts(figures).values(), *peaks, *totals_gb))
    return f"{mode:>24}{tokens:>10}{times}{memory}"


def header() -> str:
    """Return the names of the columns."""
    names = ("seconds", *(f"{name} s" for name in (*TIMES, HAND_OVER)), *MEMORY_PARTS, *STEP_PHASES, *TOTALS)
    return f"{'mode':>24}{'tokens':>10}" + "".join(f"{name:>{WIDTH}}" for name in names)


def in_own_process(arguments: Sequence[str]) -> Figures:
    """Run a child process and return the figures in its last line, or its error; its progress is printed."""
    command = [sys.executable, "-m", "benchmarks.optimizer_step", *arguments]
    messages: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stderr is not None
        for text in child.stderr:
            if text.startswith(PROGRESS):
                print(text, end="", file=sys.stderr, flush=True)
            elif text.strip():
                messages.append(text.strip())
        printed = child.stdout.read()
    if child.returncode == 0:
        found: Figures = json.loads(printed.splitlines()[-1])
        return found
    out_of_memory = any("OutOfMemoryError" in text for text in messages)
    last = messages[-1] if messages else f"exit code {child.returncode}"
    return {"error": "out of device memory" if out_of_memory else last[:200]}


def options_of() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_step", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-7b")
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--tokens", default="32768", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--modes", default=f"{RLX},checkpointing", type=lambda text: text.split(","))
    parser.add_argument("--save", default="boundary", help="rlx: what is offloaded, as activation_offload.save")
    parser.add_argument("--directory", help="rlx: takes the activations that exceed --max-host-gb")
    parser.add_argument("--max-host-gb", type=float, help="rlx: most host memory for activations [10^9 bytes]")
    parser.add_argument("--lossy", action="store_true", help="rlx: bf16 moments, no fp32 masters")
    parser.add_argument(
        "--optimizer-state",
        type=lambda text: [part if part in ("device", "host") else int(float(part) * GB) for part in text.split(",")],
        default=["device"],
        help="rlx: device, host, or the part of AdamW's state on the device [10^9 bytes]; one or several (default device)",
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="rlx: sequences of a step (default 1)")
    parser.add_argument("--gpus", type=int, default=1, help="rlx: processes (default 1)")
    parser.add_argument("--ulysses", type=int, help="rlx: processes that share each sequence (default: all)")
    parser.add_argument("--rounds", type=int, default=1, help="steps to measure, after a first one (default 1)")
    first = "tokens of the first step, which makes the optimizer's state (default: as many)"
    parser.add_argument("--first-tokens", type=int, help=first)
    out = Path("optimizer_step")
    parser.add_argument("--out", type=Path, default=out, help="folder of results.json and the picture")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # folder of the weights; makes this process measure
    options = parser.parse_args()
    if unknown := [mode for mode in options.modes if mode != RLX and mode not in PEERS]:
        parser.error(f"--modes: got {', '.join(unknown)}, expected some of {', '.join((RLX, *PEERS))}")
    if options.gpus > 1 and options.modes != [RLX]:
        parser.error(f"--gpus {options.gpus}: the other modes do not share sequences; set --modes {RLX}")
    options.ulysses = options.ulysses or options.gpus
    if options.gpus % options.ulysses:
        parser.error(f"--ulysses: got {options.ulysses}, expected a divisor of --gpus {options.gpus}")
    return options


def main() -> int:
    """Run the command and return the exit code."""
    options, device = options_of(), chosen_device()
    if options.folder:
        if options.gpus == 1:
            join_alone(device)
            measure_and_print(device, options)
        else:
            in_processes(options.gpus, device, measure_and_print, options, timeout=TIMEOUT)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    print(
        f"{options.shape} on {options.gpus} x {device_name(device)}; seconds of the step and by phase, and GB: parts of the largest phase, peaks by "
        "phase, what torch reserved of the device, the arena's host memory, the process"
    )
    print(header())
    results: list[tuple[str, int, Figures]] = []
    with tempfile.TemporaryDirectory(prefix="rlx-shape-") as folder:
        changed = {"num_hidden_layers": options.layers} if options.layers else {}
        changed["max_position_embeddings"] = max(options.tokens)
        write_random_model(Path(folder), options.shape, device, **changed)
        passed_on = [f"--folder={folder}", f"--save={options.save}", f"--rounds={options.rounds}"]
        for name in ("first_tokens", "directory", "max_host_gb"):
            if (given := getattr(options, name)) is not None:
                passed_on.append(f"--{name.replace('_', '-')}={given}")
        passed_on += [
            f"--gpus={options.gpus}",
            f"--ulysses={options.ulysses}",
            f"--micro-batches={options.micro_batches}",
        ]
        passed_on += ["--lossy"] * options.lossy
        states = [state if isinstance(state, str) else f"{state / GB:g}" for state in options.optimizer_state]
        for mode, where in [(m, s) for m in options.modes for s in (states if m == RLX else ["device"])]:
            name = f"{mode}, {where}" if mode == RLX else mode
            for tokens in sorted(options.tokens):
                arguments = [f"--modes={mode}", f"--tokens={tokens}", f"--optimizer-state={where}", *passed_on]
                figures = in_own_process(arguments)
                results.append((name, tokens, figures))
                print(line(name, tokens, figures), flush=True)
                (options.out / "results.json").write_text(json.dumps(results, indent=1))
                if "error" in figures:
                    break
    done = [row for row in results if "error" not in row[2]]
    if done:
        draw(done, options.out / "memory.png")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
