"""Turns beside other libraries in a small form; verl wants other packages than the tests have."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

SMALL = (
    "from rlx.offload.plan.shapes import SHAPES; SHAPES['tiny'] |= {'num_attention_heads': 2, 'head_dim': 32};"  # for vLLM
    "from benchmarks.turns_peers import main; raise SystemExit(main())"
)
SIZES = "--shape tiny --trajectories 8 --tokens 12 --turns 3 --max-num-seqs 4 --tool-s 0.05 --processes 1 --rounds 1"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rlx", "TRL"])
def test_each_way_samples_all_tokens(way, tmp_path):
    if way != "rlx" and find_spec(way.lower()) is None:
        pytest.skip(f"{way} is not installed")
    options = [*SIZES.split(), "--device", "cpu", "--gpu-memory-utilization", "0.1", "--way", way]
    command = [sys.executable, "-c", SMALL, *options, "--json", str(tmp_path / "figures.json")]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    )
    if way == "TRL" and "'Parameter' object has no attribute 'weight_loader'" in ran.stderr:
        pytest.skip("on this processor vLLM packs its weights, and TRL cannot send it new ones")
    assert ran.returncode == 0, ran.stderr[-3000:]  # a trajectory with fewer tokens is an error
    figures = json.loads((tmp_path / "figures.json").read_text())["tokens/s"]
    assert figures["instant tools"][0] > 0 and figures["slow tools"][0] > 0
