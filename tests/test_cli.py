"""The command `rlx`: it starts the modules, names what is missing, and imports nothing heavy itself."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlx import __version__, cli

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_help_and_version_import_no_package(capsys: pytest.CaptureFixture[str]):
    program = (
        "import sys; from rlx.cli import main; main(['--help']); main(['--version']);"
        "sys.exit(bool({'torch', 'ray', 'transformers', 'hydra'} & set(sys.modules)))"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in cli.COMMANDS if find_spec(cli.COMMANDS[name].module))
    assert f"rlx {__version__}\n" in done.stdout and "torch " in done.stdout


@pytest.mark.parametrize("module", ["rlx.cli check", "rlx.cli plan --model tiny", "rlx.driver --check"])
def test_a_working_folder_that_is_gone_is_named(tmp_path: Path, module: str):
    script = f"cd {tmp_path} && rmdir {tmp_path} && {sys.executable} -m {module}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2 and "the working folder is gone" in done.stderr and "Traceback" not in done.stderr


def test_check_is_the_driver_with_its_option():
    done = python("-m", "rlx.cli", "check", "trainer.device=cpu", "trainer.seed=x")
    assert done.returncode == 2 and "trainer.seed" in done.stderr


@pytest.mark.slow
def test_messages_name_the_program_as_it_was_called():
    for called, name in ((("-m", "rlx.cli", "report"), "rlx report"), (("-m", "rlx.trainer.report"), None)):
        done = python(*called, "no_such_folder")
        assert done.returncode == 2
        assert done.stderr.startswith(f"{name or 'python -m rlx.trainer.report'}: no_such_folder: ")
    program = Path(sys.executable).with_name("rlx")
    for path, name in ((program.parent, "rlx"), ("/nowhere", program)):
        environment = {**os.environ, "PATH": str(path)}
        done = subprocess.run([program, "view", "no_such_folder"], capture_output=True, text=True, env=environment)
        assert done.stderr.startswith(f"{name} view: no_such_folder: "), "by its path where no shell would find it"
    for command, more in (("view", []), ("export", ["out"])):
        done = python("-m", "rlx.cli", command, "no_such_folder", *more)
        assert done.returncode == 2
        assert done.stderr.startswith(f"rlx {command}: no_such_folder: ")


def test_an_example_of_the_help_is_one_command_and_every_exit_code_is_named():
    text = python("-m", "rlx.cli", "train", "--help").stdout
    assert not re.search(r"=\S+ {2,}data\.", text) and "mine.jsonl \\\n    data.answer_key" in text
    documented = (ROOT / "docs/commands.md").read_text().partition("Exit codes: ")[2].partition("\n\n")[0]
    codes = re.findall(r"\d+", documented)
    assert len(codes) == 6 and codes == re.findall(r"\d+", text.partition("Exit code: ")[2].partition("\n\n")[0])


@pytest.mark.parametrize("words", ["--help", "check --tree trainer.device=cpu"])
def test_a_reader_that_ends_first_leaves_no_traceback(words: str):
    command = f"set -o pipefail; {sys.executable} -m rlx.cli {words} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "Error" not in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["trian"]) == 2
    assert re.search(r"got 'trian', expected one of train, check", capsys.readouterr().err)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, capsys: pytest.CaptureFixture[str]):
    real = cli.find_spec
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in ("ray", "hydra") else real(name))
    assert cli.main(["train"]) == 2
    assert f"lacks hydra, ray; pip install -e '{ROOT}[train]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["view", "report"])
def test_a_command_starts_with_no_more_than_the_packages_that_it_needs(name: str, tmp_path: Path):
    module, needs = cli.COMMANDS[name].module, {*cli.COMMANDS[name].needs}
    named = {re.match(r"[\w-]+", each)[0] for each in PYPROJECT["optional-dependencies"]["train"]}
    of_others = {"numpy"} if "matplotlib" in needs else set()
    blocked = {*named, "yaml", "hydra", "omegaconf", "huggingface_hub", "math_verify"} - needs - of_others
    program = (
        f"import runpy, sys; sys.modules |= dict.fromkeys({sorted(blocked)}); sys.argv = ['it', 'nowhere'];"
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    done = python("-c", program)
    assert done.returncode == 2 and "nowhere" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_every_command_needs_packages_of_its_extra():
    extras = {"hydra": "hydra-core"}
    assert [re.match(r"\w+", each)[0] for each in PYPROJECT["dependencies"]] == ["torch"], "what rlx.offload imports"
    for command in cli.COMMANDS.values():
        extra = PYPROJECT["optional-dependencies"]
        installed = " ".join(package for name in command.extra.split(",") for package in extra[name])
        assert all(extras.get(name, name) in installed for name in command.needs)
