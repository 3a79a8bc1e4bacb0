"""docs/planning.md says what the code does."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()


def test_the_code_runs(capsys):
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    assert "x plain" in capsys.readouterr().out
