import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "offload_plain_torch.py"


def test_losses_are_equal_and_the_layer_inputs_left_the_device():
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "equal to those without offloading: True" in done.stdout
    moved = re.search(r"^(\d+) MiB left the device in each step", done.stdout, re.MULTILINE)
    # Six layers, each with an input of 16 x 64 x 256 fp32 numbers, which is 1 MiB; the engine may let the last one stay.
    assert moved is not None and 5 <= int(moved[1]) <= 6, done.stdout
