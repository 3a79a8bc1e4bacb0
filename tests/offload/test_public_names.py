"""The package's names are loaded when they are asked for."""

import subprocess
import sys
from importlib import import_module

import rlx.offload


def test_every_public_name_comes_from_the_module_that_it_lives_in():
    assert set(rlx.offload._HOMES) == set(rlx.offload.__all__) <= set(dir(rlx.offload))
    for name, home in rlx.offload._HOMES.items():
        assert getattr(rlx.offload, name) is getattr(import_module(f"rlx.offload.{home}"), name)


def test_planning_and_options_do_not_load_torch():
    code = "import sys, rlx.offload.plan.run_memory, rlx.offload.plan.explain; rlx.offload.OffloadOptions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
