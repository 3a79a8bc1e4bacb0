"""Samples that go on in later steps: the order of prompts, replay, resume, and what is rejected. Docs: docs/async.md."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from run_tools import KEPT, metrics_of, results, resume_from, transcript, weights

from rlx.cluster.placement import Mesh, share_ranges
from rlx.config.schema import (
    ActorRolloutRefConfig,
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    FilterGroupsConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
)
from rlx.config.schema.rollout import PartialConfig
from rlx.data.batch import Batch
from rlx.data.prompts import PromptSampler
from rlx.rewards.manager import Scores
from rlx.rollout.protocol import Completion
from rlx.trainer.evaluate import main as evaluate
from rlx.trainer.loop import Trainer
from rlx.trainer.progress import Progress
from rlx.trainer.prompt_queue import as_data, environment_digest, from_data
from rlx.trainer.run_state import Run

STALE = [
    "actor_rollout_ref.rollout.partial.max_staleness=2",
    "algorithm.rollout_correction.rollout_is=token",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.transcripts=True",
]


def prompts_of(folder, step):
    return [each["tokens"][: each["loss_mask"].index(1)] for each in transcript(folder, step)]


def same(found, expected):
    numbers = ({name: x for name, x in results(each).items() if not name.endswith("_s")} for each in (found, expected))
    return next(numbers) == next(numbers)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_stopped_run_goes_on_with_its_unfinished_samples_and_repeats_to_the_bit(train, learning):
    folder, unbroken = train(*STALE, *learning)
    queue = json.loads((folder / "checkpoints/global_step_2/queue.json").read_text())["queue"]
    assert [draw["step"] for draw in queue] == [3, 4], "the run ends with step 4, so no later prompts are drawn"
    counts = [[len(kept["token_ids"]) for kept in draw["kept"]] for draw in queue]
    assert max(counts[0]) > 6 >= max(counts[1]) > 0, "a round has 16 / 3 tokens, rounded up"
    assert any(not kept["is_finished"] for kept in queue[0]["kept"])
    assert not (folder / "checkpoints/global_step_4/queue.json").exists()
    for step, gap in ((1, 0), (2, 1), (3, 2), (4, 2)):
        metrics = unbroken[step]
        assert metrics["staleness/max"] == gap
        assert sum(metrics.get(f"staleness/gap_{each}_share", 0.0) for each in range(3)) == pytest.approx(1)
        assert metrics["mismatch/gap_0/mean_abs_log_prob"] < 1e-5, "of numerics alone"
        assert gap == 0 or metrics[f"mismatch/gap_{gap}/mean_abs_log_prob"] > 1e-4
    trained = {step: transcript(folder, step) for step in (3, 4)}
    _, resumed = train(*STALE, *learning, *resume_from(folder, 2))
    for step, before in trained.items():
        assert transcript(folder, step) == before and results(resumed[step]) == results(unbroken[step])
    alone, synchronous = train(*STALE[1:], *learning, "trainer.save_freq=-1")
    for step in range(1, 5):
        assert prompts_of(alone, step) == prompts_of(folder, step), "no prompt is skipped, none comes twice"
    own = {
        name: x
        for name, x in results(unbroken[1]).items()
        if not name.startswith(("partial/", "staleness/", "mismatch/gap_"))
    }
    assert own == results(synchronous[1]), "the first step has its own prompts to their end"
    told = folder.parent / "evaluation.json"
    assert evaluate([str(folder / "checkpoints/global_step_2"), "--out", str(told)]) == 0, "its queue is of other rows"


@pytest.mark.e2e
@pytest.mark.slow
def test_conversations_go_on_in_mid_turn_and_their_environments_are_restored(train, talking, tmp_path):
    folder, unbroken = train(*STALE, *talking)
    queue = json.loads((folder / "checkpoints/global_step_2/queue.json").read_text())["queue"]
    kept = [each for draw in queue for each in draw["kept"]]
    assert any(each["begun"][0] and len(each["seen"]) > 1 for each in kept), "a second turn is begun"
    for step, gap in ((1, 0), (2, 1), (3, 2), (4, 2)):
        assert unbroken[step]["staleness/max"] == gap
        assert 1 < unbroken[step]["conversation/turns_mean"] < 3 and unbroken[step]["conversation/failures"] > 0
        assert unbroken[step]["mismatch/gap_0/max_abs_log_prob"] < 1e-4
    trained = {step: transcript(folder, step) for step in (3, 4)}
    _, resumed = train(*STALE, *talking, *resume_from(folder, 2))
    for step, before in trained.items():
        after = transcript(folder, step)
        for name in ("token_ids", "loss_mask", "advantages", "reward", "reason", "log_prob_gap"):
            assert [each[name] for each in after] == [each[name] for each in before]
        assert same(resumed[step], unbroken[step])
    first = transcript(folder, 1)
    alone, _ = train(*STALE[1:], *talking, "trainer.total_training_steps=1")
    for name in ("token_ids", "loss_mask", "reward", "reason"):
        assert [each[name] for each in first] == [each[name] for each in transcript(alone, 1)]
    code = tmp_path / "own.py"
    code.write_text(code.read_text().replace("self.seed % 10", "self.seed % 9"))
    _, edited = train(*STALE, *talking, *resume_from(folder, 2))
    assert "conversation/ended/crash" not in edited[3] and edited[3]["staleness/max"] == 0, "with new answers"


class Prompts(SimpleNamespace):
    """Prompts of one token, their number; the response to prompt p has p + 1 tokens."""

    def batch(self, rows):
        ids = torch.tensor(rows)[:, None]
        info = {name: ["x"] * len(rows) for name in ("prompt_text", "ground_truth", "data_source", "extra_info")}
        return Batch.of({"prompt_ids": ids, "prompt_mask": torch.ones_like(ids, dtype=torch.bool)}, info)


class Sampler:
    """A sampler of `shares` processes: notes the rows of each phase as (prompt, tokens that it has, budget), and their seeds."""

    def __init__(self, shares):
        self.shares, self.phases, self.seeds = shares, [], {}

    def mesh(self, role):
        return Mesh.of(self.shares)

    def begin(self, role, method, purpose, batch, meanwhile):
        return batch

    def results(self, batch):
        prompts, budgets, kept = batch["prompt_ids"][:, -1].tolist(), batch["budget"].tolist(), batch.info["kept"]
        for prompt, seed in zip(prompts, batch["seed"].tolist(), strict=True):
            self.seeds.setdefault(seed, set()).add(prompt)
        self.phases.append([(p, len(k.token_ids), b) for p, k, b in zip(prompts, kept, budgets, strict=True)])
        answers = []
        for prompt, own, budget in zip(prompts, kept, budgets, strict=True):
            left = prompt + 1 - len(own.token_ids)
            more = min(left, budget or left)
            done = Completion([9] * more, [-1.0] * more, "stop" if more == left else "budget")
            answers.append(own.continued(done, len(self.phases)))
        found = batch.select("seed").with_({"kept": answers})
        return [found.rows(rows) for rows in share_ranges(len(found), self.shares)]


def queued(tmp_path, shares=1, steps=9, apart=0, **algorithm):
    rollout = RolloutConfig(n=2, partial=PartialConfig(max_staleness=2, round_tokens=2))
    data = DataConfig(train_batch_size=2, gen_batch_size=2, max_response_length=9)
    config = PPOConfig(
        data, ActorRolloutRefConfig(rollout=rollout), algorithm=AlgorithmConfig("grpo", **algorithm),
        trainer=TrainerConfig(total_training_steps=steps, n_rollout_gpus=apart),
    )  # fmt: skip
    tokenizer = SimpleNamespace(pad_token_id=0, batch_decode=lambda rows, **_: [str(len(row)) for row in rows])
    sampler, rewards = PromptSampler(8, 2, shuffle=False, seed=0), SimpleNamespace(scores_early=lambda rows: False)
    data = Prompts(), sampler, None
    return Trainer(Run(config, Sampler(shares), tokenizer, *data, rewards, tmp_path, Progress(9), None))


def test_the_oldest_prompts_run_to_their_end_and_later_ones_by_rounds(tmp_path):
    trainer = queued(tmp_path)
    found = [trainer.samples.generate(step) for step in (1, 2)]
    # Two samples each: prompts 0 and 1 to their end, two tokens of those of steps 2 and 3
    first, second = trainer.run.workers.phases
    assert (
        first[::2] == [(0, 0, 0), (1, 0, 0), (2, 0, 2), (3, 0, 2), (4, 0, 2), (5, 0, 2)] and first[::2] == first[1::2]
    )
    assert second[::2] == [(2, 2, 0), (3, 2, 0), (4, 2, 2), (5, 2, 2), (6, 0, 2), (7, 0, 2)]
    assert [samples.batch["policy_versions"][::2].tolist() for samples in found] == [
        [[1] + [0] * 8, [1, 1] + [0] * 7],
        [[1, 1, 2] + [0] * 6, [1, 1, 2, 2] + [0] * 5],
    ]
    assert found[1].batch["group_id"].tolist() == [0, 0, 1, 1] and found[1].metrics == {
        "train/epoch": 0.0,
        "partial/queued_prompts": 4.0,
        "partial/unfinished_samples": 8.0,
        "partial/continued_tokens": 16.0,
    }
    data = json.loads(json.dumps([as_data(draw, "") for draw in trainer.run.queue]))
    read = [from_data(each, trainer.run.config, Prompts(), trainer.run.seed, "") for each in data]
    assert [draw.kept for draw in read] == [
        [each._replace(log_probs=[*each.log_probs]) for each in draw.kept] for draw in trainer.run.queue
    ]
    assert all(torch.equal(a.rows["seed"], b.rows["seed"]) for a, b in zip(read, trainer.run.queue, strict=True))


def test_an_environments_arguments_have_no_order():
    given = ({"b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}})
    of = [PPOConfig(environment=EnvironmentConfig(name="guessing", kwargs=kwargs)) for kwargs in given]
    assert environment_digest(of[0]) == environment_digest(of[1]) != environment_digest(PPOConfig())


def test_processes_get_prompts_of_every_age(tmp_path):
    trainer = queued(tmp_path, shares=2)
    trainer.samples.generate(1)
    (rows,) = trainer.run.workers.phases
    assert [[prompt for prompt, *_ in part[::2]] for part in (rows[:6], rows[6:])] == [[0, 2, 4], [1, 3, 5]]


def test_a_sampler_of_its_own_works_on_later_prompts_until_both_sides_meet(tmp_path):
    trainer = queued(tmp_path, apart=1)
    for _ in range(2):
        trainer.samples.generate(trainer.run.finished_steps + 1)
        trainer.samples.meet()
        trainer.run.finished_steps += 1
    phases = [phase[::2] for phase in trainer.run.workers.phases]
    assert phases == [
        [(0, 0, 0), (1, 0, 0)],  # before step 1
        [(2, 0, 0), (3, 0, 0), (4, 0, 2), (5, 0, 2)],
        [(4, 2, 0), (5, 2, 0), (6, 0, 2), (7, 0, 2)],
    ]
    assert all(kept.is_finished for kept in trainer.run.queue[0].kept), "step 3 need not wait"
    trainer.samples.meet()
    assert len(trainer.run.workers.phases) == 3


@pytest.mark.parametrize("apart", [0, 1])
def test_dynamic_sampling_takes_draws_in_order_and_no_seed_comes_twice(tmp_path, monkeypatch, apart):
    """Each step keeps one prompt of a draw, so it takes two; the end of the run draws no prompts that no step needs."""
    trainer = queued(tmp_path, steps=4, apart=apart, filter_groups=FilterGroupsConfig(enable=True))
    scores = Scores(torch.tensor([0.0, 1.0, 1.0, 1.0]), {})
    monkeypatch.setattr(trainer.samples, "scores_of", lambda batch: scores)
    drawn, continued = itertools.cycle([0, 2, 4, 6]), 0.0  # the data set has four batches
    for step in range(1, 5):
        batch, _, metrics = trainer.samples.generate(step)
        kept = [next(drawn), next(drawn)]
        assert [row[0] for row in batch.prompt_tokens()] == [kept[0], kept[0], kept[1], kept[1]]
        assert batch["group_id"].tolist() == [0, 0, 2, 2] and metrics["filter_groups/generations"] == 2
        continued += metrics["partial/continued_tokens"]
    assert continued == sum(has for phase in trainer.run.workers.phases for _, has, _ in phase) > 0
    assert all(len(prompts) == 1 for prompts in trainer.run.workers.seeds.values())
    assert len(trainer.run.workers.seeds) == 8 * 4 and not trainer.run.queue


@pytest.mark.e2e
@pytest.mark.nightly
def test_two_processes_with_vllm_go_on_with_their_samples_after_a_resume(train, learning, cpu_vllm):
    settings = ["actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=2"]
    settings += ["actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=16777216"]
    folder, unbroken = train(*STALE, *learning, *settings)
    trained = {step: transcript(folder, step) for step in (3, 4)}
    assert [unbroken[step]["staleness/max"] for step in range(1, 5)] == [0, 1, 2, 2]
    assert all(metrics["mismatch/gap_0/max_abs_log_prob"] < 1e-4 for metrics in unbroken.values())
    _, resumed = train(*STALE, *learning, *settings, *resume_from(folder, 2))
    for step, before in trained.items():
        assert [each["token_ids"] for each in transcript(folder, step)] == [each["token_ids"] for each in before]
        assert results(resumed[step]) == pytest.approx(results(unbroken[step]), rel=1e-4, abs=1e-6)


MORTAL = """
import psutil, sys
from contextlib import contextmanager
from pathlib import Path
from rlx.driver import main
from rlx.trainer.progress import Progress

killed, first, passed, phase, row = Path(sys.argv[1]), int(sys.argv[2]), dict(), Progress.phase, Progress.row
driver = psutil.Process()

def victim(step):
    if sys.argv[3] == "driver":
        return driver
    workers = [each for each in driver.children(recursive=True) if "ray::WorkerProcess" in " ".join(each.cmdline())]
    return sorted(workers, key=lambda each: each.pid)[step % len(workers)]

def go_by(progress, what):
    step = progress._step
    passed[step] = passed.get(step, 0) + 1
    file = killed / f"{step} {what}"
    if passed[step] == first + step and not file.exists():
        file.touch()
        victim(step).kill()

@contextmanager
def mortal_phase(self, name):
    go_by(self, f"before {name}")
    with phase(self, name):
        yield
    go_by(self, f"after {name}")

def mortal_row(self, *arguments):
    go_by(self, "before the row")
    row(self, *arguments)

Progress.phase, Progress.row = mortal_phase, mortal_row
sys.exit(main(sys.argv[4:]))
"""
"""A driver that dies, or kills a worker, in each step N once: at the N-th of its events, counted from a first one."""


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, 9])
@pytest.mark.parametrize("victim", ["driver", "worker"])
@pytest.mark.parametrize(("task", "training", "own"), [("talking", 1, 0), ("learning", 1, 1), ("talking", 2, 0)])
def test_a_run_that_is_killed_at_every_event_ends_as_one_that_is_not(
    train, short_run, tmp_path, request, task, training, own, victim, first
):
    """A half of the events; those of a step are 15, or 17 with a sampler of its own."""
    settings = [*STALE, *request.getfixturevalue(task), f"trainer.n_rollout_gpus={own}", "trainer.device=cpu"]
    # `auto` is decided by the command alone, and weights that stay whole add gradients in another order
    whole = "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False"
    settings += [f"trainer.n_gpus_per_node={training}", whole]
    settings += ["trainer.total_training_steps=9", "trainer.save_freq=1", "trainer.max_restarts=99"]
    folder, unbroken = train(*settings)
    (killed := tmp_path / "killed").mkdir()
    command = [sys.executable, "-c", KEPT, MORTAL, str(killed), str(first), victim, *short_run, *settings]
    where, path = f"trainer.default_local_dir={tmp_path / 'broken'}", str(Path(__file__).parents[2])
    done = subprocess.run([*command, where], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    events = [file.name[2:] for file in sorted(killed.iterdir())]
    expected = (
        {"after checkpoint", "before the row"} if first else {"before rollout", "after reward", "before update_actor"}
    )
    assert expected <= {*events} and done.stderr.count("\nrlx restart ") == len(events) == (6 + 2 * own if first else 9)
    (broken,) = (tmp_path / "broken").glob("2*")
    assert (broken / "metrics.jsonl").read_bytes().count(b"\n") == 9, "a row of each step"
    for step in range(1, 10):
        tokens, expected = ([each["token_ids"] for each in transcript(run, step)] for run in (broken, folder))
        assert tokens == expected and same(metrics_of(broken)[step], unbroken[step])
    assert weights(broken, 9) == weights(folder, 9) != {}
