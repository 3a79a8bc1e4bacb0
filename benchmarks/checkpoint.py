"""Measure how long a save in the background holds up training, how it stretches the steps beside it, and what digests cost.

python -m benchmarks.checkpoint --shape qwen2-7b --json checkpoint.json

One process, FSDP2, bf16 weights of a random model, AdamW's fp32 moments and masters as a run has by default (`--bf16-state`:
moments in bf16, no masters). Host memory for saves is reserved and pinned before, as a run does after its first step. `blocks` is
the time from the call until training can go on. `beside` is the mean of the steps that began while the thread wrote. The digests'
cost is the time of a file written with digests over that of a plain file with the same bytes; both end with fsync. Rounds
alternate.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import (
    GB,
    benchmark_parser,
    cell,
    chosen_device,
    join_alone,
    random_model,
    seconds_of,
    title,
    write_json,
)
from benchmarks.offload.device import clock
from rlx.checkpoint.manifest import damage, damaged_chunks
from rlx.checkpoint.tensors import Piece, Source, write_safetensors
from rlx.config.schema import FSDPConfig, OptimConfig
from rlx.engine.checkpoint import Description, parts_of
from rlx.engine.optimizer import build_optimizer, step_in_parts
from rlx.engine.optimizer_state import OptimizerStateOnHost
from rlx.engine.residency import TensorOffload
from rlx.engine.saving import CheckpointWriter
from rlx.engine.sharded import precision_of
from rlx.engine.sharding import shard
from rlx.offload import HostArena
from rlx.offload.plan.shapes import SHAPES

DIGESTED_BYTES = 4 << 30


class Training:
    """A sharded model, its optimizer, and steps on random tokens, each over several micro-batches."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.device, self._options = device, options
        self.arena = HostArena(pinned=device.type != "cpu")
        fsdp = FSDPConfig(model_dtype="bf16", optimizer_offload=options.optimizer_offload)
        plain = _model(options, device)
        self.sharded = shard(plain, "fsdp2", fsdp, precision_of(fsdp, device), device)
        optim = OptimConfig(lr=1e-6, master_weights=not options.bf16_state)
        self.optimizer = build_optimizer(self.sharded.root.parameters(), optim)
        self.writer = CheckpointWriter(self.arena, "model", device)
        self._on_host = None
        if options.optimizer_offload:
            self._on_host = OptimizerStateOnHost(self.optimizer, self.arena, "state", device)
        vocabulary = plain.config.get_text_config().vocab_size
        self._ids = torch.randint(0, vocabulary, (1, options.tokens), device=device)

    @property
    def offloads(self) -> list[TensorOffload]:
        """Where state is in host memory."""
        return self._on_host.offloads if self._on_host else []

    def step(self) -> None:
        """Take an optimizer step, and wait for the device."""
        for _ in range(self._options.micro_batches):
            self.sharded.root(input_ids=self._ids, labels=self._ids).loss.backward()
        self.writer.before_step()
        if self._on_host is None:
            step_in_parts(self.optimizer)
        else:
            self._on_host.step()
        self.optimizer.zero_grad()
        clock(self.device)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Return the state to save."""
        described = Description("lm", ("model", "optimizer"), updates=1, steps=1, adapters={})
        return parts_of(described, self.sharded, self.optimizer)


def _model(options: argparse.Namespace, device: torch.device) -> nn.Module:
    changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    model = random_model(options.shape, device, **changes)
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def measure_saves(training: Training, folder: Path, steps: int, saves: int) -> dict[str, Any]:
    """Save in the background beside training, check what was written, and return bytes and seconds; a list has one for each save."""
    device = training.device
    parts = training.parts()
    nbytes = sum(tensor.nbytes for part in parts.values() for tensor in part.values())
    pinning = seconds_of(lambda: training.writer.reserve(t for part in parts.values() for t in part.values()), device)
    alone = [seconds_of(training.step, device) for _ in range(steps)]
    found: dict[str, Any] = {"blocks_s": [], "written_s": [], "steps_beside_s": []}
    for _ in range(saves):
        began = time.perf_counter()
        blocks = seconds_of(lambda: training.writer.begin(folder, training.parts(), training.offloads, True), device)
        beside = []
        while not training.writer.is_written or not beside:
            if len(beside) == 10 * steps:
                break
            beside.append(seconds_of(training.step, device))
        training.writer.finish()
        found["blocks_s"].append(blocks)
        found["written_s"].append(time.perf_counter() - began)
        found["steps_beside_s"].append(beside)
        if faults := damage(folder) or damaged_chunks(folder):
            raise RuntimeError(faults[0])
        shutil.rmtree(folder)
    usual = statistics.mean(alone[1:] or alone)
    stretch = [statistics.mean(beside) / usual - 1 for beside in found["steps_beside_s"]]
    return {"bytes": nbytes, "pinning_s": pinning, "steps_alone_s": alone, "stretch": stretch, **found}


def measure_digests(folder: Path, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of writing the same bytes plainly and as a file of tensors with digests."""
    tensor = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    source = Source(Piece("w", (0,), tensor), lambda: [tensor])

    def plain() -> None:
        with (folder / "file").open("wb", buffering=0) as file:
            data = memoryview(tensor.numpy())
            while len(data):
                data = data[file.write(data[: 8 << 20]) :]
            os.fsync(file.fileno())

    def digested() -> None:
        write_safetensors(folder / "file", [source])

    seconds: dict[str, list[float]] = {"plain_s": [], "digested_s": []}
    works: dict[str, Callable[[], None]] = {"plain_s": plain, "digested_s": digested}
    for turn in range(rounds + 1):
        for name, work in sorted(works.items(), reverse=turn % 2 == 1):  # the disk may be busy with the file before
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
            (folder / "file").unlink()
    return {name: each[1:] for name, each in seconds.items()}


def main() -> int:
    """Run the command and return the exit code."""
    parser = benchmark_parser("checkpoint", (__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-7b")
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch (default 8192)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step (default 4)")
    parser.add_argument("--steps", type=int, default=5, help="measured before the save (default 5)")
    parser.add_argument("--optimizer-offload", action="store_true", help="AdamW's state waits in host memory")
    parser.add_argument("--bf16-state", action="store_true", help="moments in bf16, no masters")
    parser.add_argument("--saves", type=int, default=2, help="one after the other (default 2)")
    parser.add_argument("--digested-bytes", type=int, default=DIGESTED_BYTES, help="of the file that measures digests")
    parser.add_argument("--out", type=Path, help="folder to write into (default: a temporary one)")
    options = parser.parse_args()
    device = chosen_device(options.device)
    join_alone(device)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_", dir=options.out))
    try:
        digests = measure_digests(folder, options.digested_bytes, options.rounds)
        training = Training(options, device)
        training.step()
        save = measure_saves(training, folder / "saved", options.steps, options.saves)
    finally:
        shutil.rmtree(folder)
        dist.destroy_process_group()
    plain, digested = (statistics.median(digests[name]) for name in ("plain_s", "digested_s"))
    place = "host" if options.optimizer_offload else "device"
    print(f"{title(device)}: {options.shape}, {save['bytes'] / GB:.1f} GB, state on the {place}")
    rows: dict[str, list[float]] = {
        "pinning host memory, once [s]": [save["pinning_s"]],
        "step alone [s]": [statistics.mean(save["steps_alone_s"][1:] or save["steps_alone_s"])],
        "plain write [GB/s]": [options.digested_bytes / GB / plain],
        "cost of digests [%]": [100 * (digested / plain - 1)],
        "each save blocks [s]": save["blocks_s"],
        "written after [s]": save["written_s"],
        "steps beside the save [s]": [statistics.mean(each) for each in save["steps_beside_s"]],
        "longest step beside [s]": [max(each) for each in save["steps_beside_s"]],
        "stretch of the steps beside [%]": [100 * each for each in save["stretch"]],
    }
    for name, values in rows.items():
        print(f"{name:>34}{''.join(cell(value, 3, 12) for value in values)}")
    write_json(options, device, {**save, **digests})
    return 0


if __name__ == "__main__":
    sys.exit(main())
