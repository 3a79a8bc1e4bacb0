"""Every command in README.md and docs/ can be given, and every Python program there is run by a test.

bash reads the blocks of a page and hands each command to this file in place of running it.
"""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from rlx.cli import COMMANDS
from rlx.config.compose.command_line import compose

ROOT = Path(__file__).parents[1]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
KINDS = {
    "bash",
    "python",
    "json",
    "yaml",
    "ini",
    "text",
}  # text: what is printed, pictures, formulas, commands of others

RUN_BY = {  # tests that run the Python of a page
    "README.md": "tests/test_readme.py",
    "docs/activation_offloading.md": "tests/offload/test_docs.py",
    "docs/algorithms.md": "tests/engine/test_objectives.py",
    "docs/environments.md": "tests/examples/test_own_code.py",
    "docs/agents.md": "tests/examples/test_own_code.py",
    "docs/from_trl.md": "tests/test_code_blocks.py",
    "docs/layer_offloading.md": "tests/test_code_blocks.py",
    "docs/planning.md": "tests/offload/plan/test_explain.py",
    "docs/rewards.md": "tests/rewards/test_page.py",
    "docs/rollout.md": "tests/rollout/test_protocol.py",
    "docs/start.md": "tests/test_start_page.py",
}

# Every command that is not bash's own comes here, with \x1f between its words and \x1e behind it; loops and variables are bash's.
RECORD = "command_not_found_handle() { printf '%s\\x1f' \"$@\" >> commands; printf '\\x1e' >> commands; }\n"
ASIDE = {"curl", "chmod", "mkdir", "cat", "sleep", "ray", "tensorboard", "mkdocs"}  # programs of others


def blocks(page: str, kind: str) -> list[str]:
    return [
        re.sub(rf"^{indent}", "", body, flags=re.M) for indent, name, body in BLOCK.findall(PAGES[page]) if name == kind
    ]


def given(page: str, folder: Path) -> list[list[str]]:
    """The commands of a page, as bash reads them. Nothing is run: PATH has nothing."""
    script = RECORD + "\n".join(blocks(page, "bash")).replace(".venv/bin/", "").replace("examples/gsm8k", "gsm8k")
    environment = {"PATH": "/nowhere", "HOME": str(folder)}
    (folder / ".ray").mkdir()
    done = subprocess.run(["/bin/bash"], input=script, text=True, cwd=folder, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split("\x1f")[:-1] for line in (folder / "commands").read_text().split("\x1e")[:-1]]


def inline(page: str) -> list[list[str]]:
    """Commands within a sentence or a table; words with … or NAME are left to the reader."""
    starts = "|".join(f"rlx {name}" for name in COMMANDS)
    found = re.findall(rf"`((?:{starts}|python -m (?:rlx|benchmarks)[\w.]*) [^`]+)`", BLOCK.sub("", PAGES[page]))
    return [[word for word in shlex.split(command) if not re.search("…|NAME", word)] for command in found]


def fault(words: list[str]) -> str | None:
    """What is wrong with a command, or None."""
    match words:
        case (("rlx" | "python"), ("--version" | "--help")):
            return None
        case "rlx", name, *rest:
            return of_module(COMMANDS[name].module, rest) if name in COMMANDS else f"no command {name}"
        case "python", "-c" | "-", *code:
            compile("".join(code), "block", "exec")
            return None
        case (("python" | "torchrun"), *rest) if "-m" in rest:
            module, *arguments = rest[rest.index("-m") + 1 :]
            return of_module(module, arguments) if module.startswith(("rlx", "benchmarks")) else None
        case "python", script, *_ if script.endswith(".py"):
            return None if (ROOT / script).is_file() else f"no file {script}"
        case "pip", "install", *rest:
            return of_pip(rest)
        case "make", target, *variables:
            makefile = (ROOT / "Makefile").read_text()
            unknown = [name for name in variables if not re.search(rf"\$\((if \$\()?{name.split('=')[0]}\b", makefile)]
            return None if re.search(rf"^{target}:", makefile, re.M) and not unknown else f"no {target} or {unknown}"
        case "ray", "job", "submit", *rest:
            return fault(rest[rest.index("--") + 1 :])
        case "taskset", "-c", _, *rest:
            return fault(rest)
        case word, *_ if "=" in word:
            return of_overrides(words)
        case word, *_ if word in ASIDE:
            return None
    return "no test knows this command"


def of_module(module: str, words: list[str]) -> str | None:
    """A program of rlx exists and has the options; keys compose."""
    if find_spec(module) is None:
        return f"no module {module}"
    options = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help"}
    missing = [option for option in options if not re.search(rf"[\" ]{option}\b", source(module))]
    values = {value for option, value in pairwise(words) if option.startswith("--")}
    keys = [word for word in words if re.match(r"[a-z_]+(\.\w+)*=", word) and word not in values]
    return f"{module} has no {missing}" if missing else of_overrides(keys)


def source(module: str, imported: bool = True) -> str:
    """The text of a program and of what it imports by name from rlx."""
    home = ROOT / module.replace(".", "/")
    (file,) = [
        file for file in (home.with_suffix(".py"), home / "__main__.py", home / "__init__.py") if file.is_file()
    ][:1]
    text = file.read_text()
    further = re.findall(r"from ((?:rlx|benchmarks)[\w.]*) import", text) if imported else []
    return "\n".join([text, *(source(name, imported=False) for name in further)])


def of_overrides(words: list[str]) -> str | None:
    faults = compose(words).faults
    return "; ".join(map(str, faults)) or None


def of_pip(words: list[str]) -> str | None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for flag, name in pairwise(words):
        if flag == "-r" and not (ROOT / name).is_file():
            return f"no file {name}"
        wanted = re.findall(r"\w+", name.partition("[")[2]) if flag == "-e" else []
        if not set(wanted) <= set(extras):
            return f"no extra {wanted}"
    return None


@pytest.mark.parametrize("page", PAGES)
def test_commands_can_be_given(page: str, tmp_path: Path):
    commands = inline(page) + (given(page, tmp_path) if blocks(page, "bash") else [])
    wrong = {" ".join(words): why for words in commands if (why := fault([w for w in words if w not in ("...", "…")]))}
    assert wrong == {}


@pytest.mark.parametrize("page", PAGES)
def test_a_block_says_what_it_is(page: str):
    """Only a fence has a language, so only what is fenced is seen by these tests."""
    assert {kind for _, kind, _ in BLOCK.findall(PAGES[page])} <= KINDS
    text = BLOCK.sub("", PAGES[page])
    assert re.findall(r"(?<=\n\n)    (?:python|rlx|pip|make|from|import) .*", text) == []


def test_the_python_of_a_page_is_run_by_a_test():
    assert {page for page in PAGES if blocks(page, "python")} == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert Path(page).name in (ROOT / test).read_text(), f"{test} does not read {page}"


def run(page: str, names: dict[str, object], **replaced: str) -> None:
    for program in blocks(page, "python"):
        for old, new in replaced.items():
            program = program.replace(old, new)
        exec(program, names)


def test_frozen_weights_stream_as_the_page_says(untrained: str):
    model = AutoModelForCausalLM.from_pretrained(untrained)
    run("docs/layer_offloading.md", {"model": model})
    assert not any(weight.requires_grad for weight in model.parameters())


@pytest.mark.slow
def test_offloading_works_in_a_run_of_trl(untrained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("trl", reason="TRL is not installed")
    small = {"max_steps=2": "max_steps=1, max_completion_length=8, use_cpu=True", '"out"': repr(str(tmp_path))}
    run("docs/from_trl.md", {}, **{"Qwen/Qwen2.5-0.5B-Instruct": untrained}, **small)
    printed = capsys.readouterr().out
    assert re.search(r"^offloaded .*, recomputed ", printed, re.MULTILINE)
    assert re.search(r"^after forward at most [1-9]\d* bytes were off the device, now 0$", printed, re.MULTILINE)
    assert float(re.search(r"^largest gradient (.*)$", printed, re.MULTILINE)[1]) > 0
    assert "gradients equal True" in printed


def test_data_in_the_pages_can_be_read():
    def documents() -> Iterator[object]:
        for page in PAGES:
            yield from map(yaml.safe_load, blocks(page, "yaml"))
            yield from (yaml.safe_load(line) for block in blocks(page, "json") for line in block.splitlines())

    assert all(isinstance(document, dict) for document in documents())
