"""The page in headless Chromium: its scripts run, and the elements that they make are read back."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from rlx.view.page import write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed (Debian: apt install chromium)"),
]


class Made(HTMLParser):
    """What scripts made: elements by class or id as text, and tokens with their background."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.texts, self.tokens, self._stack, self.tags = {}, [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        names = [f"<{tag}>", *(attributes.get("class") or "").split(), attributes.get("id") or "no id"]
        if "data-token" in attributes:
            self.tokens.append([attributes.get("style") or "", ""])
            names.append("a token")
        if tag not in ("meta", "link", "input", "br", "img"):
            self._stack.append((tag, names))
        for name in names:
            self.texts.setdefault(name, []).append("")

    def handle_endtag(self, tag):
        while self._stack and self._stack.pop()[0] != tag:
            pass

    def handle_data(self, data):
        for _, names in self._stack:
            for name in names:
                self.texts[name][-1] += data
        if self._stack and "a token" in self._stack[-1][1]:
            self.tokens[-1][1] += data


@pytest.fixture
def look(tmp_path):
    def look(page, state=""):
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        command += ["--virtual-time-budget=60000", "--window-size=1366,768", "--dump-dom", f"{page.as_uri()}#{state}"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert "Refused to" not in found.stderr and "Uncaught" not in found.stderr, found.stderr
        made = Made(found.stdout)
        assert any(attributes.get("data-ready") == "yes" for _, attributes in made.tags), found.stdout[-2000:]
        return made

    return look


def hidden(text):
    """The texts of tokens as they are in the page."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\u202e\ud800]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.replace("\n", "↵\n")


def test_a_sample_is_shown_as_it_was_written_and_hostile_text_stays_text(make_run, look):
    run = make_run()
    write_page(run, run / "view.html")
    line = json.loads((run / "transcripts" / "step_000002.jsonl").read_text().splitlines()[5])
    made = look(run / "view.html", "step=2&sample=21&colour=advantage")
    assert made.texts["<h1>"][0].endswith("/ seven<b>") and made.texts["<title>"][:1] == made.texts["<h1>"]
    assert [tag for tag, _ in made.tags].count("script") == 5, (
        "the index, a block for each of three steps, and the code"
    )
    assert not any(tag in ("img", "iframe") for tag, _ in made.tags)
    shown = [text for _, text in made.tokens]
    assert shown == [hidden(piece) or "∅" for piece in line["tokens"]]
    coloured = [bool(style) for style, _ in made.tokens]
    assert coloured == [advantage is not None for advantage in line["advantages"]]
    colour = "blue" if max(filter(None, line["advantages"]), key=abs) > 0 else "orange"
    assert all(colour in style for style, _ in made.tokens if style)
    heads = made.texts["turn"]
    assert len(heads) == 5 and heads[0].startswith("prompt") and "reward 0.1" in heads[1] and "call " in heads[1]
    assert heads[2].startswith("template") and heads[3].startswith("tool") and "ended by length" in heads[4]
    assert ("failed" in heads[1]) == line["turns"][0]["calls"][0]["error"]
    assert "16 samples" in made.texts["summary"][0] and f"reward {line['reward']}" in made.texts["sample"][0]


def test_rows_of_a_conversation_that_forked_are_one_sample_of_the_summary(make_run, look):
    """Each row has two of its turns and the whole conversation's reward."""
    run = make_run(steps=1, groups=2, samples=3)
    file = run / "transcripts" / "step_000001.jsonl"
    lines = [json.loads(line) for line in file.open()]
    for number, line in enumerate(lines[:3]):
        line |= {"sample": 0, "branch": number, "reward": 4.0}
    for line in lines[3:]:
        line["reward"] = 0.0
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page(run, run / "view.html")
    (summary,) = look(run / "view.html", "").texts["summary"]
    assert summary.startswith("4 samples: reward 1.00, 3.0 turns, 6 calls")


@pytest.mark.parametrize("colour", ["gap", "mask"])
def test_colours_may_be_those_of_the_gap_or_the_mask(colour, make_run, look):
    run = make_run(steps=1, groups=1, samples=1)
    write_page(run, run / "view.html")
    line = json.loads((run / "transcripts" / "step_000001.jsonl").read_text())
    made = look(run / "view.html", f"colour={colour}")
    expected = line["loss_mask"] if colour == "mask" else [gap or 0 for gap in line["log_prob_gap"]]
    for (style, _), value in zip(made.tokens, expected, strict=True):
        name = "" if not value else "green" if colour == "mask" else "blue" if value > 0 else "orange"
        assert (name in style) and bool(style) == bool(name)


def test_ten_thousand_samples_are_listed_without_drawing_them_all(make_run, look):
    run = make_run(steps=20, groups=50, samples=10, tokens=16)
    assert write_page(run, run / "view.html").samples == 10_000
    made = look(run / "view.html", "sample=9999")
    assert "10,000 samples" in made.texts["note"][0] and len(made.tokens) == 16
    assert 5 < len(made.texts["row"]) < 60 and len(made.texts["chosen"]) == 1, "the list shows the sample's row"
    assert "Step 20, group 49, sample 9" in made.texts["sample"][0]


def test_the_timeline_is_drawn_with_names_as_text(make_run, look):
    run = make_run(steps=1, groups=1, samples=1)
    write_page(run, run / "view.html")
    made = look(run / "view.html")
    assert made.texts["timeline-legend"] == ["rollout<b>update actor"] and len(made.texts["lane"]) == 9
    bars = [attributes for tag, attributes in made.tags if tag == "rect"]
    assert [(bar["x"], bar["width"]) for bar in bars[:3]] == [("0", "8"), ("8", "0.5"), ("8.5", "1.5")]
    assert [(bar["x"], bar["y"], bar["width"], bar["height"]) for bar in bars[7:9]] == [
        ("1", "0", "5", "1"), ("6", "0.875", "2", "0.125")
    ], "eight of eight requests from 1 s, one from 6 s"  # fmt: skip


def test_a_sample_without_tokens_says_where_they_are(make_run, look):
    run = make_run(steps=1, groups=2, samples=2)
    write_page(run, run / "view.html", most_bytes=1)
    made = look(run / "view.html")
    assert "4 samples are listed without tokens" in made.texts["note"][0]
    assert "they are in transcripts/step_000001.jsonl" in made.texts["sample"][0] and not made.tokens
