"""The benchmark of saves; what a save costs is measured on a GPU alone."""

import json
import sys

from rlx.benchmarks import checkpoint
from rlx.offload.plan.shapes import SHAPES

TINY = {
    **{"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def test_saves_from_device_and_host_are_measured_and_whole(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    for place in ([], ["--optimizer-offload"]):
        sizes = ["--tokens", "8", "--micro-batches", "1", "--steps", "2", "--rounds", "1", "--digested-bytes", "100000"]
        options = [
            "--shape",
            "tiny",
            "--device",
            "cpu",
            "--out",
            str(tmp_path),
            "--json",
            str(tmp_path / "figures.json"),
        ]
        monkeypatch.setattr(sys, "argv", ["checkpoint", *sizes, *options, *place])
        assert checkpoint.main() == 0
        printed = capsys.readouterr().out
        assert f"state on the {'host' if place else 'device'}" in printed and "a save blocks [s]" in printed
        figures = json.loads((tmp_path / "figures.json").read_text())
        weights = 2 * 64 * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 32 + 16 * 2 + 3 * 32 * 48 + 64) + 32
        assert 3 * 2 * weights < figures["bytes"] < 3.2 * 2 * weights, (
            "weights and two moments in bf16, and step counts"
        )
        assert 0 < figures["blocks_s"] <= figures["written_s"] and figures["steps_beside_s"]
        assert list(tmp_path.iterdir()) == [tmp_path / "figures.json"], "nothing else is left"
