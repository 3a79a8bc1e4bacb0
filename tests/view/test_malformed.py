"""Every malformed file of a run ends the command with its name and without a traceback, and no other file is touched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.view.__main__ import main

STEP = "transcripts/step_000001.jsonl"


def sample(**changes):
    """Change entries of the first sample; `...` removes one."""

    def harm(run):
        first, *rest = (run / STEP).read_text().splitlines()
        changed = {name: value for name, value in {**json.loads(first), **changes}.items() if value is not ...}
        (run / STEP).write_text("\n".join([json.dumps(changed), *rest, ""]))

    return harm


def turn(**changes):
    def harm(run):
        first = json.loads((run / STEP).read_text().splitlines()[0])
        own = {name: value for name, value in {**first["turns"][0], **changes}.items() if value is not ...}
        sample(turns=[own, *first["turns"][1:]])(run)

    return harm


def line(data, name=STEP):
    return lambda run: (run / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def metrics(data):
    return line(data + "\n", "metrics.jsonl")


def instead(name, make):
    def harm(run):
        (run / name).unlink(missing_ok=True)
        make(run / name)

    return harm


def kept(**changes):
    """Change entries of the last step of the timeline; `...` removes one."""

    def harm(run):
        whole = json.loads((run / "timeline.json").read_text())
        last = {name: value for name, value in {**whole["last"], **changes}.items() if value is not ...}
        (run / "timeline.json").write_text(json.dumps(whole | {"last": last}))

    return harm


DEEP = "[" * 100_000 + "]" * 100_000
HUGE = 10**400
FAULTS = {
    # Lines
    "no JSON": line("{oh\n"),
    "a list": line("[1]\n"),
    "bytes": line(b"\x80\xff\0\n"),
    "nested too deep": line(DEEP + "\n"),
    "no step": sample(step=...),
    # Numbers
    "step that is a text": sample(step="1"),
    "step beyond a browser": sample(step=HUGE),
    "reward that is a text": sample(reward="1"),
    "reward without bound": sample(reward=HUGE),
    "numbers with a text": sample(numbers={"rule": "1"}),
    # Lists
    "tokens that are a text": sample(tokens="abc"),
    "mask that is too short": sample(loss_mask=[1]),
    "advantages of texts": sample(advantages=["nan"] * 24),
    # Turns
    "turns that are an object": sample(turns={}),
    "turn that is a list": sample(turns=[[]]),
    "turn without a role": turn(role=...),
    "turn that begins below 0": turn(start=-3),
    "turn beyond the end": turn(end=99),
    "calls that are a text": turn(calls="add"),
    "turn with a text for seconds": turn(seconds="fast"),
    # Metrics
    "metrics without a step": metrics('{"reward/mean": 1}'),
    "metrics whose step is infinite": metrics('{"step": Infinity}'),
    "metrics without bound": metrics('{"step": 1, "reward/mean": ' + "9" * 400 + "}"),
    # Timeline
    "timeline that is cut short": line('{"last": {"step"', "timeline.json"),
    "timeline that is a list": line("[]", "timeline.json"),
    "timeline whose step is a list": line('{"last": []}', "timeline.json"),
    "timeline without phases": kept(phases=...),
    "timeline with a number below 0": kept(seconds=-1),
    "timeline with a number without bound": kept(seconds=HUGE),
    "timeline with a phase that is a number": kept(phases=[[1, 0, 1]]),
    "timeline with lists of two lengths": kept(processes=[{"at": [0, 1], "tokens": [0]}]),
    "timeline with a text for a reading": kept(processes=[{"at": [0], "tokens": ["1"]}]),
    "timeline with copies of nobody": kept(copies={"actor": None}),
    "a pipe for a timeline": instead("timeline.json", os.mkfifo),
    # No files
    "a pipe for a step": instead(STEP, os.mkfifo),
    "a folder for a step": instead(STEP, Path.mkdir),
    "a device for a step": instead(STEP, lambda path: path.symlink_to("/dev/zero")),
    "a link to itself for a step": instead(STEP, lambda path: path.symlink_to(path.name)),
    "a pipe for metrics": instead("metrics.jsonl", os.mkfifo),
    "a folder for metrics": instead("metrics.jsonl", Path.mkdir),
    "a pipe for the page": instead("view.html", os.mkfifo),
    "a folder for the page": instead("view.html", Path.mkdir),
    "a device for the page": instead("view.html", lambda path: path.symlink_to("/dev/null")),
}
REPLACED = "a device for the page"  # the link goes, the device stays


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_file_is_named(fault, make_run, capsys):
    run = make_run(steps=1, groups=1, samples=2)
    FAULTS[fault](run)
    code = main([str(run)])
    said = capsys.readouterr().err
    if fault == REPLACED:
        assert code == 0 and (run / "view.html").is_file() and Path("/dev/null").is_char_device()
        return
    name = "view.html" if "the page" in fault else "metrics.jsonl" if "metrics" in fault else STEP
    name = "timeline.json" if "timeline" in fault else name
    assert code == 2 and name in said and said.count("\n") == 1 and len(said) < 600, said


def test_a_link_for_the_page_is_replaced_and_its_target_stays(make_run, tmp_path):
    run = make_run(steps=1, groups=1, samples=1)
    (tmp_path / "mine").write_text("mine")
    for name in ("view.html", ".view.html.part"):
        (run / name).symlink_to(tmp_path / "mine")
    assert main([str(run)]) == 0
    assert (tmp_path / "mine").read_text() == "mine" and not (run / "view.html").is_symlink()
    assert not (run / ".view.html.part").exists()


def test_odd_values_that_mean_something_are_shown(make_run):
    run = make_run(steps=1, groups=1, samples=1)
    for harm in (sample(reward=None, data_source=None, reason=7), turn(calls=[1, None, []], text=None, seconds=None)):
        harm(run)
        assert main([str(run)]) == 0


@pytest.mark.parametrize("options", [["--max-mb", "nan"], ["--max-mb", "-1"], ["--max-mb", "inf"], ["--steps", "1"]])
def test_an_option_that_is_no_number_is_named(options, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), *options])
    assert options[0] in capsys.readouterr().err


def test_names_that_are_too_long_or_no_text_are_told(make_run, tmp_path, capsys):
    run = make_run(steps=1, groups=1, samples=1)
    assert main(["x" * 5000]) == 2 and "File name too long" in capsys.readouterr().err
    assert main([str(run), "--out", str(tmp_path / ("y" * 5000))]) == 2
    assert "File name too long" in capsys.readouterr().err
    odd = run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff"))
    command = [sys.executable, "-m", "rlx.view", str(odd)]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
