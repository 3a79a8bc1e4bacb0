"""Links, files, names and commands in README.md and docs/ exist."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlx.offload
from rlx.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []


def test_the_files_of_the_map_exist():
    """A path may begin at any folder: `storage/tiers.py`."""
    page = ARCHITECTURE.read_text()
    named = {*re.findall(r"[\w/.]*\w\.(?:py|md)\b", page), *re.findall(r"`([\w/]+)/`", page)}
    assert len(named) > 60
    paths = [
        f"/{path.relative_to(ROOT)}"
        for top in ("rlx", "benchmarks", "tests", "docs")
        for path in (ROOT / top, *(ROOT / top).rglob("*"))
    ]
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in paths)] == []


def test_the_names_of_the_map_exist():
    source = "\n".join(file.read_text() for part in ("rlx", "benchmarks") for file in (ROOT / part).rglob("*.py"))
    words = set(re.findall(r"\w+", source)) | set(re.findall(r"\w+", (ROOT / "Makefile").read_text()))
    code = re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`", ARCHITECTURE.read_text())
    names = {part for name in code if not name.endswith((".py", ".md", ".jsonl")) for part in name.split(".")}
    assert sorted(names - words) == []


def test_the_site_has_every_page_once():
    named = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in PAGES[2:])


def test_the_api_page_has_every_public_name_of_offload():
    named = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {f"rlx.offload.{name}" for name in rlx.offload.__all__} <= set(named)
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.import_module(name)


def test_the_page_of_commands_has_every_command():
    rows = re.findall(r"^\| `rlx (\w+)` \| `([\w.]+)` \| (.*) \|$", (ROOT / "docs" / "commands.md").read_text(), re.M)
    assert rows == [(name, command.module, command.help) for name, command in COMMANDS.items()]


def test_the_site_builds_without_a_warning(tmp_path: Path):
    pytest.importorskip(
        "mkdocs", reason="requirements/docs.txt is not installed; continuous integration has a job for it"
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "files/examples/offload_trl.py").is_file()
