"""What tests of this folder share: small checkpoints, workers that only write a file, and the metrics of a run."""

import json
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from rlx.checkpoint.manifest import seal
from rlx.config.schema import AlgorithmConfig, PPOConfig
from rlx.data.batch import Batch
from rlx.errors import StorageError
from rlx.trainer import checkpoints as ck
from rlx.trainer.saver import Saver

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
PATTERNS = re.findall(r"^\| `([^`]+/[^`]+)` \|", PAGE, re.MULTILINE)
MACHINE = ("timing_s/", "perf/", "memory/", "time")
"""Numbers of a step that do not say what was computed, but how long it took and what it used."""
OWN = """
from rlx.environments.protocol import Observation

def varied(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 16

class Once:
    def reset(self, row):
        return row["prompt"]

    def step(self, turn):
        return Observation([], done=True)

class Echo:
    def reset(self, row):
        self.seed = row["seed"]
        return row["prompt"]

    def step(self, turn):
        if turn.index == 1 and self.seed % 7 == 0:
            raise ValueError("unlucky")
        reward = len(set(turn.text)) / 16 * (turn.index + 1)
        return Observation([{"role": "user", "content": str(self.seed % 10)}], reward, turn.index == 2, {"last": turn.index})

class Last:
    def reset(self, row):
        self.seed = row["seed"]
        return row["prompt"]

    def step(self, turn):
        reward = len(set(turn.text)) / 16 if turn.index == 2 else None
        return Observation([{"role": "user", "content": str(self.seed % 10)}], reward, turn.index == 2, {"last": turn.index})

async def run(row, client):
    messages = list(row["prompt"])
    for index in range(3):
        answer = await client.chat.completions.create(model="any", messages=messages)
        message = answer.choices[0].message
        messages += [message, {"role": "user", "content": str(row["seed"] % 10)}]
    return {"reward": len(set(message.content)) / 16, "last": index}
"""
KEPT = """
import sys
from rlx.supervisor.keeper import Keeper
sys.exit(Keeper([sys.executable, "-c", *sys.argv[1:]]).keep())
"""
"""As `rlx.main_ppo`, with another driver."""
STATE = ck.DriverState(
    step=3,
    seed=1,
    policy_version=4,
    sampler={"epoch": 0, "position": 6},
    kl_controller={"type": "fixed", "coef": 0.1},
    skipped_steps=0,
    first_validation={"val/accuracy": 0.25},
)


def make(run, step, *roles):
    folder = run / "checkpoints" / f"global_step_{step}"
    folder.mkdir(parents=True)
    for role in roles:
        (folder / role).mkdir()
        (folder / role / "weights").write_bytes(bytes(range(256)))
        seal(folder / role, {})
    ck.write_driver_state(folder, replace(STATE, step=step))
    seal(folder, {})
    return folder


class Disk:
    """Workers of one process with an actor: `busy` polls pass before the file is written, or the disk fails."""

    def __init__(self, busy=0, fails=None):
        self.busy, self.fails, self.calls = busy, fails, []

    def call(self, role, method, *arguments):
        self.calls.append(method)
        if method == self.fails:
            raise StorageError("the disk is full")
        if method == "begin_save":
            self.folder = Path(arguments[0])
            self.folder.mkdir()
            (self.folder / "weights").write_text("weights")
        if method == "finish_save":
            seal(self.folder, {})
        if method == "is_written":
            self.busy -= 1
            return [self.busy < 0]
        return [None]


def saver_of(folder, workers, clock=lambda: 0.0, **trainer):
    base = PPOConfig(algorithm=AlgorithmConfig(adv_estimator="grpo"))
    return Saver(replace(base, trainer=replace(base.trainer, **trainer)), workers, folder, clock)


def responses(lengths, prompt=1, response=4, info=None, **columns):
    """Rows whose prompts have `prompt` tokens, and responses of these lengths in a column of `response`; groups are pairs."""
    mask = torch.arange(response) < torch.tensor(lengths)[:, None]
    ones = torch.ones(len(lengths), prompt, dtype=torch.bool)
    tensors = {
        "input_ids": torch.zeros(len(lengths), prompt + response, dtype=torch.int64),
        "attention_mask": torch.cat([ones, mask], dim=1),
        "response_mask": mask,
        "group_id": torch.arange(len(lengths)) // 2,
    }
    return Batch.of(tensors | columns, info or {})


def described(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in PATTERNS)


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """metrics.jsonl by step, the last line of a step winning."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps: dict[int, dict[str, float]] = {}
    for line in lines:
        steps.setdefault(line["step"], {}).update(line)
    return steps


def results(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(MACHINE)}


def transcript(folder: Path, step: int) -> list[dict]:
    with (folder / "transcripts" / f"step_{step:06d}.jsonl").open() as lines:  # `splitlines` would split texts, too
        return [json.loads(line) for line in lines]


def resume_from(folder, step: int) -> list[str]:
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/checkpoints/global_step_{step}"]


def weights(folder, step):
    return {file.name: file.read_bytes() for file in folder.glob(f"checkpoints/global_step_{step}/actor/model/*")}
