"""The examples of docs/cluster.md for a run that nobody watches: they parse, and their commands compose."""

import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rlx.config.compose.command_line import compose

PAGE = (Path(__file__).parents[1] / "docs/cluster.md").read_text().partition("## A run that nobody watches")[2]


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def systemd_unit() -> configparser.ConfigParser:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(block("ini"))
    return unit


def commands() -> dict[str, str]:
    return {
        "systemd": systemd_unit()["Service"]["ExecStart"],
        "job": block("bash").replace("\\\n", " ").partition(" -- ")[2].partition("&&")[0],
        "RayJob": yaml.safe_load(block("yaml"))["spec"]["entrypoint"],
    }


@pytest.mark.parametrize("of", ["systemd", "job", "RayJob"])
def test_the_command_composes_and_resumes(of: str):
    words = shlex.split(commands()[of])
    composed = compose(words[words.index("rlx.main_ppo") + 1 :])
    assert not composed.faults, composed.faults
    assert composed.config.trainer.resume_mode == "auto" and composed.config.trainer.save_freq > 0
