"""What reward functions can do to a run: nothing. And what they may rely on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlx.rewards.function import Function
from rlx.rewards.pool import NotSendable, ProcessPool, RewardCall
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

def listed(data_sources, solution_strs, ground_truths, extra_infos, factor):
    return [{"score": factor * len(s), "of": len(solution_strs)} for s in solution_strs]
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
    with ProcessPool(size=2, memory_limit_gb=2.0, at_once=5) as pool:
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
    assert counts.retries >= 4 and counts.processes >= 6
    assert "x" * 10**5 in capfd.readouterr().err, "what a function prints is shown, but not as output of the run"


def test_many_calls_keep_their_order_and_a_process_loads_once(pool, score):
    outcomes, counts = pool.run([call(score, "x" * (n % 7)) for n in range(1000)])
    assert scores(outcomes) == [n % 7 for n in range(1000)] and counts == (0, 0)
    reports = [outcome.answers[0] for outcome in outcomes]
    assert {report["loads"] for report in reports} == {1.0}
    last = {report["process"]: report["calls"] for report in reports}
    assert 1 <= len(last) <= 2 and sum(last.values()) >= 1000, "its module keeps what it counts"


def test_a_call_that_hangs_is_told_from_its_neighbours(pool, hasty):
    outcomes, counts = pool.run([call(hasty, text) for text in ["a"] * 15 + ["hang in C"] + ["a"] * 16])
    assert scores(outcomes) == [1.0] * 15 + ["timeout"] + [1.0] * 16
    assert counts.retries >= 1


def test_when_nothing_works_the_rest_is_not_tried(pool, score):
    outcomes, counts = pool.run([call(score, "exit")] * 300)
    assert [outcome.kind for outcome in outcomes] == ["crash"] * 300 and counts.processes < 60


def test_what_a_function_started_ends_with_it_and_its_time_at_once(pool, hasty, tmp_path):
    (outcome,), counts = pool.run([call(hasty, "leave a process", str(tmp_path / "pids"))])
    assert outcome.kind == "timeout" and counts == (0, 1), "it was alone, so there is nothing to find out"
    started = [
        psutil.Process(int(pid)) for pid in (tmp_path / "pids").read_text().split() if psutil.pid_exists(int(pid))
    ]
    assert_ended(started)


def test_async_calls_run_side_by_side_up_to_the_limit(pool, path):
    judge = Function(path, "judge", LIMIT_S)
    pool.check(judge)
    outcomes, counts = pool.run([call(judge, text) for text in ["ok"] * 10 + ["late", "raise"] + ["ok"] * 10])
    assert scores(outcomes) == [1.0] * 10 + ["timeout", "error"] + [1.0] * 10
    assert counts == (0, 0), "a call that waits too long is cancelled, and its process stays"
    assert max(outcome.answers[0]["most"] for outcome in outcomes if outcome.answers) == 5.0
    (first,), _ = pool.run([call(judge)])
    (second,), _ = pool.run([call(judge)])
    assert first.answers[0]["loop"] == second.answers[0]["loop"], "sessions may be kept between batches"
    outcomes, counts = pool.run([call(judge, text) for text in ("ok", "block")])
    assert scores(outcomes) == [1.0, "timeout"] and counts == (0, 1)


def test_one_call_takes_a_list(pool, path):
    listed = Function(path, "listed", LIMIT_S, batched=True, options={"factor": 10})
    pool.check(listed)
    names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    (outcome,), _ = pool.run(
        [RewardCall(listed, dict(zip(names, (["d"] * 3, ["a", "bb", ""], [1] * 3, [{}] * 3), strict=True)), 3)]
    )
    assert outcome.answers == [{"score": s, "of": 3.0} for s in (10.0, 20.0, 0.0)]


def test_arguments_that_cannot_be_sent(pool, score):
    with pytest.raises(NotSendable, match="cannot pickle"):
        pool.run([call(score, truth=open(__file__))])  # noqa: SIM115
    assert scores(pool.run([call(score)])[0]) == [2.0]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import os; os._exit(4)", r"the import of .* ended its process \(exit code 4\)"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("def other(): ...", "has no 'compute_score'"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_before_the_first_call(write_module, text, what):
    with ProcessPool(1, None, 1) as pool, pytest.raises(UserCodeError, match=what):
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
from rlx.rewards.pool import RewardCall, ProcessPool

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
sample = {"data_source": "d", "solution_str": "hang in C", "ground_truth": None, "extra_info": {}}
with ProcessPool(2, None, 1) as pool:
    function = Function(sys.argv[1], "compute_score", 1000.0)
    pool.check(function)
    print("ready", flush=True)
    pool.run([RewardCall(function, sample)] * 2)
"""


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
    code = "import sys, rlx.rewards.process; print([m for m in ('torch', 'numpy', 'math_verify') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.home())
    assert done.stdout == "[]\n"
