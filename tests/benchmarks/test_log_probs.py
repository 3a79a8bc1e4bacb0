import json

import pytest
import torch

from benchmarks.log_probs import forms, main
from rlx.models import head_log_probs

SMALL = ["--vocabulary", "50", "--width", "8", "--rounds", "1", "--device", "cpu", "--dtype", "fp32"]


def test_the_command_prints_a_table_and_writes_the_same_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(head_log_probs, "HEAD_CHUNK_BYTES", head_log_probs.HEAD_CHUNK_BYTES)
    path = tmp_path / "figures.json"
    main([*SMALL, "--tokens", "4", "9", "--chunk-bytes", "600", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["tokens"], row["form"]) for row in rows if row["form"] != "liger"] == [
        (tokens, form) for tokens in (4, 9) for form in ("naive", "logits", "chunked")
    ]
    printed = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[:3] for line in printed] == [
        [str(row["tokens"]), row["form"], f"{row['seconds'] * 1000:.1f}"] for row in rows
    ]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_every_form_computes_the_same(with_entropy):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    ids = torch.randint(30, (6,))
    found = {name: form(hidden, weight, ids) for name, form in forms(with_entropy).items() if name != "liger"}
    grads = {name: torch.autograd.grad(value, (hidden, weight)) for name, value in found.items()}
    for name in ("logits", "chunked"):
        torch.testing.assert_close(found[name], found["naive"])
        torch.testing.assert_close(grads[name], grads["naive"])


def test_amounts_that_measure_nothing_are_refused(capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, "--tokens", "0"])
    assert "got --tokens [0]" in capsys.readouterr().err
