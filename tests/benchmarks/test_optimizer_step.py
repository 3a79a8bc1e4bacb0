"""The benchmark of whole steps; device memory itself is measured on a GPU alone."""

import pytest
import torch

from benchmarks.common import write_random_model
from benchmarks.optimizer_step import STEP_PHASES, TIMES, in_own_process


@pytest.mark.slow
def test_a_step_of_each_kind_is_watched_from_forward_to_optimizer(model_folder):
    given = ["--tokens=64", "--rounds=3", "--lossy", f"--folder={model_folder}"]
    ours, theirs = (in_own_process([f"--modes={mode}", *given]) for mode in ("rlx", "checkpointing"))
    for figures in ours, theirs:
        assert min(figures["rounds"]) <= figures["seconds"] == sorted(figures["rounds"])[1] <= max(figures["rounds"])
        assert min(figures["rounds"]) > 0 and set(figures["peaks"]) == set(STEP_PHASES)
        static = figures["static"]
        # AdamW keeps two numbers and a count for each weight, all in bf16 but the count.
        assert static["gradients"] == static["weights"] > 0
        assert 2 * static["weights"] < static["optimizer"] < 2.5 * static["weights"]
        assert min(figures["times"][name] for name in TIMES) > 0
    assert ours["times"]["hand-over"] > 0 and theirs["times"]["hand-over"] is None
    assert ours["static"]["weights"] == theirs["static"]["weights"]
    assert ours["host_bytes"] == 0, "no layer input is as large as min_bytes"
    assert theirs["host_bytes"] is None


@pytest.mark.nightly
def test_two_processes_share_a_sequence_and_the_state(model_folder):
    arguments = ["--modes=rlx", "--tokens=65", "--optimizer-state=device", f"--folder={model_folder}"]
    alone, shared = (in_own_process([*arguments, f"--gpus={count}"]) for count in (1, 2))
    for part in ("weights", "gradients"):
        assert shared["static"][part] == alone["static"][part] / 2


@pytest.mark.parametrize("save", ["boundary", "attention"])
@pytest.mark.gpu
def test_on_a_gpu_the_peaks_are_those_of_the_phases(save, tmp_path):
    arguments = ["--shape=tiny", "--tokens=4096", "--modes=rlx", f"--save={save}"]
    write_random_model(tmp_path, "tiny", torch.device("cuda"), max_position_embeddings=4096)
    found = in_own_process([*arguments, f"--folder={tmp_path}"])
    assert "error" not in found, found["error"]
    assert min(found["peaks"].values()) > found["static"]["weights"] > 0
    assert sum(found["times"][name] for name in TIMES) == pytest.approx(found["seconds"], rel=0.2)
    assert max(found["peaks"].values()) == max(found["peaks"][name] for name in ("head", "backward", "step"))
