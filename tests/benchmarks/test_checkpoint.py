"""The benchmark of saves; what a save costs is measured on a GPU alone."""

import json
import sys

from benchmarks import checkpoint
from rlx.offload.plan.shapes import SHAPES

TINY = {
    **{"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def test_saves_from_device_and_host_are_measured_and_whole(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    for place, of_state in (([], 12), (["--optimizer-offload"], 12), (["--bf16-state"], 4)):
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
        assert (
            f"state on the {'host' if 'offload' in str(place) else 'device'}" in printed
            and "each save blocks" in printed
        )
        figures = json.loads((tmp_path / "figures.json").read_text())
        weights = 2 * 64 * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 32 + 16 * 2 + 3 * 32 * 48 + 64) + 32
        least = (2 + of_state) * weights
        assert least < figures["bytes"] < 1.1 * least, "bf16 weights, fp32 masters and moments, and step counts"
        for blocks, written, beside in zip(
            *(figures[n] for n in ("blocks_s", "written_s", "steps_beside_s")), strict=True
        ):
            assert 0 < blocks <= written and beside
        assert len(figures["blocks_s"]) == 2
        assert list(tmp_path.iterdir()) == [tmp_path / "figures.json"], "nothing else is left"
