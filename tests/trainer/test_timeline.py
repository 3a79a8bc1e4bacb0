"""When a step did what: what is kept of a run, what it cost, and what the console says of that."""

import json
import time
from dataclasses import replace

import pytest
from matplotlib.image import imread

from rlx.config.schema import ActorRolloutRefConfig, PPOConfig, RolloutConfig, TrainerConfig
from rlx.config.schema.rollout import PartialConfig
from rlx.trainer.progress import Span
from rlx.trainer.report import write_report
from rlx.trainer.timeline import MOST_READINGS, TIMELINE_FILE, Timeline, costliest, costs_of, pictures, read_timeline
from rlx.trainer.tracking import TrackingError

READINGS = {
    "age": [9.0, 8.0, 3.0, 1.0],
    "engine 1 running": [0, 8, 1, 0],
    "engine 1 waiting": [0, 4, 0, 0],
    "tokens": [0, 0, 400, 500],
    "GPU busy": [0.0, 0.5, 0.25, 1.0],
}
OFFLOADED = {"offloaded_bytes": 2e6, "copied_bytes": 4e6, "disk_bytes": 0.0, "stall_ms": 500.0, "overlap": 0.5}
METRICS = {"timing_s/step": 10.0, **{f"perf/offload/actor/{name}": value for name, value in OFFLOADED.items()}}


def take(timeline, step, seconds=10.0, validate_s=0.0, readings=READINGS):
    """A step that began ten seconds ago: eight of rollout, two of update."""
    began = time.perf_counter() - 10.0
    spans = [Span("rollout", began + 1, began + 9), Span("update_actor", began + 9, began + 10)]
    spans += [Span("validate", began + 10, began + 10 + validate_s)] if validate_s else []
    timeline.read([readings, readings])
    timeline.end(step, began, spans, METRICS | {"timing_s/step": seconds + validate_s})


def test_the_last_and_the_slowest_step_are_kept_and_a_resumed_run_continues_them(tmp_path):
    timeline, file = Timeline(tmp_path), tmp_path / TIMELINE_FILE
    timeline.write()
    assert not file.exists() and read_timeline(file) == {}, "no step, no file"
    for step, seconds, validate_s in ((1, 99.0, 0), (2, 11.0, 0), (3, 12.0, 0), (4, 10.0, 30)):
        take(timeline, step, seconds, validate_s)
    timeline.write()
    kept = read_timeline(file)
    assert (kept["last"]["step"], kept["slowest"]["step"]) == (4, 3), "neither start nor validation make a step slow"
    last = kept["last"]
    assert [phase[0] for phase in last["phases"]] == ["rollout", "update_actor", "validate"] and len(
        last["processes"]
    ) == 2
    assert last["processes"][1]["engine 1 running"] == [0, 8, 1, 0] and last["copies"]["actor"]["stall_ms"] == 500.0
    assert last["processes"][0]["at"] == pytest.approx([1, 2, 7, 9], abs=0.1)
    resumed = Timeline(tmp_path)
    resumed.rewind(3)
    take(resumed, 4, 50.0)
    resumed.write()
    kept = read_timeline(file)
    assert (kept["last"]["step"], kept["slowest"]["step"]) == (4, 3), "the first step of a process counts as a start"
    file.write_text(json.dumps({"last": {**last, "phases": 1}}))
    with pytest.raises(TrackingError, match=TIMELINE_FILE):
        Timeline(tmp_path).rewind(9)


def test_many_readings_are_thinned_and_those_before_the_step_are_left_out(tmp_path):
    timeline = Timeline(tmp_path)
    ages = [11.0 - index * 11 / (2 * MOST_READINGS) for index in range(2 * MOST_READINGS)]
    take(timeline, 1, readings={"age": ages, "tokens": [1.0] * len(ages)})
    timeline.write()
    for process in read_timeline(tmp_path / TIMELINE_FILE)["last"]["processes"]:
        assert 0.4 * MOST_READINGS > len(process["at"]) == len(process["tokens"]) > 0.3 * MOST_READINGS
        assert min(process["at"]) >= 0


def test_the_costs_of_a_step_are_those_of_its_readings(tmp_path):
    timeline = Timeline(tmp_path)
    take(timeline, 1)
    timeline.write()
    step = read_timeline(tmp_path / TIMELINE_FILE)["last"]
    found = costs_of(step)
    assert {name: round(value, 1) for name, value in found.items()} == {
        "steps": 1, "step": 10.0, "rollout": 8.0, "update_actor": 1.0, "stall/actor": 0.5, "cpu": 0,
        "tail": 2.0, "waiting": 5.0, "no request": 0.0, "no kernel": 2.5,
    }  # fmt: skip
    for start, queue, key in (
        (1, {}, ""),
        (5, {}, "set partial.max"),
        (5, {"partial/queued_prompts": 4}, "raise partial"),
    ):
        shown = {**step, "phases": [["rollout", start, 9]], "queue": queue}
        (_, rows) = pictures({"last": shown})["Last step 1"]
        ((row, bars),) = ((row, bars) for row, bars in rows.items() if row.startswith("tail"))
        assert f"{2 / (9 - start):.0%}" in row and key in row and ("partial" in row) == bool(key)
        assert bars[0][:2] == pytest.approx((7, 9), abs=0.1)
    take(timeline, 2, seconds=20.0)
    take(timeline, 3, seconds=20.0)
    assert (timeline.costs["steps"], timeline.costs["step"]) == (2, 40.0), "those of the first step do not count"
    said = costliest(timeline.costs, PPOConfig(), start_s=41.0)
    assert said.startswith("start-up, 41.0s, which a longer run pays once; then rollout, 8.0s of 20.0s a step (40%): ")
    assert costliest(timeline.costs, PPOConfig(), start_s=39.0).startswith("rollout")
    assert costliest(Timeline(tmp_path).costs, PPOConfig(), start_s=39.0) == ""


SAMPLING = {"step": 10.0, "rollout": 6.0, "update_actor": 3.0}


@pytest.mark.parametrize(
    ("sampler", "spent", "said"),
    [
        ("vllm", {}, "rollout, 6.0s of 10.0s a step (60%)"),
        (
            "vllm",
            {"tail": 3.0},
            "50% of it waits for few long answers; set actor_rollout_ref.rollout.partial.max_staleness=2",
        ),
        ("vllm", {"no request": 3.0}, "raise environment.processes"),
        ("vllm", {"no kernel": 3.0}, "50% of it; raise actor_rollout_ref.rollout.engines_per_gpu"),
        ("vllm", {"waiting": 5.0}, "raise actor_rollout_ref.rollout.max_num_seqs"),
        ("hf", {}, "actor_rollout_ref.rollout.name=vllm"),
        ("hf", {"cpu": 1, "reward": 7.0}, "reward.num_workers"),
        ("hf", {"old_log_prob": 7.0}, "algorithm.rollout_correction.bypass_mode=True"),
        ("hf", {"update_actor": 7.0, "stall/actor": 3.5}, "50% of it; actor_rollout_ref.model.activation_offload.save"),
        ("hf", {"update_critic": 7.0, "stall/critic": 3.5}, "critic.model.activation_offload.save=auto"),
        ("hf", {"validate": 7.0}, "trainer.test_freq"),
        ("hf", {"checkpoint": 7.0}, "trainer.save_freq"),
    ],
)
def test_the_costliest_phase_is_named_with_its_key(sampler, spent, said):
    config = PPOConfig(actor_rollout_ref=ActorRolloutRefConfig(rollout=RolloutConfig(name=sampler)))
    costs = {"steps": 2, **{name: 2 * value for name, value in (SAMPLING | spent).items()}}
    text = costliest(costs, config, start_s=1.0)
    assert said in text, text


@pytest.mark.parametrize(
    ("staleness", "spent", "said"),
    [
        (0, {}, "(60%): sampler and trainer take turns; set actor_rollout_ref.rollout.partial.max_staleness=1"),
        (1, {"tail": 3.0}, "set actor_rollout_ref.rollout.partial.max_staleness=2"),
        (2, {"tail": 3.0}, "raise actor_rollout_ref.rollout.partial.round_tokens"),
        (1, {}, "sampling takes 9.0s on 2, training 3.0s on 6 GPU(s) of a machine; set trainer.n_rollout_gpus=4 trainer.n_gpus_per_node=4"),
        (1, {"update_actor": 9.0}, "(90%). Of a step sampling takes 9.0s on 2, training 9.0s on 6 GPU(s) of a machine"),
    ],
)  # fmt: skip
def test_a_run_with_samplers_of_their_own_says_which_side_needs_more_gpus(staleness, spent, said):
    rollout = RolloutConfig(partial=PartialConfig(max_staleness=staleness))
    trainer = TrainerConfig(n_gpus_per_node=6, n_rollout_gpus=2)
    config = PPOConfig(actor_rollout_ref=ActorRolloutRefConfig(rollout=rollout), trainer=trainer)
    costs = {"steps": 2, **{name: 2 * value for name, value in (SAMPLING | {"sampling": 9.0} | spent).items()}}
    text = costliest(costs, config, start_s=1.0)
    assert said in text and ("n_rollout_gpus=4" in text) == ("update_actor" not in spent), text
    rollout = replace(rollout, tensor_model_parallel_size=3)
    config = replace(config, actor_rollout_ref=ActorRolloutRefConfig(rollout=rollout))
    assert "n_rollout_gpus=3" in costliest(costs, config, start_s=1.0), "whole groups"


def test_the_report_draws_both_steps_and_names_a_damaged_timeline(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    write_report(tmp_path / "metrics.jsonl", tmp_path / "report.png")
    without = imread(tmp_path / "report.png").shape[0]
    timeline = Timeline(tmp_path)
    for step in (1, 2, 3):
        take(timeline, step, seconds=13.0 - step)
    timeline.write()
    write_report(tmp_path / "metrics.jsonl", tmp_path / "report.png")
    added = imread(tmp_path / "report.png")[without:, :, :3]
    blue, green = added[..., 2] - added[..., 0] > 0.5, added[..., 1] - added[..., 0] > 0.4
    half = len(added) // 2
    assert all(part.any() for part in (blue[:half], blue[half:], green[:half], green[half:])), "a picture for each"
    (tmp_path / TIMELINE_FILE).write_text("{")
    with pytest.raises(TrackingError, match=TIMELINE_FILE):
        write_report(tmp_path / "metrics.jsonl", tmp_path / "report.png")
