"""The package's names are loaded when they are asked for."""

import subprocess
import sys

import rlx.offload


def test_every_public_name_is_there():
    assert all(getattr(rlx.offload, name).__name__ == name for name in rlx.offload.__all__)


def test_planning_and_options_do_not_load_torch():
    code = "import sys, rlx.offload.plan.run_memory, rlx.offload.plan.explain; rlx.offload.OffloadOptions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
