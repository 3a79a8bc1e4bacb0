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
    offloaded, unit = re.search(
        r"^offloaded ([\d.]+) ([KMG]B), .* recomputed [\d.]*[1-9]", done.stdout, re.MULTILINE
    ).groups()
    # In each of five steps the inputs of the layers: all of them but the first one's in plain_torch, which wants no gradient.
    steps_layers, at_least = (5 * 5, 1 << 20) if name == "plain_torch" else (5 * 4, 64 * 1024)
    assert float(offloaded) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[unit] >= 0.99 * steps_layers * at_least, done.stdout
    assert "off the device now 0 bytes" in done.stdout


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("offload_*.py")), ids=lambda path: path.stem)
def test_of_rlx_an_example_imports_offload_alone(example: Path):
    modules = re.findall(r"^\s*(?:from|import) (rlx\b[\w.]*)", example.read_text(), re.MULTILINE)
    assert set(modules) == {"rlx.offload"}
