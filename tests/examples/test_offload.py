import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


# In a process of its own, for trainers set environment variables and numbers of threads.
@pytest.mark.parametrize(
    "name", ["plain_torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hf_trainer", "trl"))]
)
def test_trained_weights_are_equal_and_layer_inputs_left_the_device(name: str):
    if name == "trl":
        pytest.importorskip("trl", reason="TRL is not installed")
    command = [sys.executable, str(EXAMPLES / f"offload_{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "weights equal to those without offloading: True" in done.stdout
    stats = dict(re.findall(r"(\w+)=([\d.]+)", done.stdout))
    # In each of five steps the inputs of the layers: all of them but the first one's in plain_torch, which wants no gradient.
    steps_layers, at_least = (5 * 5, 1 << 20) if name == "plain_torch" else (5 * 4, 64 * 1024)
    assert int(stats["offloaded_bytes"]) >= steps_layers * at_least, done.stdout
    assert int(stats["held_bytes"]) == 0
    assert float(stats["recomputed_ms"]) > 0
