"""Prompts that are drawn before their step, and what their samples have so far. See docs/async.md.

The queue holds *draws*, each the prompts of one generation, the oldest first. A phase of generation runs the samples of the oldest
draw to their end. Those of the others get a budget of tokens beside it, and go on in the next step. At most `max_staleness` draws
wait behind the oldest one and each step trains on at least one, so a sample ends at most `max_staleness` steps after it began.
Nothing here depends on time: prompts, seeds and budgets follow from the configuration and the steps before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import xxhash
import yaml
from torch.nn.functional import pad

from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import has_environment
from rlx.data.batch import Batch, concat
from rlx.data.prompts import PromptDataset
from rlx.data.seeding import seed_for
from rlx.environments.conversation import Branch, Conversation
from rlx.environments.spec import environment_spec
from rlx.rollout.protocol import Kept

Sample = Kept | Conversation
"""What a sample has so far."""


@dataclass
class Draw:
    """Prompts of one generation; `step` and `first` determine the seeds of their samples."""

    step: int
    first: int
    epoch: int
    prompts: list[int]  # their indices in the data set
    rows: Batch  # a row for each sample
    kept: list[Sample]  # of each row

    @property
    def open_rows(self) -> list[int]:
        """The rows whose samples have not ended."""
        return [row for row, kept in enumerate(self.kept) if not kept.is_finished]


def spread(prompts: Batch, samples: int, run_seed: int, purpose: str, step: int, first: int = 0) -> Batch:
    """Repeat each prompt `samples` times in a row, with group_id, seed and info sample.

    A seed is a hash of run_seed, purpose, step and the indices of prompt and sample. `first` is the index of the first prompt,
    if the step has drawn others before.
    """
    index = [p for p in range(len(prompts)) for _ in range(samples)]
    seeds = [seed_for(run_seed, purpose, step, first + p, s) for p in range(len(prompts)) for s in range(samples)]
    info = {"sample": [*range(samples)] * len(prompts)}
    return prompts.rows(index).with_(info, group_id=torch.tensor(index) + first, seed=torch.tensor(seeds))


def room(config: PPOConfig, step: int) -> int:
    """Return how many draws a step may work on: its own, and those of later steps of the run."""
    last = config.trainer.total_training_steps or step
    return 1 + min(config.actor_rollout_ref.rollout.partial.max_staleness, max(0, last - step))


def round_tokens(config: PPOConfig) -> int:
    """Return the most tokens that a sample gets in a step that does not wait for its end."""
    partial, longest = config.actor_rollout_ref.rollout.partial, config.data.max_response_length
    rounds = partial.max_staleness if config.trainer.n_rollout_gpus else partial.max_staleness + 1
    return partial.round_tokens or -(-longest // max(1, rounds))


def token_count(kept: Sample) -> int:
    return len(kept.token_ids) + (len(kept.begun.token_ids) if isinstance(kept, Conversation) else 0)


def not_begun(config: PPOConfig) -> Sample:
    return Conversation([], config.data.max_response_length) if has_environment(config) else Kept()


def phase_rows(draws: Sequence[Draw], budget: int, shares: int) -> tuple[Batch, list[tuple[int, int]]]:
    """Return the rows of a phase of generation, and of each its draw and its row there.

    They are the open rows of all draws, with what they have as info `kept` and their budget: none for the first draw. With
    several shares each gets prompts of every age, because contiguous ones would give the oldest to one process.
    """
    places = [(number, row) for number, draw in enumerate(draws) for row in draw.open_rows]
    if len(draws) > 1 and shares > 1:
        # A prompt stays in its process, where its environments are.
        groups = [draw.rows["group_id"].tolist() for draw in draws]
        places.sort(key=lambda place: groups[place[0]][place[1]] % shares)
    widest, parts = max(draw.rows["prompt_ids"].shape[1] for draw in draws), []
    for rows in (draw.rows for draw in draws):
        added = (widest - rows["prompt_ids"].shape[1], 0)
        parts.append(rows.with_(**{name: pad(rows[name], added) for name in ("prompt_ids", "prompt_mask")}))
    starts = [*accumulate(map(len, parts), initial=0)]
    rows = concat(parts).rows([starts[number] + row for number, row in places])
    budgets = torch.tensor([budget if number else 0 for number, _ in places], dtype=torch.int64)
    return rows.with_({"kept": [draws[number].kept[row] for number, row in places]}, budget=budgets), places


def environment_digest(config: PPOConfig) -> str:
    """Return a hash of the environment's settings and file, on which its answers depend; empty without one."""
    if not has_environment(config):
        return ""
    spec = environment_spec(config)
    file = Path(spec.path or "").expanduser()
    code = file.read_bytes() if file.is_file() else b""
    settings = yaml.safe_dump([spec.name, spec.kwargs, spec.tool_format])  # it sorts keys
    return xxhash.xxh64_hexdigest(settings.encode() + code)


def as_data(draw: Draw, environment: str) -> dict[str, Any]:
    """Return a draw as plain data for a checkpoint, with the environment's digest."""
    kept = [{name: x for name, x in _fields(each).items() if name != "memory"} for each in draw.kept]
    own = {name: x for name, x in vars(draw).items() if name != "rows"}
    return {**own, "kept": kept, "environment": environment}


def from_data(data: dict[str, Any], config: PPOConfig, train: PromptDataset, run_seed: int, environment: str) -> Draw:
    """Return the draw of a checkpoint, for this run's number of samples.

    A sample begins again if the run has another environment, has got or lost one, or if its response or turn may not have so many
    tokens now.
    """
    is_same = data.get("environment", environment) == environment  # older checkpoints have none
    samples = config.actor_rollout_ref.rollout.n
    rows = spread(train.batch(data["prompts"]), samples, run_seed, "train", data["step"], data["first"])
    saved, kept = len(data["kept"]) // len(data["prompts"]), list[Sample]()
    for first in range(0, len(data["kept"]), saved):
        own = [_read(each, not_begun(config)) for each in data["kept"][first : first + saved]]
        own = [each if is_same and _fits(each, config) else not_begun(config) for each in own]
        kept += [*own, *(not_begun(config) for _ in range(samples))][:samples]
    return Draw(data["step"], data["first"], data["epoch"], data["prompts"], rows, kept)


def _fields(kept: Sample) -> dict[str, Any]:
    return kept._asdict() if isinstance(kept, Kept) else vars(kept)


def _read(data: dict[str, Any], empty: Sample) -> Sample:
    if data.keys() | {"memory"} != _fields(empty).keys() | {"memory"}:
        return empty
    if isinstance(empty, Kept):
        return Kept(**data)
    known = {"earlier": [Branch(*each) for each in data["earlier"]], "begun": Kept(*data["begun"])}
    return Conversation(**{**data, **known})


def _fits(kept: Sample, config: PPOConfig) -> bool:
    longest, turn = config.data.max_response_length, config.actor_rollout_ref.rollout.multi_turn.max_turn_tokens
    if isinstance(kept, Conversation):
        return kept.width == longest and len(kept.begun.token_ids) < (turn or longest)
    return len(kept.token_ids) < longest + kept.is_finished
