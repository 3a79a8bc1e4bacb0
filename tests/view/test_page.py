"""The page's structure, as an HTML parser sees it."""

import base64
import gzip
import hashlib
import json
import shutil
from html.parser import HTMLParser

import pytest

from rlx.view.__main__ import main
from rlx.view.page import TITLE_LENGTH, write_page


class Parsed(HTMLParser):
    """Elements of a page with their attributes, and the text of scripts by id."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.scripts, self._open = [], {}, None
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id", "code") if tag in ("script", "style") else None
        if tag == "style":
            self._open = "style"

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data

    def unpacked(self, name):
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[name])))


def test_every_sample_is_listed_and_its_tokens_come_back(make_run):
    run = make_run(steps=3, groups=2, samples=4)
    page = run / "view.html"
    assert write_page(run, page) == (3, 24, 0)
    parsed = Parsed(page)
    index = parsed.unpacked("index")
    samples = index["samples"]
    assert {len(column) for column in samples.values()} == {24}
    assert index["metrics"]["2"] == {"reward/mean": 0.2, "actor/grad_norm": 0.25} and index["left_out"] == 0
    lines = [json.loads(line) for file in sorted((run / "transcripts").iterdir()) for line in file.open()]
    for i, line in enumerate(lines):
        own = parsed.unpacked(f"block{samples['block'][i]}")[samples["at"][i]]
        assert own["tokens"] == line["tokens"] and own["ids"] == line["token_ids"] and own["mask"] == line["loss_mask"]
        assert own["advantages"] == line["advantages"] and own["traceback"] == line.get("traceback", "")
        assert own["numbers"].startswith("rule 1.0 · ") and own["numbers"].endswith(" None")
        assert own["gaps"] == [gap if gap is None else pytest.approx(gap, rel=1e-3) for gap in line["log_prob_gap"]]
        assert [(turn["start"], turn["end"], turn["calls"]) for turn in own["turns"]] == [
            (turn["start"], turn["end"], turn["calls"]) for turn in line["turns"]
        ]
        told = {
            name: samples[name][i]
            for name in ("step", "group", "sample", "reward", "reason", "turns", "calls", "seconds")
        }
        expected = {name: line[name] for name in ("step", "group", "sample", "reward", "reason")}
        assert told == {**expected, "turns": 2, "calls": 1, "seconds": 0.5}
        assert samples["failed"][i] == line["turns"][0]["calls"][0]["error"]
        assert (samples["tokens"][i], samples["trained"][i]) == (24, 16)
    largest = max(abs(value) for line in lines for value in line["advantages"] if value is not None)
    assert index["scale"]["advantage"] == largest and 0 < index["scale"]["gap"] <= 1


def test_rows_of_a_conversation_that_forked_are_told_apart(make_run):
    run = make_run(steps=1, groups=1, samples=3)
    file = run / "transcripts" / "step_000001.jsonl"
    lines = [json.loads(line) | {"sample": 0, "branch": branch} for branch, line in enumerate(file.open())]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = run / "view.html"
    write_page(run, page)
    samples = Parsed(page).unpacked("index")["samples"]
    assert samples["branch"] == [0, 1, 2] and samples["sample"] == [0, 0, 0]


def test_the_timelines_of_the_last_and_the_slowest_step_are_there_also_without_samples(make_run, capsys):
    run = make_run(steps=3, groups=1, samples=1)
    shutil.rmtree(run / "transcripts")
    assert main([str(run)]) == 0 and "trainer.transcripts=True keeps its samples" in capsys.readouterr().out
    timelines = Parsed(run / "view.html").unpacked("index")["timeline"]
    assert [(title, seconds) for title, (seconds, _) in timelines.items()] == [
        ("Last step 3", 10.0), ("Slowest step 1", 20.0)
    ]  # fmt: skip
    rows = timelines["Last step 3"][1]
    assert list(rows) == [
        "phases", "tail, 25% of rollout waits for few long answers", "process 1, GPU busy", "process 1, engine 1 running (max 8)", "process 1, engine 1 waiting (max 4)",
        "process 1, engine 2 running (max 8)", "process 1, tokens (max 400)",
        "actor waits for copies: 2 MB out, 3 in",
    ]  # fmt: skip
    assert rows["phases"][2] == [8.5, 10.0, 1.0, "#16966b", "update actor"]
    assert [bar[:3] for bar in rows["process 1, engine 2 running (max 8)"]] == [[1.0, 6.0, 1.0], [6.0, 8.0, 0.25]]
    assert [bar[:3] for bar in rows["process 1, tokens (max 400)"]] == [[6.0, 8.0, 0.75], [8.0, 10.0, 1.0]]
    assert [bar[2] for bar in rows["process 1, GPU busy"]] == [0.5, 0.25, 1.0]
    assert rows["actor waits for copies: 2 MB out, 3 in"][0][:2] == [8.5, 9.0]


def test_nothing_that_was_written_by_a_model_is_html_and_no_other_script_may_run(make_run):
    run = make_run()
    write_page(run, run / "view.html")
    text, parsed = (run / "view.html").read_text("utf-8"), Parsed(run / "view.html")
    assert "owned" not in text and "seven&lt;b&gt;" in text and "seven<b>" not in text
    assert not [
        attributes for _, attributes in parsed.elements if {"src", "href", "onerror", "style"} & set(attributes)
    ]
    assert not {"img", "link", "iframe", "b"} & {tag for tag, _ in parsed.elements}
    (policy,) = [attributes["content"] for _, attributes in parsed.elements if "http-equiv" in attributes]
    for kind, name in (("script-src", "code"), ("style-src", "style")):
        digest = base64.b64encode(hashlib.sha256(parsed.scripts[name].encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert "innerHTML" not in parsed.scripts["code"] and "eval(" not in parsed.scripts["code"]


def test_a_page_that_would_be_too_large_lists_all_samples_and_says_which_have_no_tokens(make_run):
    run = make_run(steps=4, groups=10, samples=10, tokens=200)
    whole = write_page(run, run / "whole.html")
    most = (run / "whole.html").stat().st_size // 3
    cut = write_page(run, run / "cut.html", most_bytes=most)
    assert whole.left_out == 0 and 0 < cut.left_out < cut.samples == whole.samples == 400
    assert (run / "cut.html").stat().st_size < most * 1.2 + 60_000
    index = Parsed(run / "cut.html").unpacked("index")
    kept = [step for step, block in zip(index["samples"]["step"], index["samples"]["block"], strict=True) if block >= 0]
    assert index["left_out"] == cut.left_out == 400 - len(kept)
    assert min(kept.count(step) for step in (1, 2, 3, 4)) > 0.5 * max(kept.count(step) for step in (1, 2, 3, 4))


def test_steps_may_be_chosen_and_those_that_do_not_exist_are_named(make_run, capsys):
    run = make_run(steps=5, groups=1, samples=2)
    assert main([str(run), "--steps", "2:3", "--out", str(run / "some.html")]) == 0
    assert "4 samples of 2 steps" in capsys.readouterr().out
    assert main([str(run), "--steps", "7:"]) == 2
    assert "expected some of the steps 1 to 5" in capsys.readouterr().err
    assert main([str(run), "--max-mb", "0.000001"]) == 0
    assert "10 samples are listed without tokens" in capsys.readouterr().out


def test_a_line_that_is_still_being_written_is_left_out(make_run):
    run = make_run(steps=1, groups=1, samples=3)
    file = run / "transcripts" / "step_000001.jsonl"
    file.write_text(file.read_text()[:-20])
    assert write_page(run, run / "view.html").samples == 2


def test_a_run_without_transcripts_says_how_to_get_them(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "python -m rlx.main_ppo trainer.transcripts=True" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert f"{tmp_path}/nothing: no such folder" in capsys.readouterr().err


def test_numbers_that_are_not_finite_are_kept_as_words(make_run):
    run = make_run(steps=1, groups=1, samples=1)
    file = run / "transcripts" / "step_000001.jsonl"
    one = json.loads(file.read_text())
    one["advantages"][5], one["log_prob_gap"][5], one["reward"] = float("nan"), float("-inf"), float("inf")
    file.write_text(json.dumps(one) + "\n")
    write_page(run, run / "view.html")
    parsed = Parsed(run / "view.html")
    (own,) = parsed.unpacked("block0")
    assert (own["advantages"][5], own["gaps"][5]) == ("nan", "-inf")
    assert parsed.unpacked("index")["samples"]["reward"] == ["inf"]


def test_the_list_shows_all_turns_if_they_are_short_else_the_last(make_run):
    run = make_run(steps=1, groups=1, samples=2)
    [path] = (run / "transcripts").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, texts in zip(lines, (("16</s>", "24\n"), ("long " * 30, "24 it is " * 20)), strict=True):
        line["turns"][0]["text"], line["turns"][2]["text"] = texts
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page(run, run / "view.html")
    assert Parsed(run / "view.html").unpacked("index")["samples"]["title"] == [
        "16</s> → 24",
        ("24 it is " * 20)[:TITLE_LENGTH],
    ]
