import json
from importlib.util import find_spec

import pytest
import torch

from benchmarks.shared_prefix_peers import MAKERS, flash_padded, flash_varlen, main

PACKAGES = {"TRL": "trl", "AReaL": "areal", "verl": "verl"}


def test_the_tree_is_beside_rows_and_a_library_that_is_missing_says_so(capsys, tmp_path):
    size = ["--shape", "tiny", "--layers", "2", "--rounds", "1", "--device", "cpu", "--case", "24+5x3"]
    missing = [way for way, package in PACKAGES.items() if find_spec(package) is None]
    main([*size, "--ways", "tree", *missing, "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())["ways"]
    assert list(figures) == ["rows", "tree"] and set(PACKAGES) < set(MAKERS)
    assert 0 < figures["tree"]["off"]["gradients"] < 0.05 and figures["rows"]["off"]["gradients"] == 0
    lines = capsys.readouterr().out.splitlines()
    for way in missing:
        assert [line for line in lines if line.strip().startswith(f"{way} did not run: ")]


def test_what_stands_in_for_flash_attention_is_causal_from_the_last_key_on():
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    query, key, value = (torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_() for shape in shapes)
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    heads = (x.transpose(1, 2) for x in (query, key, value))
    options = {"attn_mask": mask, "scale": 0.3, "enable_gqa": True}
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, **options).transpose(1, 2)
    got = flash_padded(query, key, value, None, softmax_scale=0.3)
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(x.square().sum(), (query, key, value), retain_graph=True) for x in (got, expected)]
    torch.testing.assert_close(*grads)
    starts, key_starts = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10])
    flat = flash_varlen(*(x.flatten(0, 1) for x in (query, key, value)), starts, key_starts, 3, 5, softmax_scale=0.3)
    torch.testing.assert_close(flat.view_as(expected), expected)


def test_padding_is_refused():
    ones = torch.ones(1, 2, 1, 8)
    with pytest.raises(AssertionError, match="rows of a case have one length"):
        flash_padded(ones, ones, ones, torch.tensor([[True, False]]))
