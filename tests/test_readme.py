"""The commands and the program of README.md; its links are tested in test_docs.py."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rlx.cli import COMMANDS as COMMANDS_OF_RLX
from rlx.config.check.validate import check
from rlx.config.compose.command_line import compose
from rlx.config.machine import Machine

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "README.md").read_text()
SHELL, PYTHON = (re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL) for kind in ("bash", "python"))
COMMANDS = [line for block in SHELL for line in block.replace("\\\n", " ").splitlines()]
CPU = Machine(gpus=0, cpus=2, packages=frozenset())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.split()[:4]))
def test_a_command_can_be_given(command):
    match shlex.split(command, comments=True):
        case "make", target, *variables:
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)
            for name, value in (variable.split("=", 1) for variable in variables):
                assert f"$({name})" in makefile or f"$(if $({name})" in makefile
                if name == "ARGS":
                    assert not check(compose(value.split()), CPU).faults
        case ((".venv/bin/python" | "python"), "-m", "rlx.main_ppo", *arguments):
            overrides = [argument for argument in arguments if not argument.startswith("--")]
            composed = compose(overrides)
            if "trainer.n_gpus_per_node=8" in overrides:  # its data and model are not here
                assert composed.config == compose(["experiment=gsm8k_grpo_8gpu"]).config and not composed.faults
            else:
                assert not check(composed, CPU).faults
        case ((".venv/bin/python" | "python"), "-m", module, *_):
            assert find_spec(module)
        case ".venv/bin/rlx", "--help":
            pass
        case ".venv/bin/rlx", name, *arguments:
            assert name in COMMANDS_OF_RLX and not check(compose(arguments), CPU).faults
        case "pip", "install", "-r", file:
            assert (ROOT / file).is_file()
        case other:
            pytest.fail(f"no test of {other}")


def test_the_program_runs(untrained, capsys):
    (program,) = PYTHON
    exec(program, {"model": AutoModelForCausalLM.from_pretrained(untrained)})
    assert "offloaded_bytes" in capsys.readouterr().out
