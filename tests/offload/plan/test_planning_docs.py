"""docs/planning.md says what the code does."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()


def test_the_code_runs(capsys):
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    assert "x plain" in capsys.readouterr().out


def test_the_note_stands_where_the_page_says():
    note, file = re.search(r"Note\s+\[(.*?)\] in\s+`(.*?)`", PAGE).groups()
    assert f"Note [{note}]\n" in (Path(__file__).parents[3] / file).read_text()
