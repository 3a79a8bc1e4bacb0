import json

import pytest

from benchmarks.optimizer_offload import main

ROWS = ["offload, first time", "fetch", "offload", 'tensor.to("cpu")', "tensor.to(device)"]


def test_the_command_prints_a_table_and_writes_the_same_figures(tmp_path, capsys):
    path = tmp_path / "figures.json"
    main(["--gb", "0.01", "--rounds", "1", "--device", "cpu", "--json", str(path)])
    figures = json.loads(path.read_text())
    assert list(figures["rows"]) == ROWS and figures["tensors"] == 2
    assert figures["host_reserved_bytes"] >= figures["bytes"] > 64 << 20
    printed = capsys.readouterr().out
    for row, values in figures["rows"].items():
        assert values["gb_per_s"] * values["seconds"] * 1e9 == pytest.approx(figures["bytes"])
        assert f"{row:20}{values['seconds']:10.3f}{values['gb_per_s']:8.1f}" in printed
    steps = figures["steps"]
    assert list(steps["rows"]) == ["state on the device", "state whole", "state in pieces"]
    moved = steps["rows"]["state in pieces"]
    assert moved["gb_per_s"] * moved["seconds"] * 1e9 == pytest.approx(2 * steps["state_bytes"])
    assert f"{'state in pieces':20}{moved['seconds']:10.3f}{moved['gb_per_s']:8.1f}{'-':>10}" in printed


def test_amounts_that_measure_nothing_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--gb", "0"])
    assert "got --gb 0.0" in capsys.readouterr().err
