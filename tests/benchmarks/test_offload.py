"""The benchmark's command: what it measures, writes and refuses. Figures are checked against each other, not for size."""

import contextlib
import gc
import json
import statistics

import pytest
import torch
from transformers import GPT2Config

from benchmarks.offload import modes
from benchmarks.offload.__main__ import main
from benchmarks.offload.models import Case, build, read_shape
from benchmarks.offload.modes import MODE_DESCRIPTIONS, EnabledMode, Mode, parse_mode
from rlx.offload import OffloadOptions

CPU = torch.device("cpu")
TINY = ("--device", "cpu", "--model", "tiny", "--case", "16x3", "--rounds", "3", "--dtype", "float32")


@pytest.fixture
def run_benchmark(tmp_path, capsys):
    """`run_benchmark(*arguments)`: what it printed and its results file."""

    def run(*arguments):
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 0
        return capsys.readouterr().out, json.loads((tmp_path / "out" / "results.json").read_text())

    return run


@pytest.fixture
def refusal(tmp_path, capsys, monkeypatch):
    """`refusal(*arguments)`: the message with which the command ends before it measures anything."""
    monkeypatch.setattr("benchmarks.offload.measure.CaseRun", None)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["--device", "cpu", "--out", str(tmp_path), *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

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


def test_streaming_needs_frozen_weights_and_a_number(refusal):
    assert "quantised weights cannot be trained" in refusal("--quantization", "nf4")
    assert "resident= and axolotl stream frozen weights" in refusal("--modes", "boundary:resident=0")
    assert "resident= and axolotl stream frozen weights" in refusal("--modes", "axolotl")
    assert "got resident=x" in refusal("--frozen", "--modes", "boundary:resident=x")


def test_a_run_writes_table_figures_and_picture(run_benchmark, tmp_path):
    printed, results = run_benchmark(*TINY, "--modes", "plain,checkpointing,boundary,all,boundary:prefetch_layers=0")
    rows = rows_of(results)
    assert list(rows) == ["plain", "checkpointing", "boundary", "all", "boundary:prefetch_layers=0"]
    for name, row in rows.items():
        assert row["note"] is None and row["layers"] == 3 and len(row["step_s"]) == 3
        assert row["median_s"] == statistics.median(row["step_s"])
        assert row["min_s"] == min(row["step_s"]) and row["max_s"] == max(row["step_s"])
        for base in ("plain", "checkpointing"):
            assert row[f"ratio_to_{base}"] == row["median_s"] / rows[base]["median_s"]
        assert row["peak_bytes"] is None  # the CPU has no device memory
        assert f"\n{name} " in printed
    # The inputs of three layers: 16 tokens of width 64, in 4 bytes.
    boundary = rows["boundary"]
    assert boundary["offloaded_bytes_per_step"] == boundary["held_bytes"] == 3 * 16 * 64 * 4
    assert rows["all"]["offloaded_bytes_per_step"] > boundary["offloaded_bytes_per_step"]
    assert boundary["stall_share"] == pytest.approx(boundary["stall_ms_per_step"] / 1e3 / boundary["median_s"])
    assert boundary["recomputed_ms_per_step"] > 0 == rows["all"]["recomputed_ms_per_step"]
    assert rows["plain"]["offloaded_bytes_per_step"] is None
    host = results["cases"][0]["host"]
    assert host["allocations_after_warm_up"] == 0 and "allocations after warm-up: 0" in printed
    assert host["largest_held_bytes"] == rows["all"]["held_bytes"] <= host["reserved_bytes"]
    assert torch.__version__.startswith(results["torch"]) and "--rounds 3" in results["command"]
    assert results["options"]["boundary:prefetch_layers=0"]["prefetch_layers"] == 0
    assert (tmp_path / "out" / "16x3.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "out" / "16x3.png") in printed.splitlines()[-1]


def test_plain_with_fewer_layers_is_scaled_and_says_so(run_benchmark, tmp_path):
    printed, results = run_benchmark(
        *TINY, "--case", "8x2", "--case", "4", "--modes", "plain,boundary", "--plain-layers", "2", "--no-picture"
    )
    assert [(case["tokens"], case["layers"]) for case in results["cases"]] == [(16, 3), (8, 2), (4, 8)]
    first, second = (rows_of(results, number)["plain"] for number in (0, 1))
    assert (first["layers"], first["note"]) == (2, "scaled from 2 layers")
    assert (second["layers"], second["note"]) == (2, None)
    assert "plain: scaled from 2 layers" in printed
    assert not list((tmp_path / "out").glob("*.png"))


def test_a_peer_that_fails_is_a_row(run_benchmark, monkeypatch):
    class Failing:
        """Raises in the step with that number."""

        def __init__(self, number):
            self.left = number

        def __call__(self, model):
            return EnabledMode(around_step=self.around)

        @contextlib.contextmanager
        def around(self):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("device on fire\nand more")
            yield

    monkeypatch.setitem(modes.PEERS, "trl", Failing(0))
    monkeypatch.setitem(modes.PEERS, "trl-all", Failing(3))
    printed, results = run_benchmark(*TINY, "--modes", "trl,plain,trl-all", "--no-picture")
    rows = rows_of(results)
    for name in ("trl", "trl-all"):
        assert rows[name]["note"] == "failed: RuntimeError: device on fire"
        assert rows[name]["median_s"] is None and rows[name]["ratio_to_plain"] is None
        assert f"{name}: failed: RuntimeError: device on fire\n" in printed
    assert len(rows["plain"]["step_s"]) == 3


@pytest.mark.slow
def test_processes_share_the_layers_with_fsdp2(run_benchmark):
    _, results = run_benchmark(*TINY, "--modes", "checkpointing,boundary", "--gpus", "2")
    rows = rows_of(results)
    assert results["processes"] == 2
    assert rows["boundary"]["note"] is None and len(rows["boundary"]["step_s"]) == 3
    # Each process has a sequence of its own; the figures are the first one's.
    assert rows["boundary"]["held_bytes"] == 3 * 16 * 64 * 4


def test_the_disk_tier(run_benchmark, tmp_path):
    printed, results = run_benchmark(
        *TINY, "--modes", "checkpointing,boundary", "--tier", "disk", "--directory", str(tmp_path), "--no-picture"
    )
    boundary = rows_of(results)["boundary"]
    assert boundary["note"] is None and boundary["disk_gb_per_s"] > 0
    assert results["cases"][0]["host"]["disk_reserved_bytes"] >= boundary["held_bytes"] == 3 * 16 * 64 * 4
    assert " GB on disk reserved" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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


@pytest.mark.parametrize("layers", [1, 5])
def test_a_local_configuration_is_a_model(tmp_path, layers):
    GPT2Config(vocab_size=64, n_embd=16, n_head=2, n_layer=2, n_positions=8).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        model = build(read_shape(str(path)), Case(16, layers), CPU, torch.float32)
        assert model.config.num_hidden_layers == layers
    assert model(input_ids=torch.zeros(1, 16, dtype=torch.int64)).last_hidden_state.shape == (1, 16, 16)


def test_a_mode_takes_options_of_its_own():
    mode = parse_mode("boundary:prefetch_layers=2:pin_memory=false", {"min_bytes": 5, "prefetch_layers": 7})
    options = OffloadOptions(save="boundary", min_bytes=5, prefetch_layers=2, pin_memory=False)
    assert mode == Mode("boundary:prefetch_layers=2:pin_memory=false", "boundary", options)
    assert parse_mode("plain:tile=auto", {}) == Mode("plain:tile=auto", "plain", None, 0)
    assert parse_mode("all:min_bytes=5:tile=9", {}).tile == 9
    streamed = parse_mode("boundary:tile=9:resident=2:weights_in=/disk", {})
    assert (streamed.tile, streamed.resident, streamed.weights_in) == (9, 2, "/disk")
    assert set(MODE_DESCRIPTIONS) == {*modes.OWN_MODES, *modes.PEERS}


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "qwen9"), "'qwen9' is neither a named shape nor a local configuration; choose one of tiny, qwen2"),
        (("--case", "8192x0"), "got '8192x0', expected TOKENSxLAYERS, such as 8192x28, or TOKENS"),
        (("--overhead", "--model", "tiny"), "--overhead has a model and modes of its own, but got --device, --model"),
        (("--modes", "plain,boundry"), "mode 'boundry' does not exist; choose from plain, checkpointing, selective"),
        (("--modes", "plain:min_bytes=1"), "only boundary, attention, auto, all take options"),
        (("--modes", "plain:tile=0"), "got tile=0, expected auto or tokens, at least 1"),
        (("--modes", "boundary:min_byte=1"), "got 'min_byte=1', expected option=value with an option of Offload"),
        (("--modes", "boundary:min_bytes=many"), "OffloadOptions.min_bytes: got 'many'"),
        (("--modes", "all:prefetch_layers=-1"), "OffloadOptions.prefetch_layers: got -1, expected an integer >= 0"),
        (("--tier", "disk"), "have no usable folder: got directory=None"),
        (("--tier", "disk", "--directory", "/no/such/folder"), "cannot use the directory (No such file or directory)"),
        (("--rounds", "0"), "got '0', expected a whole number of at least 1"),
        (("--out", "/dev/null/folder"), "the folder /dev/null/folder cannot be made"),
    ],
)
def test_bad_arguments_end_the_command_at_once(refusal, arguments, message):
    assert message in refusal(*arguments)


def test_a_file_that_is_no_configuration(refusal, tmp_path):
    file = tmp_path / "some.json"
    file.write_text("[1]")
    assert "it has no 'model_type'" in refusal("--model", str(file))
    file.write_text("{")
    assert "is not JSON" in refusal("--model", str(file))


# On a GPU


@pytest.fixture
def clean_device():
    """Free what cycles of earlier tests hold: if they were collected during a step, it would seem to take less memory."""
    gc.collect()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_measures_memory(clean_device, run_benchmark):
    _, results = run_benchmark(
        "--model", "tiny", "--case", "4096x6", "--rounds", "2", "--modes", "plain,checkpointing,boundary,save-on-cpu"
    )
    rows = rows_of(results)
    assert all(row["note"] is None for row in rows.values())
    assert rows["boundary"]["peak_bytes"] < rows["plain"]["peak_bytes"]
    for row in rows.values():
        assert max(row["curve"]["used_bytes"]) == pytest.approx(row["peak_bytes"], rel=0.1)
