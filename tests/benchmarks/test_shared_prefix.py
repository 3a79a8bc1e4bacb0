import json

from benchmarks.shared_prefix import main

SMALL = ["--shape", "tiny", "--layers", "2", "--rounds", "1", "--device", "cpu"]


def test_both_ways_of_a_case_agree_and_the_tree_computes_fewer_tokens(capsys, tmp_path):
    main([*SMALL, "--cases", "12+5x3", "--tokens", "40", "--exact", "--json", str(tmp_path / "figures.json")])
    (case,) = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert case["rows"]["tokens"] == 3 * 16 and case["tree"]["tokens"] == 12 + 3 * 4
    errors = case["errors"]
    assert 0 < errors["tree"]["gradients"] < 2 * errors["rows"]["gradients"] < 0.1, "rounding of bf16"
    assert 0 < errors["tree"]["log-probs"] < 2 * errors["rows"]["log-probs"]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows[:3]] == ["rows", "tree", "ratio"]
