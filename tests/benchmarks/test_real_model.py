"""Records of a real model, in small: their keys can run, runs go on, and intervals, table and verdict are right."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from benchmarks import real_model
from benchmarks.race.real import area, reached
from benchmarks.real_model import EVERY, RECORDS, main
from benchmarks.side_by_side import part_of_gpu
from rlx.config.check.validate import check
from rlx.config.choices import chosen
from rlx.config.compose.command_line import compose
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import named_machine
from rlx.config.vllm_range import ENGINE_BYTES

MODEL, OVERRIDE = "actor_rollout_ref.model.path", "actor_rollout_ref.model.override_config"


@pytest.mark.parametrize("name", RECORDS)
def test_the_keys_of_a_record_can_run(name, untrained, tmp_path):
    record = RECORDS[name]
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 1 + 2?", "answer": "3"}\n' * 128)
    places = (f"{MODEL}={untrained}", f"data.train_files={tmp_path}/rows.jsonl", "data.answer_key=answer")
    machine = named_machine("2xh100")
    if name == "exact":  # only a vocabulary of whole blocks can be equal to the bit
        places += (f"{OVERRIDE}.vocab_size=320", f"{OVERRIDE}.head_dim=64")
    for keys in record.variants.values():
        overrides = [*EVERY, *places, *record.keys, *keys]
        overrides += chosen(overrides, compose(overrides), machine, 128)
        assert check(compose(overrides), machine).faults == ()
        if record.variants.keys() != {"1 GPU", "2 GPUs"}:
            assert check(compose([*overrides, *part_of_gpu(overrides, machine, 9)]), machine).faults == ()


def test_parts_of_a_gpu_are_equal_and_fit(untrained):
    overrides, machine = [*EVERY, f"{MODEL}={untrained}", *RECORDS["sums"].keys], named_machine("h100")
    config, part = compose([*overrides, *part_of_gpu(overrides, machine, 9)]).config, machine.device_bytes / 9
    rollout = config.actor_rollout_ref.rollout
    taken = rollout.gpu_memory_utilization * machine.device_bytes
    assert 0 < rollout.engine_kwargs.vllm["kv_cache_memory_bytes"] + ENGINE_BYTES < taken <= 0.51 * part
    assert max(phase.peak for phase in MemoryForecast.of(config, machine).phases()) < part
    with pytest.raises(ValueError, match="60 runs do not fit on a GPU of 80 GB"):
        part_of_gpu(overrides, machine, 60)


def finished(folder: Path, accuracies, reward=0.5, **extra):
    """Write the files of a finished run, steps of 30 s."""
    (folder / "runs" / "1").mkdir(parents=True)
    rows = [{"step": 10 * place, "val/accuracy": value} for place, value in enumerate(accuracies)]
    for row in rows[1:]:
        row |= {"reward/mean": reward, "timing_s/step": 30.0}
    rows[0] |= extra
    (folder / "runs" / "1" / "metrics.jsonl").write_text(
        "".join(json.dumps({**row, "time": 1.0}) + "\n" for row in rows)
    )
    (folder / "finished").touch()


def test_finished_runs_are_compared_and_not_repeated(tmp_path, capsys):
    for variant, reward in ("offloaded", 0.5), ("kept", 0.5625):
        finished(tmp_path / "offload" / f"{variant}-1", [0.094, 0.25, 0.368], reward, **{"val/extra/strict": 0.01})
    assert main(["offload", "--model", "nowhere", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "9.4 (7.1 to 12.3) → 36.8 (32.7 to 41.1)" in shown and "+27.4" in shown and "strict 1.0" in shown
    assert "largest difference of the variants' rewards in a step: 0.0625" in shown
    assert "0.562 (0.562 to 0.562)" in shown
    figures = json.loads((tmp_path / "offload.json").read_text())
    assert figures["held_out_rows"] == 500 and figures["largest_difference_of_rewards"] == 0.0625
    assert figures["runs"][0]["seconds"] == {"0": 0.0, "10": 30.0, "20": 60.0}
    assert (tmp_path / "offload.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("accuracies", "code"), [([0.2, 0.3], 0), ([0.5, 0.549], 1), ([0.5, 0.56], 1), ([0.3, 0.2], 1)]
)
def test_a_record_that_has_to_win_points_says_when_it_does_not(tmp_path, capsys, accuracies, code):
    """50 % and 56 % of 500 rows have intervals that overlap."""
    finished(tmp_path / "nightly" / "GRPO-1", accuracies)
    assert main(["nightly", "--model", "nowhere", "--out", str(tmp_path)]) == code
    assert ("TOO LITTLE" in capsys.readouterr().out) == bool(code)


def test_rows_of_the_tool_show_a_call_and_ask_for_a_product():
    row = real_model.with_tool(0, {"prompt": "What is 37 - 4? Answer with the number alone.", "answer": "33"})
    assert row["answer"] == "148" and "37 * 4?" in row["prompt"][-1]["content"]


def test_a_race_counts_from_the_start_of_the_process():
    curve = [(10.0, 0.0), (12.0, 0.3), (14.0, 0.3), (16.0, 0.6), (18.0, 0.9)]
    assert [reached(curve, level) for level in (0.15, 0.35, 0.55, 0.7)] == [14.0, 16.0, 18.0, None]
    assert reached(curve[:2], 0.1) is None, "one step in three is luck"
    assert area(curve, 20.0) == pytest.approx(2 * (0.3 + 0.3 + 0.6 + 0.9) / 20) and area([], 20.0) == 0


@pytest.mark.slow
@pytest.mark.e2e
def test_runs_go_side_by_side_stop_and_go_on(untrained, tmp_path, capsys):
    short = "trainer.total_training_steps=2 trainer.test_freq=2 data.max_response_length=4 data.val_max_samples=100"
    places = ["--model", untrained, "--out", str(tmp_path), f"{real_model.ROLLOUT}.n=2"]
    command = ["nightly", "--seeds=1,2", "--together=2", *places, *short.split()]
    threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert main(command) == 3
    assert "stopped: GRPO-1 at step 0, GRPO-2 at step 0; call again" in capsys.readouterr().out
    assert main(command) == 1, "two steps teach nothing"
    shown = capsys.readouterr().out
    assert "TOO LITTLE" in shown and "2 run(s) shared a GPU or CPU" in shown
    figures = json.loads((tmp_path / "nightly.json").read_text())
    assert figures["shared_a_gpu"] == ["GRPO-1", "GRPO-2"] and figures["held_out_rows"] == 100
    for run in figures["runs"]:
        assert [*run["accuracy"]] == ["0", "2"] and [*run["reward"]] == ["1", "2"]
    (tmp_path / "nightly" / "GRPO-1" / "finished").unlink()
    with pytest.raises(SystemExit, match="a run with other keys"):
        main([*command, "trainer.balance_batch=False"])
    (tmp_path / "nightly" / "GRPO-1" / "keys.json").unlink()
    with pytest.raises(SystemExit, match=r"ended with exit code 2; .*output\.log ends in:"):
        main([*command, "custom_reward_function.path=nowhere.py"])
