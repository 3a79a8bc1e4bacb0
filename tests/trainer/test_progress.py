import io
import logging
import re
import sys
from pathlib import Path

import pytest
from run_tools import PAGE, described

from rlx.trainer.progress import (
    HEADER_EVERY,
    ONLY_WITH,
    PHASES,
    PLAIN_WIDTH,
    PROGRESS_COLUMNS,
    Progress,
    StepTable,
    printable,
)

METRICS = {
    **{"reward/mean": 0.375, "reward/accuracy": 0.4125, "response_length/mean": 141.2, "actor/ppo_kl": -3.12e-05},
    **{"mismatch/mean_abs_log_prob": 0.0123, "actor/entropy": 0.512, "actor/clip_fraction": 0.0123},
    **{"actor/grad_norm": 123.456, "perf/tokens_per_second": 123456.0, "actor/tokens_saved": 0.78},
    **{"perf/offloaded_mb": 1234567.0, "perf/stall_share": 0.0234, "perf/peak_memory_gb": 71.25},
    **{"timing_s/rollout": 12.34, "timing_s/reward": 0.01, "timing_s/update_actor": 7.5, "timing_s/sync": 1.04},
    "timing_s/step": 20.9,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(total_steps: int = 100, **kwargs: object) -> tuple[Progress, io.StringIO]:
    stream = io.StringIO()
    return Progress(total_steps, stream=stream, **kwargs), stream


CRITIC = {"critic/vf_loss": 0.25}
WITHOUT_CRITIC = tuple(column for column in PROGRESS_COLUMNS if column.title not in ("vloss", "turns"))
OPTIONAL = frozenset(ONLY_WITH) - {"vloss", "turns"}


def test_every_column_is_described_and_the_legend_comes_once():
    assert all(described(name) for column in PROGRESS_COLUMNS for name in column.metrics)
    progress, stream = plain()
    for step in range(1, HEADER_EVERY + 3):
        progress.row(METRICS | CRITIC, step)
    text = stream.getvalue()
    assert text.count("KL: ") == 1 and text.count("step reward") == 2, "two headers, one legend"
    legend = text.partition("step reward")[0].strip().splitlines()
    assert len(legend) == 2 and legend[0].startswith("acc: right answers; KL: to the reference, or of the update; ")
    assert legend[1].startswith("phases: roll=rollout, rew=reward, actor=update actor; "), legend
    assert "vloss" in text.splitlines()[-3] and "0.250" in text.splitlines()[-1], "PPO shows its critic"


def test_what_a_run_leaves_off_has_neither_column_nor_legend_until_it_has_a_value():
    progress, stream = plain()
    off = {name: value for name, value in METRICS.items() if name not in ONLY_WITH.values()}
    for step in range(1, 4):
        progress.row(off | {"perf/offloaded_mb": 0.0}, step)
    text = stream.getvalue()
    assert "peakGB" in text and not any(title in text for title in ONLY_WITH)
    progress.row(METRICS, 4)
    header, row = stream.getvalue().splitlines()[-2:]
    assert all(title in header for title in OPTIONAL) and "1.2M" in row and "vloss" not in header
    progress.row(METRICS, 5)
    assert "5/100" in stream.getvalue().splitlines()[-1] and "reward" not in stream.getvalue().splitlines()[-2]
    progress.row(METRICS | {"conversation/turns_mean": 2.375}, 6)
    header, row = stream.getvalue().splitlines()[-2:]
    assert "turns" in header and "2.375" in row, "with an environment"


def test_the_page_of_metrics_has_the_columns_and_phases():
    rows = [f"| `{c.title}` | {', or '.join(f'`{name}`' for name in c.metrics)} |" for c in PROGRESS_COLUMNS]
    phases = ", ".join(f"`{phase.label}` is {name}" for name, phase in PHASES.items())
    assert PAGE.endswith("|---|---|\n" + "\n".join(rows) + f"\n\nPhases: {phases}.\n")


def test_a_row_stands_under_its_header_and_holds_every_column_within_120_characters():
    table = StepTable(PLAIN_WIDTH, 9999, OPTIONAL)
    header, row = table.header(), table.row(9999, METRICS)
    assert table.columns == WITHOUT_CRITIC
    assert max(len(header), len(row)) <= PLAIN_WIDTH
    assert row.split()[:15] == [
        "9999/9999", "0.375", "41.2%", "141", "-3.1e-05", "0.012", "0.512", "1.2%", "123.456", "123k", "78%", "20.9", "1.2M", "2.3%", "71.250",
    ]  # fmt: skip
    end = 0
    for column in WITHOUT_CRITIC:
        end = header.index(column.title, end) + len(column.title)
        assert row[end - 1] != " " and row[end] == " ", f"{column.title} is not aligned: {row!r}"


def memory_of(**phases: tuple[float, float]) -> dict[str, float]:
    return {
        f"memory/{phase}_{moment}_gb": gb
        for phase, pair in phases.items()
        for moment, gb in zip(("before", "after"), pair, strict=True)
    }


def test_memory_before_and_after_each_phase_comes_with_a_header_and_when_it_changes():
    progress, stream = plain(verbose=True)
    still = memory_of(rollout=(3.2, 61.04), update_actor=(9.0, 130.6))
    every = [still] * 3 + [still | memory_of(rollout=(3.2, 66.0))] * (HEADER_EVERY - 2)
    for step, memory in enumerate(every, 1):
        progress.row(METRICS | memory, step)
    lines = stream.getvalue().splitlines()
    found = {index: line.strip() for index, line in enumerate(lines) if "before>after" in line}
    changed = "GB before>after: roll 3.20>66.0 actor 9.00>131"
    assert list(found.values()) == ["GB before>after: roll 3.20>61.0 actor 9.00>131", changed, changed]
    assert [lines[index - 1].split()[0] for index in found] == ["1/100", "4/100", f"{HEADER_EVERY + 1}/100"]


@pytest.mark.parametrize("width", [20, 40, 80, 100])
def test_a_narrow_terminal_drops_columns_but_not_the_reward(width: int):
    table = StepTable(width, 1000)
    assert max(len(table.header()), len(table.row(7, METRICS))) <= width
    assert StepTable(120, 300, OPTIONAL).header().endswith("  s by phase"), "no column of a pipe is without a name"
    assert table.header().split()[:2] == ["step", "reward"]


def test_a_pipe_gets_plain_lines_with_a_header_every_few_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress, stream = plain(HEADER_EVERY + 1)
    with progress:
        for number_ in range(1, HEADER_EVERY + 2):
            with progress.step(number_), progress.phase("rollout"):
                pass
            progress.row(METRICS, number_)
    text = stream.getvalue()
    assert all(c.isprintable() or c == "\n" for c in text)
    lines = text.splitlines()
    assert sum(line.lstrip().startswith("step reward") for line in lines) == 2
    assert sum("0.375" in line for line in lines) == HEADER_EVERY + 1
    assert any(line.startswith("elapsed ") and line.endswith(" left") for line in lines)


def test_a_failure_names_the_step_and_the_innermost_phase_and_goes_on():
    progress, stream = plain()
    with pytest.raises(RuntimeError, match="boom"), progress, progress.step(7), progress.phase("update_actor"):
        raise RuntimeError("boom")
    assert stream.getvalue() == "! stopped in step 7, phase update_actor\n"


def test_held_out_results_are_shown_with_and_without_a_training_row():
    progress, stream = plain(console=False)
    progress.row({"val/accuracy": 0.3125, "val/reward": 0.25}, 0)
    progress.row(METRICS | {"val/accuracy": 0.5}, 5)
    assert stream.getvalue().splitlines() == [
        "step 0: held-out accuracy 31.2%, reward 0.250",
        "step 5: held-out accuracy 50.0%",
    ]


def test_generations_cannot_control_the_terminal_and_show_one_of_several_blank_lines():
    progress, stream = plain()
    progress.generations([{"prompt": "1+1?\nSay", "response": "\x1b[2J\x07 [bold]2[/bold]", "score": 1.0}])
    text = stream.getvalue()
    assert "\\x1b[2J\\x07 [bold]2[/bold]" in text and "\x1b" not in text and "\x07" not in text
    assert printable("é→", "ascii") == "\\xe9\\u2192"
    progress.generations([{"response": "one\n\n \n\n  two\nthree"}])
    shown = [line.strip("│ ") for line in stream.getvalue().splitlines()[-5:-1]]
    assert shown == ["response  one", "", "two", "three"]


def test_the_summary_tells_what_was_reached_and_where_things_lie(tmp_path: Path):
    (tmp_path / "metrics.jsonl").touch()
    progress, stream = plain()
    for step, reward in enumerate((0.1, 0.3, 0.4, 0.6), 1):
        progress.row({"reward/mean": reward}, step)
    first, last = {"val/accuracy": 0.3, "step": 0.0}, {"val/accuracy": 0.45, "step": 4.0}
    progress.summary(first, last, tmp_path, tmp_path / "report.png")
    text = stream.getvalue()
    assert "30.0% -> 45.0% (+15.0 points), step 0 -> 4" in text and "from step" not in text
    assert "mean of 2 steps" in text and "0.200 -> 0.500" in text
    assert f"run          {tmp_path}\n" in text and f"metrics      {tmp_path / 'metrics.jsonl'}\n" in text
    assert "checkpoints" not in text
    progress, stream = plain(0)
    only = {"val/accuracy": 0.3, "step": 0.0}
    progress.summary(only, only, tmp_path, None)
    assert "30.0% at step 0, before training" in stream.getvalue() and "->" not in stream.getvalue()


def test_no_path_is_broken(tmp_path: Path, monkeypatch):
    folder = tmp_path / "long_name" / ("x" * 150)
    (folder / "checkpoints" / "global_step_4").mkdir(parents=True)
    progress, stream = plain()
    progress.summary({}, {}, folder, None)
    assert f"checkpoints  {folder}/checkpoints\n" in stream.getvalue()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", Terminal())
    Progress(9).summary({}, {}, folder, folder / "report.png")
    shown = re.sub(r"\x1b\[[\d;]*m", "", sys.stdout.getvalue()).splitlines()
    assert f"report       {folder}/report.png" in shown


@pytest.mark.parametrize("fault", ["no matplotlib", "a torn file"])
def test_a_picture_that_cannot_be_drawn_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str):
    from rlx.trainer.run import _picture

    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n' if fault == "no matplotlib" else "[\n")
    if fault == "no matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
        monkeypatch.delitem(sys.modules, "rlx.trainer.report", raising=False)
    progress, stream = plain()
    picture = _picture(tmp_path, progress)
    progress.summary({}, {}, tmp_path, picture)
    said = " ".join(stream.getvalue().split())
    assert picture is None and f"python -m rlx.trainer.report {tmp_path}" in said.replace("! ", "")
    assert ("matplotlib" if fault == "no matplotlib" else "line 1") in said


def test_the_summary_of_a_resumed_run_says_which_numbers_are_of_its_last_part(tmp_path: Path):
    progress, stream = plain(10)
    for step in (6, 7):
        with progress.step(step):
            pass
        progress.row({"reward/mean": step / 10}, step)
    progress.summary({"val/accuracy": 0.3}, {"val/accuracy": 0.5, "step": 7.0}, tmp_path, None)
    text = stream.getvalue()
    assert "(+20.0 points), step ? -> 7" in text, "older versions kept no step of the first validation"
    assert "0.600 -> 0.700, from step 6 on" in text and re.search(r"wall time +\S+s, from step 6 on", text)


def test_steps_without_an_advantage_and_truncated_responses_are_explained_once(tmp_path: Path):
    progress, stream = plain(4, console=False)
    for step, share in enumerate((0.5, 1.0, 1.0, 0.9), 1):
        lengths = {"response_length/clip_ratio": 0.8125 if step > 2 else 0.5}
        progress.row({"reward/mean": 0.1, "train/zero_advantage_share": share} | lengths, step)
    said = " ".join(stream.getvalue().split())
    assert said.count("advantages are zero") == said.count("of the responses were truncated") == 1
    assert said.startswith("! step 2: all advantages are zero") and "give partial credit" in said
    assert "! step 3: 81% of the responses were truncated, see response_length/clip_ratio; if the reward" in said
    progress.summary({}, {}, tmp_path, None)
    assert re.search(r"all advantages zero +in 2 of 4 steps ", stream.getvalue())
    assert re.search(r"truncated responses +66% in the last 4 step", stream.getvalue())


def test_a_terminal_gets_a_bar_with_the_phase_and_is_left_clean(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "130")
    stream = Terminal()
    progress = Progress(3, stream=stream)
    with progress:
        for step in (2, 3):  # resumed after step 1
            with progress.step(step), progress.phase("rollout"):
                pass
            progress.row(METRICS, step)
    text = stream.getvalue()
    assert "rollout" in text and "1/3" in text and "2/3" in text
    assert "reward" in text and "0.375" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor must come back"


def test_what_rlx_logs_is_shown_while_a_run_lasts():
    progress, stream = plain()
    with progress:
        logging.getLogger("rlx.anything").info("layers found: 4")
        logging.getLogger("rlx.anything").warning("host memory is short")
    logging.getLogger("rlx.anything").warning("too late")
    assert stream.getvalue().splitlines() == ["layers found: 4", "! host memory is short"]
