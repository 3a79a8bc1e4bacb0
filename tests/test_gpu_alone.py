"""The modules `alone_*.py`, each in a process of its own: they build vLLM beside an engine in the process of the tests.

vLLM keeps the process group of all for as long as the process lives, and what sleeps needs an allocator that nothing else
has used; tests before and after them make and end groups of their own. To run one by itself, name its file to pytest.
"""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
TIMEOUT_S = 1500


@pytest.mark.gpu
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("module", sorted(FOLDER.glob("*/alone_*.py")), ids=lambda path: path.stem)
def test_module_in_a_process_of_its_own(module):
    gc.collect()
    torch.cuda.empty_cache()  # it measures the device's memory
    command = [sys.executable, "-m", "pytest", "-n0", str(module)]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
