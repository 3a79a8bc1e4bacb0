import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlx.errors import StorageError
from rlx.trainer import run_lock
from rlx.trainer.run_lock import LOCK_FILE, WATCHED_S, RunLock, RunLocked

HOLD = """
import sys, time
from pathlib import Path
from rlx.trainer.run_lock import RunLock

with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def change(folder: Path, **values: object) -> None:
    """Change the lock as if another host had written it."""
    file = folder / LOCK_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@contextmanager
def touched(file: Path, first_s: float) -> Iterator[None]:
    """Another host touches the file again and again, by a clock that shows `first_s` at the beginning."""
    ended, began_s = threading.Event(), time.time()

    def touch() -> None:
        while not ended.wait(0.1):
            os.utime(file, (now_s := first_s + time.time() - began_s, now_s))

    os.utime(file, (first_s, first_s))
    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_second_run_is_refused_with_process_host_and_time(tmp_path: Path, holder: subprocess.Popen):
    expected = (
        rf"belongs to the run of process {holder.pid} on {re.escape(socket.gethostname())} since 2\d{{3}}-.*still"
    )
    with pytest.raises(RunLocked, match=expected):
        RunLock(tmp_path)
    with pytest.raises(RunLocked):
        RunLock(tmp_path, stale_s=0), "on one machine the process counts, not the time"


def test_the_lock_of_a_killed_run_is_taken_over_at_once(tmp_path: Path, holder: subprocess.Popen):
    holder.kill()
    holder.wait()
    begin = time.monotonic()
    with RunLock(tmp_path) as lock:
        lock.check()
    assert time.monotonic() - begin < WATCHED_S and os.listdir(tmp_path) == []


def test_a_zombie_and_a_reused_process_number_hold_nothing(tmp_path: Path, holder: subprocess.Popen):
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it has ended and stays a zombie
    with RunLock(tmp_path):
        change(tmp_path, started="1")
        with RunLock(tmp_path) as lock:
            lock.check()
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("slow_s", [0, 3600], ids=["the same clock", "a clock set back"])
def test_another_hosts_lock_is_respected_while_it_is_touched(tmp_path: Path, slow_s: float):
    """The holder touched it a moment ago, but the server's clock may have gone on by an hour since."""
    with RunLock(tmp_path, beat_s=1000):
        change(tmp_path, machine="another", token="x")
        with touched(tmp_path / LOCK_FILE, time.time() - slow_s), pytest.raises(RunLocked, match="still runs"):
            RunLock(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("its_clock_s", [-1000.0, 0.0, 1000.0])
def test_another_hosts_lock_is_taken_over_once_it_is_not_touched_whatever_its_clock(tmp_path: Path, its_clock_s: float):
    file = tmp_path / LOCK_FILE
    with RunLock(tmp_path, beat_s=1000) as first:
        change(tmp_path, machine="another", token="x")
        now = time.time()
        os.utime(file, (now + its_clock_s, now + its_clock_s))
        with RunLock(tmp_path, stale_s=1.0), pytest.raises(RunLocked, match="has taken this run's folder"):
            first.check()
    assert not file.exists(), "the second removed its lock, the first left it alone"


def test_of_many_that_take_over_at_once_one_wins(tmp_path: Path):
    (tmp_path / LOCK_FILE).write_text("{}")
    os.utime(tmp_path / LOCK_FILE, (0, 0))
    won: list[RunLock] = []
    lost: list[RunLocked] = []

    def take() -> None:
        try:
            won.append(RunLock(tmp_path, beat_s=1000, watched_s=1.0))
        except RunLocked as fault:
            lost.append(fault)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    won[0].check()
    assert os.listdir(tmp_path) == [LOCK_FILE]


def test_a_run_that_ends_late_leaves_the_lock_of_the_one_that_has_taken_its_folder(tmp_path: Path, monkeypatch):
    """It slept for long. It looks at the lock at its end, and at that moment another host takes the folder over."""
    first = RunLock(tmp_path, beat_s=1000)
    change(tmp_path, machine="another")
    first._own = json.loads((tmp_path / LOCK_FILE).read_text())
    os.utime(tmp_path / LOCK_FILE, (0, 0))
    taken: list[RunLock] = []
    taking = threading.Thread(target=lambda: taken.append(RunLock(tmp_path, beat_s=1000, watched_s=0.0)))
    read = run_lock._read

    def read_and_wait(file: Path):
        found = read(file)
        if threading.current_thread() is threading.main_thread() and not taking.ident:
            taking.start()
            taking.join(2.0)  # the other one may have to wait for the first
        return found

    monkeypatch.setattr(run_lock, "_read", read_and_wait)
    first.__exit__()
    taking.join()
    taken[0].check()
    assert os.listdir(tmp_path) == [LOCK_FILE]


def test_a_folder_that_is_deleted_is_said_at_once_and_stops_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "run"
    folder.mkdir()
    with RunLock(folder, beat_s=0.05) as lock:
        (folder / LOCK_FILE).unlink()
        folder.rmdir()
        said, deadline_s = f"cannot write {folder / LOCK_FILE}: the folder is gone", time.monotonic() + 60
        while said not in caplog.text and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert said in caplog.text
        with pytest.raises(StorageError, match="the folder is gone"):
            lock.check()
