"""What reward functions can do to a run: nothing. And what they may rely on."""

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from rlx.processes.lines import BadAnswer
from rlx.rewards.function import Function
from rlx.rewards.scoring_pool import NotSendable, RewardCall, ScoringPool, to_outcome
from rlx.user_code import UserCodeError

FUNCTIONS = """
import asyncio, ctypes, os, subprocess, sys, time
from pathlib import Path

loads, calls, running, most = 0, 0, 0, 0
loads += 1

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if solution_str == "hang in C":
        return 9 ** 9 ** 9
    if solution_str == "leave a process":
        print(subprocess.Popen(["sleep", "1000"]).pid, file=open(ground_truth, "a"), flush=True)
        time.sleep(1000)
    if solution_str == "hang once" and not Path(ground_truth).exists():
        Path(ground_truth).touch()
        time.sleep(1000)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "exit once" and not Path(ground_truth).exists():
        Path(ground_truth).touch()
        os._exit(0)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "sys.exit":
        sys.exit("enough")
    if solution_str == "memory":
        return len(bytearray(3 * 10**9))
    if solution_str == "print":
        print("x" * 10**5)
    if solution_str == "object":
        return {"score": 1, "lock": __import__("threading").Lock(), "text": "y" * 10**7}
    return {"score": len(solution_str), "process": os.getpid(), "loads": loads, "calls": calls}

async def judge(data_source, solution_str, ground_truth, extra_info=None):
    global running, most
    running += 1
    most = max(most, running)
    try:
        if solution_str == "block":
            time.sleep(1000)
        await asyncio.sleep(1000 if solution_str == "late" else 0.02)
        if solution_str == "raise":
            raise SystemExit("no")
        return {"score": 1.0, "most": most, "loop": id(asyncio.get_running_loop()) % 1000}
    finally:
        running -= 1
"""
LIMIT_S, AMPLE_S = 1.5, 30.0
"""A call that does not hang ends within LIMIT_S on a busy machine too."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("code") / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


@pytest.fixture(scope="module")
def pool():
    with ScoringPool(size=2, memory_limit_gb=2.0, at_once=5) as pool:
        yield pool


@pytest.fixture(scope="module")
def score(path):
    return Function(path, "compute_score", AMPLE_S)


@pytest.fixture(scope="module")
def hasty(path):
    return Function(path, "compute_score", LIMIT_S)


def call(function, text="ok", truth=None):
    return RewardCall(function, {"data_source": "d", "solution_str": text, "ground_truth": truth, "extra_info": {}})


def scores(outcomes):
    return [outcome.answers[0]["score"] if outcome.answers else outcome.kind for outcome in outcomes]


def test_what_fails_takes_nothing_with_it(pool, score, hasty, tmp_path, capfd):
    bad = ["hang in C", "exit", "segfault", "memory", "sys.exit", "print", "object"]
    texts = ["a"] * 7 + bad + ["bb"] * 7
    once = [call(score, "exit once", str(tmp_path / "seen"))]
    function = {"hang in C": hasty}
    outcomes, counts = pool.run([*(call(function.get(text, score), text) for text in texts), *once])
    got = dict(zip(bad, outcomes[7:14], strict=True))
    assert scores(outcomes[:7]) == [1.0] * 7 and scores(outcomes[14:21]) == [2.0] * 7
    assert {text: outcome.kind for text, outcome in got.items()} == {
        **{"hang in C": "timeout", "exit": "crash", "segfault": "crash", "memory": "crash", "sys.exit": "error"},
        **{"print": "", "object": ""},
    }
    assert got["exit"].fault == "ended its process (exit code 3)"
    assert got["segfault"].fault == "ended its process (SIGSEGV)"
    assert got["memory"].fault == "ran out of memory (reward.memory_limit_gb)"
    assert got["sys.exit"].fault == "raised SystemExit: enough" and "sys.exit(" in got["sys.exit"].traceback
    assert got["object"].answers == [{"score": 1.0}]
    assert scores(outcomes[21:]) == [9.0], "a process that ended by chance costs no sample"
    assert counts["retries"] >= 4 and counts["processes"] >= 6
    assert "x" * 10**5 in capfd.readouterr().err, "what a function prints is shown, but not as output of the run"


def test_many_calls_keep_their_order_and_a_process_loads_once(pool, score):
    outcomes, counts = pool.run([call(score, "x" * (n % 7)) for n in range(1000)])
    assert scores(outcomes) == [n % 7 for n in range(1000)] and not counts.total()
    reports = [outcome.answers[0] for outcome in outcomes]
    assert {report["loads"] for report in reports} == {1.0}
    last = {report["process"]: report["calls"] for report in reports}
    assert 1 <= len(last) <= 2 and sum(last.values()) >= 1000, "its module keeps what it counts"


def test_a_call_that_hangs_is_told_from_its_neighbours(pool, hasty):
    outcomes, counts = pool.run([call(hasty, text) for text in ["a"] * 12 + ["hang in C"] + ["a"] * 19])
    assert scores(outcomes) == [1.0] * 12 + ["timeout"] + [1.0] * 19
    assert counts["retries"] >= 1


def test_when_nothing_works_the_rest_is_not_tried(pool, score):
    outcomes, counts = pool.run([call(score, "exit")] * 300)
    assert [outcome.kind for outcome in outcomes] == ["crash"] * 300 and counts["processes"] < 60


def test_what_a_function_started_ends_with_it_and_its_time_at_once(pool, hasty, tmp_path):
    (outcome,), counts = pool.run([call(hasty, "leave a process", str(tmp_path / "pids"))])
    assert outcome.kind == "timeout" and counts == Counter(processes=1), "it was alone, so there is nothing to find out"
    started = [
        psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split() if psutil.pid_exists(int(pid))
    ]
    assert_ended(started)


@pytest.mark.slow
def test_async_calls_run_side_by_side_up_to_the_limit(pool, path):
    judge = Function(path, "judge", LIMIT_S)
    pool.check(judge)
    outcomes, counts = pool.run([call(judge, text) for text in ["ok"] * 10 + ["late", "raise"] + ["ok"] * 10])
    assert scores(outcomes) == [1.0] * 10 + ["timeout", "error"] + [1.0] * 10
    assert not counts.total(), "a call that waits too long is cancelled, and its process stays"
    assert max(outcome.answers[0]["most"] for outcome in outcomes if outcome.answers) == 5.0
    (first,), _ = pool.run([call(judge)])
    (second,), _ = pool.run([call(judge)])
    assert first.answers[0]["loop"] == second.answers[0]["loop"], "sessions may be kept between batches"
    outcomes, counts = pool.run([call(judge, text) for text in ("ok", "block")])
    assert scores(outcomes) == [1.0, "timeout"] and counts == Counter(processes=1)


def test_calls_beside_other_work_have_the_outcomes_that_they_have_alone(pool, score, hasty, tmp_path):
    """On a busy machine a call may take too long, which is no fault of its sample."""
    texts = ["a", "exit", "sys.exit", "bb"]
    numbers = [
        *(pool.add(call(score, text)) for text in texts),
        pool.add(call(hasty, "hang once", str(tmp_path / "x"))),
    ]
    forgotten = pool.add(call(score))
    while pool.work(1, 0.5):
        assert len(pool.workers) <= 2
    pool.forget(forgotten)
    outcomes, counts = pool.take(numbers)
    assert scores([outcomes[number] for number in numbers]) == [1.0, "crash", "error", 2.0, 9.0]
    assert counts["processes"] == 3 and counts["retries"] >= 2
    unsendable = pool.add(call(score, truth=open(__file__)))  # noqa: SIM115
    assert not pool.work(1, 0.5), "this is no time to raise"
    with pytest.raises(NotSendable):
        pool.take([unsendable])


def test_arguments_that_cannot_be_sent(pool, score):
    with pytest.raises(NotSendable, match="cannot pickle"):
        pool.run([call(score, truth=open(__file__))])  # noqa: SIM115
    assert scores(pool.run([call(score)])[0]) == [2.0]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import os; os._exit(4)", r"the import of .* ended its process \(exit code 4\)"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_before_the_first_call(write_module, text, what):
    with ScoringPool(1, None, 1) as pool, pytest.raises(UserCodeError, match=what):
        pool.check(Function(write_module(text), "compute_score", LIMIT_S))


def assert_ended(processes):
    """A zombie has ended too: nobody has asked for its exit code yet."""
    deadline = time.monotonic() + 30
    while alive := [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


DRIVER = """
import signal, sys
from rlx.rewards.function import Function
from rlx.rewards.scoring_pool import RewardCall, ScoringPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
sample = {"data_source": "d", "solution_str": "hang in C", "ground_truth": None, "extra_info": {}}
with ScoringPool(2, None, 1) as pool:
    function = Function(sys.argv[1], "compute_score", 1000.0)
    pool.check(function)
    print("ready", flush=True)
    pool.run([RewardCall(function, sample)] * 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_its_driver_however_that_ends(path, stop):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert driver.stdout.readline() == b"ready\n"
    children = []
    deadline = time.monotonic() + 60
    while len(children) < 2 or any(child.cpu_times().user < 0.3 for child in children):  # they compute in C
        assert time.monotonic() < deadline
        time.sleep(0.05)
        children = psutil.Process(driver.pid).children(recursive=True)
    os.kill(driver.pid, stop)
    driver.wait(30)
    driver.stdout.close()
    assert_ended(children)


def test_a_process_imports_little():
    code = "import sys, rlx.rewards.scoring_process; print([m for m in ('torch', 'numpy', 'math_verify') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.home())
    assert done.stdout == "[]\n"


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


def test_a_pickle_and_a_forged_answer_lose_only_their_sample(write_module, tmp_path: Path):
    function = Function(write_module(HOSTILE), "compute_score", 30.0)
    texts = ["a", "pickle", "b", "forged", "c"]
    arguments = {"data_source": "d", "ground_truth": str(tmp_path / "ran"), "extra_info": {}}
    with ScoringPool(2, None, 1) as pool:
        outcomes, _ = pool.run([RewardCall(function, {**arguments, "solution_str": text}) for text in texts])
    assert [outcome.kind for outcome in outcomes] == ["", "crash", "", "crash", ""]
    assert outcomes[1].fault == "sent an answer that is no JSON, or too long"
    assert outcomes[3].fault == "sent an answer of another form than rlx's"
    assert not (tmp_path / "ran").exists(), "the driver has run what a reward process sent"


@pytest.mark.parametrize(
    "wrong",
    [
        *(None, 7, {}, [None], [0], ["0", *RIGHT[1:]], [1, *RIGHT[1:]], [5, *RIGHT[1:]]),
        *([0, [], "", "", ""], [0, RIGHT[1] * 2, "", "", ""], [0, RIGHT[1], "error", "", ""]),
        *([0, [], "nonsense", "", ""], [0, [], "error", None, ""], [0, [{"acc": 1.0}], "", "", ""]),
        *([0, [{"score": "1"}], "", "", ""], [0, [{"score": True}], "", "", ""], [0, [[]], "", "", ""]),
        *([0, [{"score": math.nan}], "", "", ""], [0, [{"score": 1e39}], "", "", ""]),
    ],
)
def test_an_answer_of_another_form_is_rejected(wrong):
    with pytest.raises(BadAnswer):
        to_outcome(wrong, {0: (0, 1)})


SPAWNS = """
import multiprocessing

def size(text):
    return len(text)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with multiprocessing.get_context(ground_truth).Pool(1) as pool:
        return pool.map(size, [solution_str])[0]
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_function_may_use_multiprocessing(write_module, method):
    function = Function(write_module(SPAWNS), "compute_score", AMPLE_S)
    with ScoringPool(1, None, 1) as pool:
        assert scores(pool.run([call(function, "abc", method)])[0]) == [3.0]
