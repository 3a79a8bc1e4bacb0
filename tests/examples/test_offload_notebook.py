"""The notebook's cells run from top to bottom; they check themselves."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "offload_notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells), "kept without outputs"
    space: dict = {}
    for cell in cells:
        exec("".join(cell["source"]), space)
    assert " MB left the device" in capsys.readouterr().out
    assert "nothing left the device" in caplog.text
