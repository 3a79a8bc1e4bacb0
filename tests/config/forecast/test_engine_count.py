"""The number of vLLM engines on a GPU: what a check says, and what a run gets."""

import json
from pathlib import Path

import pytest

from rlx.config.compose.command_line import compose
from rlx.config.forecast.forecast_text import long_text, short_text
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Machine, named_machine
from rlx.offload.plan.shapes import SHAPES

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
GSM8K = f"data.train_batch_size=128 {ROLLOUT}.n=16 data.max_prompt_length=256 data.max_response_length=256"
RACE = f"{ROLLOUT}.n=8 {ROLLOUT}.gpu_memory_utilization=0.4 data.max_response_length=512"


def forecast_of(folder: Path, shape: str, options: str, machine: Machine) -> MemoryForecast:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    words = f"{ROLLOUT}.name=vllm {MODEL}.path={folder} trainer.n_gpus_per_node=1 {GSM8K} {options}".split()
    return MemoryForecast.of(compose(words).partial, machine)


@pytest.mark.parametrize(
    ("shape", "options", "count", "why"),
    [
        ("smollm2-135m", "", 4, "more are no faster"),
        ("qwen2-1.5b", "", 4, "more are no faster"),
        ("qwen2-0.5b", f"{RACE} data.train_batch_size=64", 2, "4 would be 1.2 times as fast"),
        ("qwen2-0.5b", f"{RACE} data.train_batch_size=16 data.max_prompt_length=4096", 2, "4 would be 0.9 times as"),
        ("qwen2-7b", f"{ROLLOUT}.max_num_seqs=512 data.max_response_length=1024", 1, "copies of the weights would"),
        ("smollm2-135m", f"{ROLLOUT}.n=1", 1, "2 would be 1.1 times as fast"),
        ("smollm2-135m", f"{MODEL}.lora_rank=8", 1, "each engine would keep a copy of the base on the host"),
        ("smollm2-135m", f"{ROLLOUT}.tensor_model_parallel_size=2", 1, "an engine has several GPUs"),
        ("smollm2-135m", f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=30000000", 1, "engine_kwargs.vllm has"),
        ("smollm2-135m", f"{ROLLOUT}.engines_per_gpu=3", 3, "as configured"),
        ("smollm2-135m", f"{ROLLOUT}.name=hf", 1, "hf decodes in the worker"),
        ("smollm2-135m", "trainer.device=cpu", 1, "on a CPU engines share the cores"),
    ],
)
def test_engines_make_generation_faster_and_fit(tmp_path: Path, shape: str, options: str, count: int, why: str):
    forecast = forecast_of(tmp_path, shape, options, named_machine("h100"))
    assert forecast.engines.per_gpu == count
    assert forecast.engines.reason.startswith(why)
    assert forecast.decided().config.actor_rollout_ref.rollout.engines_per_gpu == count
    if forecast.on_device and "hf" not in options:
        line = f"vLLM: {count} engine(s) for each GPU; {forecast.engines.reason}"
        assert line in long_text(forecast).splitlines()


def test_a_small_model_is_told_of_more_engines(tmp_path: Path):
    for shape, more in ("smollm2-135m", 4), ("qwen2-7b", 0):
        forecast = forecast_of(tmp_path, shape, f"{ROLLOUT}.engines_per_gpu=1", named_machine("h100"))
        told = f"keeps the GPU waiting for one: {ROLLOUT}.engines_per_gpu=auto starts {more}"
        assert all((told in text(forecast)) == bool(more) for text in (short_text, long_text))


def test_engines_keep_memory_while_they_sleep(tmp_path: Path):
    one, four = (
        forecast_of(tmp_path, "qwen2-0.5b", f"{ROLLOUT}.engines_per_gpu={count}", named_machine("h100"))
        for count in (1, 4)
    )
    assert four.phase("update_actor").peak - one.phase("update_actor").peak == pytest.approx(6.0e9, rel=0.01)


def test_a_share_without_room_for_the_copies_of_so_many_engines_is_rejected(tmp_path: Path):
    for count, is_enough in ((2, True), (3, False)):
        forecast = forecast_of(tmp_path, "qwen2-7b", f"{ROLLOUT}.engines_per_gpu={count}", named_machine("h100"))
        assert (forecast.phase("rollout").lacking == 0) == is_enough


def test_engines_leave_other_phases_their_memory(tmp_path: Path):
    actor = "actor_rollout_ref.actor"
    found = []
    for rows in (128, 1024):
        options = (
            f"algorithm.adv_estimator=grpo {actor}.ppo_mini_batch_size=128 {actor}.ppo_micro_batch_size_per_gpu={rows}"
        )
        found.append(forecast_of(tmp_path, "smollm2-135m", options, named_machine("1x24gb")).engines)
    assert found[0].per_gpu == 2
    assert found[1] == (1, "asleep, several would keep memory that other phases need")
