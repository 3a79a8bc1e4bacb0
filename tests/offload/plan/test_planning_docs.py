"""docs/planning.md says what the code does."""

import re
from pathlib import Path

import pytest

from rlx.offload.plan.hardware import PROFILES

PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()


def section(title):
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title, columns):
    """Cells of the tables under a title that have so many columns."""
    bodies = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", section(title), re.MULTILINE)
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for body in bodies for line in body.splitlines()]
    return [line for line in lines if len(line) == columns]


def test_every_machine_stands_there():
    table = {name.strip("`"): [float(cell) for cell in cells] for name, *cells in rows("Machines", 7)}
    assert list(table) == list(PROFILES)
    for name, hardware in PROFILES.items():
        rates = (hardware.link_bytes_per_s, hardware.link_both_bytes_per_s)
        known = (hardware.peak_flops / 1e12, hardware.memory_bytes_per_s / 1e12, hardware.device_bytes / 1e9)
        assert table[name] == pytest.approx(
            [*known, *(rate / 1e9 for rate in rates), hardware.host_bytes / 1e9], abs=0.06
        )
        assert hardware.link_both_bytes_per_s <= hardware.link_bytes_per_s


def test_the_code_runs(capsys):
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    assert "x plain" in capsys.readouterr().out


def test_the_note_stands_where_the_page_says():
    note, file = re.search(r"Note\s+\[(.*?)\] in\s+`(.*?)`", PAGE).groups()
    assert f"Note [{note}]\n" in (Path(__file__).parents[3] / file).read_text()
