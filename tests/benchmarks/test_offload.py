"""The benchmark's command: what it measures, writes and refuses. Figures are checked against each other, not for size."""

import gc
import json
import statistics

import pytest
import torch

from benchmarks.offload.__main__ import main
from benchmarks.offload.models import Case, build, read_shape
from benchmarks.offload.modes import parse_mode

CPU = torch.device("cpu")
TINY = ("--device", "cpu", "--model", "tiny", "--case", "16x3", "--rounds", "3", "--dtype", "float32")


@pytest.fixture
def run_benchmark(tmp_path, capsys):
    """`run_benchmark(*arguments)`: what it printed and its results file."""

    def run(*arguments):
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
        return capsys.readouterr().out, json.loads((tmp_path / "out" / "results.json").read_text())

    return run


def rows_of(results, number=0):
    return {row["mode"]: row for row in results["cases"][number]["rows"]}


# A run


def test_frozen_weights_stream_beside_resident_ones(run_benchmark):
    pytest.importorskip("peft", reason="the adapters are peft's, no dependency of rlx.offload")
    arguments = (*TINY[:-4], "--rounds", "1", "--dtype", "float32", "--no-picture")
    printed, results = run_benchmark(
        *arguments, "--frozen", "--modes", "checkpointing,boundary,boundary:resident=1,axolotl"
    )
    rows = rows_of(results)
    assert rows.pop("axolotl")["note"].startswith("left out: axolotl ")  # not installed, or no CUDA
    assert all(row["note"] is None for row in rows.values())
    assert rows["boundary"]["streamed_bytes"] is None
    # q, k, v, o and three maps of the MLP, in two of three layers.
    assert rows["boundary:resident=1"]["streamed_bytes"] == 2 * 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert "streamed GB" in printed


def test_a_run_writes_table_figures_and_picture(run_benchmark, tmp_path):
    printed, results = run_benchmark(*TINY, "--modes", "plain,checkpointing,boundary,all,boundary:prefetch_layers=0")
    rows = rows_of(results)
    assert list(rows) == ["plain", "checkpointing", "boundary", "all", "boundary:prefetch_layers=0"]
    for name, row in rows.items():
        assert row["note"] is None and row["layers"] == 3 and len(row["step_s"]) == 3
        assert row["median_s"] == statistics.median(row["step_s"])
        for base in ("plain", "checkpointing"):
            assert row[f"ratio_to_{base}"] == row["median_s"] / rows[base]["median_s"]
        assert row["peak_bytes"] is None  # the CPU has no device memory
        assert f"\n{name} " in printed
    # The inputs of three layers: 16 tokens of width 64, in 4 bytes.
    boundary = rows["boundary"]
    assert boundary["offloaded_bytes_per_step"] == boundary["held_bytes"] == 3 * 16 * 64 * 4
    assert rows["all"]["offloaded_bytes_per_step"] > boundary["offloaded_bytes_per_step"]
    assert boundary["recomputed_ms_per_step"] > 0 == rows["all"]["recomputed_ms_per_step"]
    assert rows["plain"]["offloaded_bytes_per_step"] is None
    host = results["cases"][0]["host"]
    assert host["allocations_after_warm_up"] == 0 and "allocations after warm-up: 0" in printed
    assert host["largest_held_bytes"] == rows["all"]["held_bytes"] <= host["reserved_bytes"]
    assert torch.__version__.startswith(results["torch"]) and "--rounds 3" in results["command"]
    assert (tmp_path / "out" / "16x3.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "out" / "16x3.png") in printed.splitlines()[-1]


# Models and modes


def test_every_mode_computes_the_same_gradients():
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (1, 16))

    def gradients(name):
        model = build(read_shape("tiny"), Case(16, 3), CPU, torch.float32)
        prepared = parse_mode(name, {"min_bytes": 0}).prepare(model)
        with prepared.around_step():
            with prepared.around_forward():
                output = model(input_ids=ids).last_hidden_state
            output.backward(torch.ones_like(output))
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients("plain")
    for name in ("checkpointing", "selective", "boundary", "attention", "all", "save-on-cpu"):
        assert all(map(torch.equal, expected, gradients(name))), name
    for name in ("plain:tile=5", "checkpointing:tile=5", "attention:tile=5"):
        for gradient, found in zip(expected, gradients(name), strict=True):
            torch.testing.assert_close(found, gradient, rtol=0, atol=1e-5 * gradient.abs().max().item())


# On a GPU


@pytest.fixture
def clean_device():
    """Free what cycles of earlier tests hold: if they were collected during a step, it would seem to take less memory."""
    gc.collect()


@pytest.mark.gpu
def test_a_run_on_a_gpu_measures_memory(clean_device, run_benchmark):
    _, results = run_benchmark(
        "--model", "tiny", "--case", "4096x6", "--rounds", "2", "--modes", "plain,checkpointing,boundary,save-on-cpu"
    )
    rows = rows_of(results)
    assert all(row["note"] is None for row in rows.values())
    assert rows["boundary"]["peak_bytes"] < rows["plain"]["peak_bytes"]
    for row in rows.values():
        assert max(row["curve"]["used_bytes"]) == pytest.approx(row["peak_bytes"], rel=0.1)
