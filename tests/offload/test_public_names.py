"""The package's names are loaded when they are asked for."""

import subprocess
import sys
from importlib import import_module

import pytest

import rlx.offload


def test_every_public_name_comes_from_the_module_that_it_lives_in():
    assert set(rlx.offload._HOMES) == set(rlx.offload.__all__) <= set(dir(rlx.offload))
    for name, home in rlx.offload._HOMES.items():
        assert getattr(rlx.offload, name) is getattr(import_module(f"rlx.offload.{home}"), name)


def test_what_is_no_name_of_it_is_refused_as_ever():
    with pytest.raises(AttributeError, match="has no attribute 'enable'"):
        _ = rlx.offload.enable  # type: ignore[attr-defined]


def test_planning_does_not_load_torch():
    code = "import sys, rlx.offload.plan, rlx.offload.plan.scenario, rlx.offload.plan.explain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
