"""The driver believes no reward process: it runs no code from it, and refuses what is no answer."""

import json
import math
import os
import pickle
from pathlib import Path

import pytest

from rlx.processes.lines import LONGEST_LINE, BadAnswer, Lines, send
from rlx.rewards.answers import of_loaded, to_loaded, to_outcomes
from rlx.rewards.function import Function, Outcome
from rlx.rewards.pool import ProcessPool, RewardCall
from rlx.user_code import ImportFailed

HOSTILE = """
import json, os, pickle, sys
from pathlib import Path

class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "pickle":
        os.write(int(sys.argv[1]), pickle.dumps(Runs(ground_truth)) + b"\\n")
    elif solution_str == "forged":
        os.write(int(sys.argv[1]), json.dumps([[0, [{"score": 9.0}], "", "", ""], [7, [], "error", "", ""]]).encode() + b"\\n")
    return 1.0
"""
RIGHT = [0, [{"score": 1.0, "acc": math.nan}], "", "", ""]


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_pickle_and_a_forged_answer_lose_only_their_sample(write_module, tmp_path: Path):
    function = Function(write_module(HOSTILE), "compute_score", 30.0)
    texts = ["a", "pickle", "b", "forged", "c"]
    arguments = {"data_source": "d", "ground_truth": str(tmp_path / "ran"), "extra_info": {}}
    with ProcessPool(2, None, 1) as pool:
        outcomes, _ = pool.run([RewardCall(function, {**arguments, "solution_str": text}) for text in texts])
    assert [outcome.kind for outcome in outcomes] == ["", "crash", "", "crash", ""]
    assert outcomes[1].fault == "sent an answer that is no JSON, or too long"
    assert outcomes[3].fault == "sent an answer of another form than rlx's"
    assert not (tmp_path / "ran").exists(), "the driver has run what a reward process sent"


def test_messages_arrive_whole_in_pieces_and_several_at_once(pipe):
    reader, writer = pipe
    lines = Lines(reader)
    send(writer, RIGHT)
    send(writer, [1, "\ud800 half a pair"])
    first, second = lines.read()
    assert math.isnan(first[1][0]["acc"]) and second == [1, "\ud800 half a pair"]
    os.write(writer, b'{"a"')
    assert lines.read() == []
    os.write(writer, b": 1}\n")
    assert lines.read() == [{"a": 1}]


def test_the_end_and_nonsense_are_errors(pipe):
    reader, writer = pipe
    for nonsense in (pickle.dumps([1]) + b"\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        os.write(writer, nonsense[:60_000] + b"\n")
        with pytest.raises(BadAnswer):
            Lines(reader).read()
    endless = Lines(reader)
    endless._rest = bytearray(LONGEST_LINE)
    os.write(writer, b"x")
    with pytest.raises(BadAnswer):
        endless.read()


def test_loading_is_told_as_it_was(pipe):
    for loaded in ((True, None, ""), (False, ImportFailed("x"), "Traceback")):
        asynchronous, fault, traceback = to_loaded(json.loads(json.dumps(of_loaded(loaded))))
        assert (asynchronous, type(fault), str(fault), traceback) == (
            *loaded[:1],
            type(loaded[1]),
            str(loaded[1]),
            loaded[2],
        )
    for wrong in (None, [], [1, None, ""], [True, ["os.system"], ""], {"a": 1}):
        with pytest.raises(BadAnswer):
            to_loaded(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 7, {}, [None], [[0]], [["0", *RIGHT[1:]]], [RIGHT, RIGHT], [[1, *RIGHT[1:]]], [[5, *RIGHT[1:]]]),
        *([[0, [], "", "", ""]], [[0, RIGHT[1] * 2, "", "", ""]], [[0, RIGHT[1], "error", "", ""]]),
        *([[0, [], "nonsense", "", ""]], [[0, [], "error", None, ""]], [[0, [{"acc": 1.0}], "", "", ""]]),
        *([[0, [{"score": "1"}], "", "", ""]], [[0, [{"score": True}], "", "", ""]], [[0, [[]], "", "", ""]]),
        *([[0, [{"score": math.nan}], "", "", ""]], [[0, [{"score": 1e39}], "", "", ""]]),
    ],
)
def test_an_answer_of_another_form_is_refused(wrong):
    with pytest.raises(BadAnswer):
        to_outcomes(wrong, [1, 1], {0})


def test_right_answers_are_read():
    assert to_outcomes([[1, ["no number", {"score": 2.0}], "", "", ""]], [1, 2], {0, 1}) == [
        (1, Outcome(["no number", {"score": 2.0}]))
    ]
    assert to_outcomes([[0, [], "error", "raised", "tb"]], [1], {0}) == [(0, Outcome([], "error", "raised", "tb"))]


def test_hostile_mathematics_costs_its_time_and_no_process():
    hostile = ["9^{9^{9^{9}}}", "10^{9}!", "\\binom{10^{9}}{5\\cdot 10^{8}}", "\\prod_{k=1}^{10000} (x+k)"] * 2
    function = Function("rlx.rewards.math", "compute_score", 30.0, cpu_limit_s=0.3)
    arguments = {"data_source": "math", "ground_truth": "7", "extra_info": {}}
    texts = [*hostile, "7"]
    with ProcessPool(2, None, 1) as pool:
        calls = [RewardCall(function, {**arguments, "solution_str": f"\\boxed{{{text}}}"}) for text in texts]
        outcomes, counts = pool.run(calls)
    assert [outcome.kind for outcome in outcomes] == ["timeout"] * 8 + [""] and outcomes[8].answers == [{"score": 1.0}]
    assert counts == (0, 0)
