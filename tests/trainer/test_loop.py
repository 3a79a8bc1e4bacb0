"""What the loop does around the road: without workers, since no number is computed here."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlx.cluster.placement import Mesh
from rlx.config.schema import (
    ActivationOffloadConfig,
    ActorConfig,
    ActorRolloutRefConfig,
    AlgorithmConfig,
    DataConfig,
    FilterGroupsConfig,
    ModelConfig,
    PPOConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    TrainerConfig,
    ValKwargsConfig,
)
from rlx.data.batch import Batch
from rlx.data.prompts import PromptSampler
from rlx.data.seeding import seed_for
from rlx.rewards.manager import Scores
from rlx.trainer.loop import Trainer
from rlx.trainer.progress import Progress
from rlx.trainer.run import with_models, with_steps
from rlx.trainer.run_state import Run
from rlx.trainer.samples import SelectionError, spread
from rlx.trainer.step_metrics import zero_advantage_share


def test_folders_of_offloaded_bytes_are_the_same_in_a_worker_that_runs_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/scratch").mkdir(parents=True)
    given = (None, "scratch", "~/scratch", "/scratch")
    found = []
    for directory in given:
        offload = ActivationOffloadConfig(directory=directory)
        places = {"layer_offload_directory": directory, "lora_adapter_path": directory}
        model = ModelConfig(path="/policy", activation_offload=offload, **places)
        found.append(
            with_models(PPOConfig(actor_rollout_ref=ActorRolloutRefConfig(model=model))).actor_rollout_ref.model
        )
    assert [model.activation_offload.directory for model in found] == [
        None,
        str(tmp_path / "scratch"),
        str(tmp_path / "home/scratch"),
        "/scratch",
    ]
    assert [model.layer_offload_directory for model in found] == [model.activation_offload.directory for model in found]
    assert {model.path for model in found} == {"/policy"}
    assert found[2].lora_adapter_path == str(tmp_path / "home/scratch"), "one that is there"


class Held(SimpleNamespace):
    """Three held-out prompts, each its number."""

    def __len__(self):
        return 3

    def batch(self, rows):
        ids = torch.tensor(rows)[:, None]
        names = ("prompt_text", "response_text", "ground_truth", "data_source")
        info = {name: ["x"] * len(rows) for name in names}
        return Batch.of({"prompt_ids": ids, "prompt_mask": torch.ones_like(ids, dtype=torch.bool)}, info)


def test_without_a_critic_there_is_no_warm_up_to_wait_for():
    base = PPOConfig(data=DataConfig(train_batch_size=2), trainer=TrainerConfig(critic_warmup=3, total_epochs=2))
    sampler = PromptSampler(9, 2, shuffle=False, seed=0)
    ppo, grpo = (replace(base, algorithm=AlgorithmConfig(adv_estimator=name)) for name in ("gae", "grpo"))
    assert with_steps(ppo, sampler).trainer.critic_warmup == 3
    assert with_steps(grpo, sampler).trainer.critic_warmup == 0
    assert with_steps(grpo, sampler).trainer.total_training_steps == 8


def validating(tmp_path, monkeypatch, val, together):
    """The metrics and the seeds of a validation of three prompts whose responses have two tokens and score 1."""
    policy = ActorRolloutRefConfig(rollout=RolloutConfig(val_kwargs=ValKwargsConfig(**val)))
    config = PPOConfig(data=DataConfig(train_batch_size=1, val_batch_size=together), actor_rollout_ref=policy)
    trainer, seeds = Trainer(Run(config, None, None, Held(), None, Held(), None, tmp_path, Progress(4), None)), []

    def generate(prompts, count, purpose, step, first):
        batch = spread(prompts, count, 1, purpose, step, first)
        seeds.extend(batch["seed"].tolist())
        masks = {name: torch.ones(len(batch), 2, dtype=torch.bool) for name in ("attention_mask", "response_mask")}
        return batch.with_(input_ids=batch["prompt_ids"].expand(-1, 2), **masks).drop("prompt_ids", "prompt_mask")

    monkeypatch.setattr(trainer.samples, "responses", generate)
    monkeypatch.setattr(trainer.samples, "scores_of", lambda batch: Scores(torch.ones(len(batch)), {}))
    return trainer.validation.run(), seeds


@pytest.mark.parametrize(("val", "samples"), [({"n": 4}, 1), ({"n": 4, "do_sample": True, "temperature": 1.0}, 4)])
def test_greedy_validation_takes_one_response_to_a_prompt(val, samples, tmp_path, monkeypatch):
    metrics, _ = validating(tmp_path, monkeypatch, val, 2)
    assert metrics["val/accuracy"] == 1.0
    assert [name for name in metrics if "@" in name and "core" in name] == [
        f"val-core/x/reward/{what}" for what in ("mean@4", "best@4/mean") if samples == 4
    ]
    assert len((tmp_path / "validation/0.jsonl").read_text().splitlines()) == 3 * samples


@pytest.mark.parametrize("together", [None, 1, 2])
def test_validation_draws_the_same_samples_by_any_batch_size(together, tmp_path, monkeypatch):
    _, seeds = validating(tmp_path, monkeypatch, {"n": 2, "do_sample": True, "temperature": 1}, together)
    assert seeds == [seed_for(1, "val", 0, prompt, sample) for prompt in range(3) for sample in range(2)]


class Skipping:
    """Workers of which the second optimizer step is skipped."""

    def __init__(self):
        self.metrics = iter(
            [
                {"actor/skipped": 0.0, "actor/grad_norm": 2.0, "actor/loss": 1.0},
                {"actor/skipped": 1.0, "actor/grad_norm": float("nan"), "actor/loss": float("nan")},
            ]
        )

    def mesh(self, role):
        return Mesh.of(1)

    def call(self, role, method, batch=None):
        return [next(self.metrics) if batch else {"peak_memory_gb": 2.0, "readings": {}}]


def test_a_skipped_step_and_equal_rewards_are_counted_and_shown(tmp_path):
    stream = io.StringIO()
    prompts, sampler = SimpleNamespace(), PromptSampler(4, 2, shuffle=True, seed=0)
    policy = ActorRolloutRefConfig(actor=ActorConfig(ppo_mini_batch_size=1, shuffle=False))
    config = PPOConfig(data=DataConfig(train_batch_size=2), actor_rollout_ref=policy)
    progress = Progress(4, stream=stream)
    trainer = Trainer(Run(config, Skipping(), None, prompts, sampler, prompts, None, tmp_path, progress, None))
    columns = {name: torch.zeros(2, 3) for name in ("old_log_probs", "advantages")}
    mask = torch.ones(2, 3, dtype=torch.bool)
    ids = {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "group_id": torch.arange(2)}
    batch = Batch.of({**ids, "attention_mask": mask, "response_mask": mask, **columns})
    _, metrics = trainer.learner.update(batch, step=1)
    assert metrics == {"actor/skipped": 1.0, "actor/grad_norm": 2.0, "actor/loss": 1.0}
    assert trainer.learner.account(1, batch, metrics)["train/skipped_steps"] == 1.0
    assert "1 optimizer step(s) skipped" in stream.getvalue()
    progress.row({"reward/mean": 0.0, "train/zero_advantage_share": zero_advantage_share(batch)}, 1)
    said = " ".join(stream.getvalue().split())
    assert (
        "advantages are zero, because all answers of a prompt got the same reward; raise data.train_batch_size" in said
    )


class Recording:
    """Workers that keep what they are sent; the trainer's log-probs are 1 above the sampler's on every second row."""

    def __init__(self):
        self.calls, self.sent = [], []

    def mesh(self, role):
        return Mesh.of(1)

    def split(self, role, method, batch):
        self.calls.append((role, method))
        shift = (torch.arange(len(batch)) % 2)[:, None].float()
        return Batch.of({"old_log_probs": shift.expand(-1, 3) - 2.0, "entropy": torch.ones(len(batch), 3)})

    def call(self, role, method, batch):
        self.sent.append(batch)
        return [{"actor/skipped": 0.0, "actor/grad_norm": 2.0}]


def correcting(tmp_path, stream, mini_batch=2, **options):
    algorithm = AlgorithmConfig(adv_estimator="grpo", rollout_correction=RolloutCorrectionConfig(**options))
    policy = ActorRolloutRefConfig(actor=ActorConfig(ppo_mini_batch_size=mini_batch))
    config = PPOConfig(data=DataConfig(train_batch_size=2), algorithm=algorithm, actor_rollout_ref=policy)
    prompts, sampler = SimpleNamespace(), PromptSampler(4, 2, shuffle=True, seed=0)
    workers, progress = Recording(), Progress(4, stream=stream)
    return workers, Trainer(Run(config, workers, None, prompts, sampler, prompts, None, tmp_path, progress, None))


def sampled(rows=4):
    mask = torch.ones(rows, 3, dtype=torch.bool)
    ids = {"input_ids": torch.zeros(rows, 3, dtype=torch.int64), "group_id": torch.arange(rows)}
    return Batch.of(
        {**ids, "attention_mask": mask, "response_mask": mask, "rollout_log_probs": torch.full((rows, 3), -2.0)}
    )


def test_what_the_loss_needs_of_a_correction_is_sent_and_nothing_where_all_is_rejected(tmp_path):
    stream = io.StringIO()
    options = {"rollout_is": "token", "rollout_rs": ("seq_mean_k1",), "rollout_rs_threshold": ("2.0",)}
    workers, trainer = correcting(tmp_path, stream, mini_batch=1, **options)
    batch, compared = trainer.learner.advantages(
        trainer.learner.log_probs(sampled(), step=7).with_(scores=torch.zeros(4))
    )
    assert compared["mismatch/mean_abs_log_prob"] == 0.5 and compared["correction/rejected_sequence_share"] == 0.5
    _, metrics = trainer.learner.update(batch.with_(advantages=torch.ones(4, 3)), step=7)
    assert metrics == {"actor/skipped": 0.0, "actor/grad_norm": 2.0}
    assert [part["loss_mask"].all().item() for part in workers.sent] == [True, True]
    assert all(part["rollout_is_weights"].eq(1).all() for part in workers.sent)
    assert "step 7: rollout_correction rejected every token of 2 of 4 mini-batches" in stream.getvalue()

    workers.sent.clear()
    gone = batch.with_(advantages=torch.ones(4, 3), loss_mask=torch.zeros(4, 3, dtype=torch.bool))
    assert trainer.learner.update(gone, step=8)[1] == {"actor/skipped": 0.0}
    assert not workers.sent and "of 4 of 4 mini-batches" in stream.getvalue()

    nothing = torch.zeros(4, 3, dtype=torch.bool)
    empty = batch.with_(advantages=torch.ones(4, 3), loss_mask=nothing, response_mask=nothing)
    assert trainer.learner.update(empty, step=9)[1] == {"actor/skipped": 0.0}
    assert not workers.sent and "step 9: no response has any token in 4 of 4 mini-batches" in stream.getvalue()


def drawing(tmp_path, monkeypatch, scores, **algorithm):
    """A trainer of which each generation of 2 prompts is 4 one-token samples with the next of these scores; and its calls."""
    policy = ActorRolloutRefConfig(rollout=RolloutConfig(n=2))
    data = DataConfig(train_batch_size=2, gen_batch_size=2)
    config = PPOConfig(data=data, algorithm=AlgorithmConfig(**algorithm), actor_rollout_ref=policy)
    sampler, left, calls = PromptSampler(6, 2, shuffle=False, seed=0), iter(scores), []
    trainer = Trainer(Run(config, None, None, Held(), sampler, Held(), None, tmp_path, Progress(4), None))

    def generate(prompts, count, purpose, step, first):
        calls.append((purpose, prompts["prompt_ids"].flatten().tolist(), first))
        batch = prompts.rows([row for row in range(len(prompts)) for _ in range(count)])
        mask = torch.ones(len(batch), 2, dtype=torch.bool)
        ids = {"input_ids": batch["prompt_ids"].expand(-1, 2), "group_id": first + torch.arange(len(batch)) // count}
        return batch.with_(attention_mask=mask, response_mask=mask[:, 1:], **ids).drop("prompt_ids", "prompt_mask")

    monkeypatch.setattr(trainer.samples, "responses", generate)
    monkeypatch.setattr(trainer.samples, "scores_of", lambda batch: Scores(torch.tensor(next(left)), {}))
    return trainer, calls


def test_remax_compares_each_sample_with_the_greedy_response_to_its_prompt(tmp_path, monkeypatch):
    trainer, calls = drawing(tmp_path, monkeypatch, [[0.25, 0.5]], adv_estimator="remax")
    batch, verdict, numbers = trainer.samples.generate(1)
    assert (
        calls == [("train", [0, 1], 0), ("greedy", [0, 1], 0)] and numbers == {"train/epoch": 0.0} and verdict is None
    )
    assert batch["greedy_scores"].tolist() == [0.25, 0.25, 0.5, 0.5]


def test_dynamic_sampling_goes_on_until_there_are_enough_prompts(tmp_path, monkeypatch):
    filters = FilterGroupsConfig(enable=True)
    scores = [[0.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]]
    trainer, calls = drawing(tmp_path, monkeypatch, scores, adv_estimator="grpo", filter_groups=filters)
    batch, verdict, numbers = trainer.samples.generate(1)
    assert calls == [("train", [0, 1], 0), ("train", [2, 3], 2), ("train", [4, 5], 4)]
    assert batch["group_id"].tolist() == [1, 1, 4, 4] and verdict.scores.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert batch["scores"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert numbers["filter_groups/generations"] == 3 and numbers["train/epoch"] == 0


def test_dynamic_sampling_that_finds_nothing_stops_with_what_it_saw(tmp_path, monkeypatch):
    filters = FilterGroupsConfig(enable=True, max_num_gen_batches=2)
    trainer, calls = drawing(tmp_path, monkeypatch, [[1.0] * 4] * 3, adv_estimator="grpo", filter_groups=filters)
    with pytest.raises(
        SelectionError, match=r"step 9: .* kept 0 of 4 prompts.* after 2 generations\. 100\.0% of all answers"
    ):
        trainer.samples.generate(9)
    assert len(calls) == 2
