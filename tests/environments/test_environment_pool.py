"""What environments can do to a run: nothing. Rows live and fail on their own."""

import contextlib
import os
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import rlx.environments.environment_pool
from rlx.environments.protocol import Failure, Observation, Turn
from rlx.environments.spec import EnvironmentSpec
from rlx.user_code import UserCodeError

ENVIRONMENT = """
import asyncio, ctypes, itertools, os, sys, time
from pathlib import Path
from rlx.environments.protocol import Observation

class Table:
    tools = [{"type": "function"}]
    now = most = 0

    def reset(self, row):
        if row["prompt"] == "crash":
            os._exit(3)
        self.row, self.turns = row, 0
        return [{"role": "user", "content": str(row["prompt"])}]

    async def step(self, turn):
        self.turns += 1
        match turn.text:
            case "hang": time.sleep(1000)
            case "loop":
                while True: pass
            case "hang in C": sum(itertools.repeat(0))
            case "wait": await asyncio.sleep(1000)
            case "stubborn":
                while True:
                    try: await asyncio.sleep(1000)
                    except asyncio.CancelledError: pass
            case "exit": os._exit(0)
            case "exit later" | "exit later once":
                once = Path(__file__).with_name("exited")
                if turn.text == "exit later" or not once.exists():
                    once.touch()
                    asyncio.get_running_loop().call_later(0.1, os._exit, 3)
                await asyncio.sleep(1)
            case "segfault": ctypes.string_at(0)
            case "sys.exit": sys.exit("enough")
            case "raise": raise KeyError("k")
            case "stop": raise StopIteration
            case "memory": bytearray(3 * 10**9)
            case "print": print("x" * 10**5)
            case "forge": os.write(int(sys.argv[1]), b"[0, 0]\\n"); time.sleep(5)
            case "no JSON": os.write(int(sys.argv[1]), b"\\x80pickle\\n"); time.sleep(5)
            case "sleep":
                Table.now, Table.most = Table.now + 1, max(Table.most, Table.now + 1)
                await asyncio.sleep(0.3)
                Table.now -= 1
        if turn.text == "most":
            return Observation([{"role": "user", "content": str(Table.most)}])
        if turn.text == "clock":
            return Observation([{"role": "user", "content": str(time.time())}])
        if turn.text == "seconds":
            return Observation([{"role": "user", "content": "ok"}], info={"calls": [{"seconds": time.time()}]})
        wrong = {"none": None, "NaN": {"messages": [], "reward": float("nan")}, "text": "fine", "fields": {"message": []},
            "reward": {"messages": [], "reward": "1"}, "role": {"messages": [{"content": "x"}]}, "empty": {"messages": []},
            "long": {"messages": [{"role": "user", "content": "y" * 2**20}]}, "object": {"messages": [], "done": True, "info": {"a": object()}},
            "info": {"messages": [], "done": True, "info": {"a": float("inf")}}, "huge": {"messages": [], "done": True, "reward": 1e39},
            "digits": {"messages": [], "reward": 10**5000},
            "deep": {"messages": [{"role": "user", "content": "", "x": self.deep()}]}, "done": {"messages": [], "done": "yes"},
            "surrogates": {"messages": [{"role": "user", "content": "a\\ud800b"}]}}
        if turn.text in wrong:
            return wrong[turn.text]
        return Observation([{"role": "user", "content": f"{turn.text} {self.turns}"}], reward=0.5, done=turn.text == "end")

    def deep(self):
        found = []
        for _ in range(10**5): found = [found]
        return found

    def close(self):
        if self.row.get("extra_info"): Path(self.row["extra_info"]).write_text("closed")
"""
ROW = {"prompt": "p", "data_source": "d", "ground_truth": "1", "extra_info": None, "seed": 5}


def begin(pool, answers, keys):
    for key in keys:
        pool.reset(key, ROW)
    assert all(answer.messages[0]["content"] == "p" for answer in answers(pool, keys).values())


def step(pool, answers, text, key=0):
    pool.step(key, Turn(text, 0))
    return answers(pool, [key])[key]


def test_conversations_of_a_process_go_on_side_by_side(make_pool, answers, tmp_path):
    pool, seen = make_pool("Table", ENVIRONMENT), tmp_path / "closed"
    pool.reset(0, {**ROW, "extra_info": str(seen), "ground_truth": np.int64(3), "array": np.arange(2)})
    reset = answers(pool, [0])[0]
    assert reset.tools == [{"type": "function"}] and reset.messages == [{"role": "user", "content": "p"}]
    begin(pool, answers, range(1, 40))
    for key in range(40):
        pool.step(key, Turn("sleep", 0))
    found = answers(pool, range(40))
    assert int(step(pool, answers, "most", 8).messages[0]["content"]) > 20, "async steps wait together"
    assert found[7] == Observation([{"role": "user", "content": "sleep 1"}], 0.5)
    assert step(pool, answers, "end", 7) == Observation([{"role": "user", "content": "end 2"}], 0.5, done=True)
    pool.end(0)
    pool.reset(0, ROW)  # a key comes again, with an environment of its own
    answers(pool, [0])
    assert step(pool, answers, "a").messages[0]["content"] == "a 1" and seen.read_text() == "closed"


def test_calls_nested_too_deep_are_told_to_the_model_and_end_no_process(make_pool, answers):
    pool = make_pool("calculator", tool_format="hermes", limit_s=30.0)
    for key in range(4):
        pool.reset(key, {"prompt": [{"role": "user", "content": "?"}]})
    answers(pool, range(4))
    for key, depth in enumerate((60, 70, 850, 940)):
        call = f'{{"name": "calc", "arguments": {{"expression": {"[" * depth}{"]" * depth}}}}}'
        pool.step(key, Turn(f"<tool_call>{call}</tool_call>", 0))
    found = [answer.messages[0]["content"] for _, answer in sorted(answers(pool, range(4)).items())]
    assert found[0].startswith("error: argument 'expression': [[[[")
    assert found[1:] == ["error: the call cannot be read: it is no JSON (nested too deep)"] * 3


def test_the_last_environment_of_a_process_is_closed_at_once(make_pool, answers, tmp_path):
    pool, seen = make_pool("Table", ENVIRONMENT), tmp_path / "closed"
    pool.reset(0, {**ROW, "extra_info": str(seen)})
    answers(pool, [0])
    pool.end(0)
    until = time.monotonic() + 60
    while not seen.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert seen.exists(), "without another poll"


def test_a_full_disk_stops_no_environment(make_pool, answers, monkeypatch, tmp_path):
    """The note of whose code is at work is kept in memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    pool = make_pool("Table", ENVIRONMENT)
    begin(pool, answers, [0])
    assert step(pool, answers, "ok").messages[0]["content"] == "ok 1"


def test_a_call_that_fails_costs_its_own_conversation_alone(make_pool, answers, capfd, monkeypatch):
    # On a busy machine too calls that do not hang end in time, and those that hang are interrupted before their process is ended
    monkeypatch.setattr(rlx.environments.environment_pool, "SLACK_S", 20.0)
    pool = make_pool("Table", ENVIRONMENT, limit_s=4.0, memory_limit_gb=2.0)
    begin(pool, answers, range(40))
    kinds = {
        **dict.fromkeys(("hang", "loop", "wait", "stubborn"), "timeout"),
        **dict.fromkeys(("sys.exit", "raise", "stop"), "error"),
        **dict.fromkeys(("none", "NaN", "text", "fields", "reward", "role", "empty", "long", "object", "info", "huge", "digits"), "nonsense"),
        **dict.fromkeys(("deep", "done"), "nonsense"),
        "memory": "memory",
    }  # fmt: skip
    for key, text in enumerate(kinds):
        pool.step(key, Turn(text, 0))
    found = answers(pool, range(len(kinds)))
    assert {text: found[key].kind for key, text in enumerate(kinds)} == kinds
    reasons = {text: found[key].reason for key, text in enumerate(kinds)}
    line = 1 + ENVIRONMENT.splitlines().index('            case "raise": raise KeyError("k")')
    assert reasons["raise"] == f"raised KeyError (mine.py:{line}): 'k'" and reasons["wait"] == "took longer than 4 s"
    for key, (text, kind) in enumerate(kinds.items()):
        frames = re.findall(r'File "(.*)", line', found[key].traceback)
        has_frames = kind != "nonsense" and text not in ("wait", "stubborn")
        assert {Path(file).name for file in frames} == ({"mine.py"} if has_frames else set()), "no frame of rlx"
    own = found[list(kinds).index("raise")].traceback.splitlines()
    assert (own[0], own[-1]) == ("Traceback (most recent call last):", "KeyError: 'k'")
    assert (
        "reward=nan, expected a finite number" in reasons["NaN"]
        and "bytes, expected at most 1,048,576" in reasons["long"]
    )
    others = range(len(kinds), 40)
    for key in others:
        pool.step(key, Turn("print" if key == 39 else "surrogates" if key == 38 else "ok", 0))
    found = answers(pool, others)
    assert found[38].messages[0]["content"] == "a?b" and found[30].messages[0]["content"] == "ok 1"
    assert "x" * 10**5 in capfd.readouterr().err, "shown, but not as output of the run"


@pytest.mark.slow
@pytest.mark.parametrize("text", ["hang in C", "exit", "segfault", "forge", "no JSON"])
def test_a_process_that_ends_costs_the_conversation_at_work_and_no_other(make_pool, answers, monkeypatch, text):
    """Conversations beside it begin again, with their turns so far: one at its next step, one whose step was open."""
    if text == "hang in C":  # its end is waited for
        monkeypatch.setattr(rlx.environments.environment_pool, "SLACK_S", 1.0)
    pool = make_pool("Table", ENVIRONMENT, limit_s=2.0)
    begin(pool, answers, range(3))
    assert [step(pool, answers, "ok", key).messages[0]["content"] for key in (1, 2)] == ["ok 1"] * 2
    pool.step(0, Turn(text, 0))
    pool.step(1, Turn("ok", 1))
    found = answers(pool, [0, 1])
    assert isinstance(found[0], Failure) and found[0].kind == ("timeout" if text == "hang in C" else "crash")
    again = [found[1], step(pool, answers, "ok", 2)]
    assert [answer.messages[0]["content"] for answer in again] == ["ok 2"] * 2
    begin(pool, answers, [0])
    assert step(pool, answers, "ok") == Observation([{"role": "user", "content": "ok 1"}], 0.5)


def test_a_conversation_does_not_begin_again_for_ever(make_pool, answers, monkeypatch):
    monkeypatch.setattr(rlx.environments.environment_pool, "MOST_LOSSES", 2)
    pool = make_pool("Table", ENVIRONMENT)
    begin(pool, answers, range(5))
    for key in range(3):
        assert step(pool, answers, "exit", key).kind == "crash"
        if key < 2:
            assert step(pool, answers, "ok", 3).messages[0]["content"] == f"ok {key + 1}", "with all its turns so far"
    failure = step(pool, answers, "ok", 3)
    assert failure.kind == "crash" and "another conversation's call ended its process" in failure.reason
    assert step(pool, answers, "ok", 4).messages, "without a turn it lost nothing"


def test_a_conversation_that_begins_again_must_get_the_same_answers(make_pool, answers):
    """But for `info`: a tool may take another time."""
    pool = make_pool("Table", ENVIRONMENT)
    begin(pool, answers, range(3))
    step(pool, answers, "clock", 1)
    assert step(pool, answers, "seconds", 2).info["calls"]
    step(pool, answers, "exit", 0)
    failure = step(pool, answers, "ok", 1)
    assert failure.kind == "crash" and "an answer changed" in failure.reason
    assert step(pool, answers, "ok", 2).messages[0]["content"] == "ok 2"


def test_a_process_that_ends_by_itself_is_nobodys_fault(make_pool, answers, tmp_path):
    """Here a timer that a conversation has left behind ends it while nobody's code is at work."""
    pool = make_pool("Table", ENVIRONMENT)
    begin(pool, answers, range(2))
    pool.step(0, Turn("exit later once", 0))
    pool.step(1, Turn("sleep", 0))
    found = answers(pool, range(2))
    assert (tmp_path / "exited").exists()
    for key, text in enumerate(["exit later once 1", "sleep 1"]):
        assert found[key] == Observation([{"role": "user", "content": text}], 0.5), "as if no process had ended"
    begin(pool, answers, [2])
    twice = step(pool, answers, "exit later", 2)
    assert twice == Failure("ended its process (exit code 3)", "crash"), "it did so in both of its processes"


def test_a_reset_that_was_open_beside_another_is_tried_once_more(make_pool, answers):
    pool = make_pool("Table", ENVIRONMENT)
    pool.reset(0, {**ROW, "prompt": "crash"})
    pool.reset(1, ROW)
    found = answers(pool, [0, 1])
    assert found[0] == Failure("ended its process (exit code 3)", "crash") and found[1].messages
    pool.reset(3, {**ROW, "extra_info": object()})
    assert "cannot be sent" in answers(pool, [3])[3].reason


@pytest.mark.slow
def test_nothing_waits_for_a_process_that_does_not_read(make_pool, answers, monkeypatch):
    monkeypatch.setattr(rlx.environments.environment_pool, "SLACK_S", 1.0)
    pool = make_pool("Table", ENVIRONMENT, limit_s=8)  # in which another process starts, also on a busy machine
    begin(pool, answers, range(8))
    pool.step(0, Turn("hang in C", 0))
    pool.flush()
    for key in range(1, 8):
        pool.step(key, Turn("z" * 10**6, 0))
    pool.reset(9, {**ROW, "prompt": "late"})
    # The code in C never ends, nor would a write that waits for it.
    found = answers(pool, [*range(8), 9])
    failed = {key: each.kind for key, each in found.items() if isinstance(each, Failure)}
    assert failed == {0: "timeout"} and found[9].messages[0]["content"] == "late"
    assert all(found[key].messages[0]["content"] == f"{'z' * 10**6} 1" for key in range(1, 8)), "in another process"


def command_of(process):
    with contextlib.suppress(psutil.Error):  # another child of this process, which has just ended
        return process.cmdline()
    return []


def test_processes_end_with_the_pool(make_pool, answers):
    own = psutil.Process(os.getpid())
    others = own.children()  # of pools in tests before this one
    pool = make_pool("Table", ENVIRONMENT, processes=2)
    begin(pool, answers, range(3))
    pool.step(0, Turn("stubborn", 0))
    assert pool.poll() == []
    named = (each for each in own.children() if "rlx.environments.environment_process" in command_of(each))
    mine = [each for each in named if each not in others]
    assert len(mine) == 2
    pool.close()
    assert not any(each.is_running() for each in mine)


@pytest.mark.parametrize(("text", "expected"), [("1 / 0", "ZeroDivision"), ("import os; os._exit(4)", "exit code 4")])
def test_an_environment_that_cannot_be_loaded_is_an_error(make_pool, text, expected):
    pool = make_pool("Table", text)
    pool.reset(0, ROW)
    with pytest.raises(UserCodeError, match=expected):
        pool.poll(60.0)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (
            "class Table:\n    def reset(self, row): ...",
            "Table",
            "is a class without step, expected a class with reset",
        ),
        (
            "class Table:\n    def reset(self): ...\n    def step(self, turn): ...",
            "Table",
            "cannot be called with one argument",
        ),
        ("class Other: ...", "Table", "has no 'Table'"),
        (None, "tabel", "expected one of"),
        (None, "calculater", "calculator"),
    ],
)
def test_what_is_no_environment_is_an_error(tmp_path, text, name, expected):
    path = tmp_path / "mine.py"
    path.write_text(text or "")
    with pytest.raises(UserCodeError, match=expected):
        EnvironmentSpec(name, text and str(path)).load()
