"""docs/planning.md says what the code does."""

import re
import shlex
from pathlib import Path

import pytest

from rlx.offload.plan.costs import Budget, LayerPlan
from rlx.offload.plan.decoder import read_decoder
from rlx.offload.plan.hardware import PROFILES
from rlx.offload.plan.memory import head_bytes, layer_bytes
from rlx.offload.plan.model_costs import layer_cost
from rlx.offload.plan.shapes import SHAPES
from rlx.offload.plan.step import predict
from rlx.offload.plan_command import _parser, _scenario, main

PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
ATTENTION, ALL = frozenset(range(5)), frozenset(range(7))  # q, k, v, attention, o; and gate, up


def section(title):
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title, columns):
    """Cells of the tables under a title that have so many columns."""
    bodies = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", section(title), re.MULTILINE)
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for body in bodies for line in body.splitlines()]
    return [line for line in lines if len(line) == columns]


def expected(case, mode):
    """The prediction for a line of the tables, and that of plain."""
    tokens, layers = (int(part.replace(",", "")) for part in case.split(" x "))
    every = re.search(r"every (\d)", mode)
    plans = {
        "plain": LayerPlan(keep=True),
        "checkpointing": LayerPlan(offload_boundary=False),
        "boundary": LayerPlan(),
        "attention": LayerPlan(off_device=ATTENTION),
    }
    chosen = [plans[mode.split(",")[0]]] * layers
    if every:
        chosen = [LayerPlan(off_device=ATTENTION if i % int(every[1]) else ALL) for i in range(layers)]
    hardware = PROFILES["h200"]
    machine = Budget(hardware.link_bytes_per_s, hardware.link_bytes_per_s, (1 << 50) * ("early" in mode))
    costs = [layer_cost(read_decoder(SHAPES["qwen2-7b"]), 0, tokens, hardware)] * layers
    return predict(costs, chosen, machine), predict(costs, [plans["plain"]] * layers, machine)


def percent(predicted, measured):
    return f"{(predicted / measured - 1) * 100:+.1f} %".replace("-", "\N{MINUS SIGN}")


def test_predictions_are_those_of_the_code_and_close_to_what_was_measured():
    table = rows("Predicted against measured", 8)
    assert len(table) == 12
    for case, mode, seconds, predicted, error, gb, predicted_gb, error_gb in table:
        found, _ = expected(case, mode)
        assert (predicted, error) == (f"{found.step_s:.3f}", percent(found.step_s, float(seconds)))
        assert found.step_s == pytest.approx(float(seconds), rel=0.015)
        if gb:
            assert (predicted_gb, error_gb) == (
                f"{found.peak_bytes / 1e9:.2f}",
                percent(found.peak_bytes / 1e9, float(gb)),
            )
            assert found.peak_bytes / 1e9 == pytest.approx(float(gb), rel=0.025)


def test_so_are_those_that_nothing_was_fitted_to():
    table = rows("Predicted against measured", 7)
    assert len(table) == 11
    plain_s = {case: float(seconds) for case, mode, seconds, *_ in table if mode == "plain"}
    for case, mode, seconds, predicted, error, ratio, predicted_ratio in table:
        found, plain = expected(case, mode)
        assert (predicted, error) == (f"{found.step_s:.3f}", percent(found.step_s, float(seconds)))
        assert (ratio, predicted_ratio) == (
            f"{float(seconds) / plain_s[case]:.3f}",
            f"{found.step_s / plain.step_s:.3f}",
        )
        assert found.step_s == pytest.approx(float(seconds), rel=0.05)


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


def test_the_example_prints_what_it_says(capsys):
    command, printed = re.search(
        r"```bash\n(.*?)\n```\n\n```text\n(.*?)\n```", section("An example"), re.DOTALL
    ).groups()
    assert main(shlex.split(command)[3:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == printed.splitlines()


def test_half_a_million_tokens_by_part():
    title = "524,288 tokens of a 7B model on one H200"
    command = shlex.split(re.search(r"```bash\n(.*?)\n```", section(title), re.DOTALL)[1])[3:]
    table = dict(zip((name for name, *_ in rows(title, 5)), (cells for _, *cells in rows(title, 5)), strict=True))
    host, tokens = {True: ["--optimizer-on-host"], False: []}, 524_288
    whole = [argument for argument in command if argument not in ("--tile", "auto")]
    for i, arguments in enumerate([command, command + host[True], whole, whole + host[True]]):
        setting = _scenario(_parser().parse_args(arguments))
        plan, parts = setting.plan("boundary", tokens), setting.memory_parts
        states = [parts["weights"], parts["gradients"], parts.get("optimizer", 0)]
        own = layer_bytes(setting.decoder, 0, tokens, tile=setting.tile).working, head_bytes(setting.decoder, tokens)
        on_host = plan.prediction.host_bytes, setting.hardware.host_bytes - setting.host_bytes
        figures = [f"{nbytes / 1e9:.1f}" for nbytes in (*states, *own, *setting.phases(plan), *on_host)]
        longest = [f"{setting.longest(mode):,}" for mode in ("boundary", "auto")]
        assert [cells[i] for cells in table.values()] == [*figures, "yes" if setting.fits(plan) else "no", *longest]


def test_the_code_runs(capsys):
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    assert "x plain" in capsys.readouterr().out


def test_the_note_stands_where_the_page_says():
    note, file = re.search(r"Note\s+\[(.*?)\] in\s+`(.*?)`", PAGE).groups()
    assert f"Note [{note}]\n" in (Path(__file__).parents[3] / file).read_text()
