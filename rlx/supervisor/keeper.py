"""The process that keeps watch: it starts the driver, listens to it, and decides with `policy` what follows its end."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rlx.errors import kernel_line
from rlx.processes.child import end_with
from rlx.program import continuing
from rlx.step_folders import steps_in
from rlx.supervisor import family, link


class End(NamedTuple):
    """The end of a driver that had not finished."""

    reason: str  # one line
    step: int  # in which it ended; 0: before the first
    # Equal when the same error comes again, such as "OutOfMemoryError in actor.update"; empty if a process or connection was lost
    error: str = ""
    curable: bool = True  # whether another attempt may end otherwise; False for a mistake in the user's code or data

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}" if self.step else self.reason


def refusal(ends: Sequence[End], most: int) -> str | None:
    """Return why the run is not started again after its last end, or None if it is; `most` is `trainer.max_restarts`."""
    *before, last = ends
    if not last.curable:
        return "a restart would end the same way"
    if last.error and any((end.step, end.error) == (last.step, last.error) for end in before):
        return f"the same error came twice in step {last.step}, so another restart would end the same way"
    if last.error == link.OUT_OF_MEMORY and last.step <= 1:
        return "a restart would need as much memory"
    if len(before) >= most:
        return f"no restart is left (trainer.max_restarts={most})" if most else "trainer.max_restarts=0"
    return None


HINT = "; trainer.save_freq=20 saves every 20 steps"
DONE, FAILED, FAULTY = 0, 1, 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BY_SIGNAL: dict[int | None, int] = {128 + signum: signum for signum in SIGNALS}  # exit code -> signal
MOST_BEFORE_IT_BEGINS = 1  # restarts of a driver that was killed before it could tell `trainer.max_restarts`
TICK_S = 0.3  # between two looks at the driver and at Ray's processes
FROZEN_S = 20.0  # a driver suspended for this long is lost
DRIVER_ENDING_S = 15.0  # for a driver that failed: to close its loggers
PROBE_EVERY_S, PROBES = 5.0, 4  # the head of a cluster that does not answer so many times in a row is lost


class Driver:
    """One driver process and what it has told; `folder` is that of the run that it continues, `restarts` why others ended."""

    def __init__(self, command: Sequence[str], folder: str | None, restarts: Sequence[str]) -> None:
        self._pipe, inherited = os.pipe()
        os.set_blocking(self._pipe, False)
        own = {link.DESCRIPTOR: str(inherited), link.RESTARTS: json.dumps(list(restarts))}
        keeper = os.getpid()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,  # reading the terminal from the background would suspend it
            env={**os.environ, **own, **({link.FOLDER: folder} if folder else {})},
            pass_fds=[inherited],
            process_group=0,  # the terminal sends Ctrl-C to the supervisor alone, which passes it on
            preexec_fn=lambda: end_with(keeper),
        )
        os.close(inherited)
        self.pid = self._process.pid
        self._unread = b""
        self._end_by_s = float("inf")
        self._next_probe_s, self._unanswered = 0.0, 0
        self._ray: dict[str, int] = {}
        self._is_ray_known = False
        self._suspended_looks = 0
        self.facts: dict[str, Any] = {"folder": folder}

    @property
    def code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, other than that of an assertion in Ray's code, which follows from a loss."""
        return self.code is not None and self.code < 0 and self.code != -signal.SIGABRT

    def wait(self) -> None:
        """Wait a tick for its end, and kill it if its time is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(TICK_S)
        if time.monotonic() > self._end_by_s:
            family.end_all(self.pid)

    def listen(self) -> None:
        """Take in what it has told since the last call."""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._pipe, 1 << 16):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self.facts |= json.loads(line)
        if "end" in self.facts:
            self.end_within(DRIVER_ENDING_S)

    def ask_to_end(self, signum: int) -> None:
        """Pass a signal on; a driver that is not ready for it, or gets another one, is killed."""
        if "grace_s" not in self.facts or self._end_by_s < float("inf"):
            family.end_all(self.pid)
            return
        self._process.send_signal(signum)
        self.end_within(self.facts["grace_s"])

    def end_within(self, seconds: float) -> None:
        """Set the time after which `wait` kills it; the first call counts."""
        self._end_by_s = min(self._end_by_s, time.monotonic() + seconds)

    def lost(self) -> str | None:
        """Return in words which part of Ray has ended or does not answer, or None."""
        phase = self.facts.get("ray")
        if phase is None:
            self._ray, self._is_ray_known = {}, False
        elif not self._is_ray_known:  # the search ends when Ray runs
            self._ray = family.ray_processes(self.pid) | self._ray
            self._is_ray_known = phase == "runs"
        for name, pid in self._ray.items():
            if family.is_dead(pid):
                return f"{name} of Ray (pid {pid}) died"
        head = self.facts.get("head")
        if head and time.monotonic() > self._next_probe_s:
            self._next_probe_s = time.monotonic() + PROBE_EVERY_S
            self._unanswered = 0 if _answers(head) else self._unanswered + 1
            if self._unanswered == PROBES:
                return f"the head of the Ray cluster at {head} has not answered for {PROBES * PROBE_EVERY_S:.0f} s"
        return None

    def is_frozen(self) -> bool:
        """Whether it has been suspended for FROZEN_S. It cannot tell of itself, and no worker need be there to miss it."""
        # Looks are counted, because time passes while this process is suspended, too.
        self._suspended_looks = self._suspended_looks + 1 if family.status_of(self.pid) == psutil.STATUS_STOPPED else 0
        return self._suspended_looks * TICK_S >= FROZEN_S

    def close(self) -> None:
        """End what is left of it and of all processes it started."""
        family.end_all(self.pid)
        self.listen()
        os.close(self._pipe)
        self._process.wait()


class Keeper:
    """Starts drivers by a command until the run is over."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._signals: list[int] = []
        self._ends: list[End] = []
        self._most = MOST_BEFORE_IT_BEGINS
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, lambda number, frame: self._signals.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # see rlx/main_ppo.py
        family.adopt_orphans()

    def keep(self) -> int:
        """Run to the end and return the exit code: DONE, FAILED, FAULTY, or 128 + N if signal N came before an end that is not DONE."""
        folder = None
        while True:
            driver = Driver(self._command, folder, [end.reason for end in self._ends])
            try:
                loss = self._watch(driver)
            finally:
                driver.close()
            facts, code = driver.facts, driver.code
            has_begun, was_killed = "max_restarts" in facts, code is not None and code < 0
            is_over = code in (DONE, FAULTY, *BY_SIGNAL) or not (has_begun or was_killed)
            why = None
            if not is_over:
                self._most = facts.get("max_restarts", self._most)
                self._ends.append(end_of(facts, code, loss, driver.pid))
                why = refusal(self._ends, self._most)
            if is_over or why is not None or self._signals:
                return self._end(facts, code, why)
            _remove(facts)
            folder = facts["folder"]
            self._say(f"restart {len(self._ends)} of {self._most}: {self._ends[-1]}")

    def _end(self, facts: dict[str, Any], code: int | None, why: str | None) -> int:
        """Say how the run ended and return the exit code; `why` it is not started again, unless it is done."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # from here on none can change the exit code
        number = self._signals[0] if self._signals and code != DONE else BY_SIGNAL.get(code)
        if number is None and why is not None:
            *before, last = self._ends
            for at, end in enumerate(before, start=1):
                self._say(f"restart {at} was because {end}")
            told = "end" in facts  # such a driver has also printed it
            if before or not told:
                self._say(f"stopped: {why}" if told else f"stopped: {last}; {why}")
            return FAILED
        if number is not None:
            self._say(_interrupted(number, facts))
            step = 0 if facts.get("saved") else facts.get("step", 0)  # nothing is lost then
            if left := what_is_left(facts.get("overrides", ()), facts.get("folder"), step):
                self._say(left)
        _remove(facts)
        if number is None and code == FAULTY and self._ends:
            self._say(
                "stopped: the run began without these faults, so the cluster, the machine or a file has changed since"
            )
            return FAILED  # what restarts the command may try again later
        return code or DONE if number is None else 128 + number

    def _watch(self, driver: Driver) -> str | None:
        """Return after the driver's end. If Ray died first or the driver is frozen, return that; `close` then kills it."""
        passed_on = 0
        while driver.code is None:
            driver.wait()
            family.reap_orphans(driver.pid)
            came = len(self._signals)
            driver.listen()  # after the look at the signals: what the driver told before one counts for it
            for signum in self._signals[passed_on:came]:
                driver.ask_to_end(signum)
            passed_on = came
            if passed_on or "end" in driver.facts or driver.was_killed:  # Ray's processes end with it
                continue
            if driver.is_frozen():
                return f"the driver (pid {driver.pid}) was frozen for {FROZEN_S:.0f} s"
            if (loss := driver.lost()) is not None:
                driver.listen()  # it may have told meanwhile that it ends Ray
                if driver.facts.get("ray") or driver.facts.get("head"):
                    return loss
        return None

    def _say(self, text: str) -> None:
        print(f"rlx {text}", file=sys.stderr, flush=True)


def end_of(facts: dict[str, Any], code: int | None, loss: str | None, pid: int) -> End:
    """Return how a driver ended, from what it told, its exit code and what Ray lost before."""
    step = int(facts.get("step", 0))
    if "end" in facts:
        return End(**facts["end"], step=step)
    if loss is not None:
        return End(loss, step)
    if code is None or code >= 0:
        return End(f"the driver ended without a message (exit code {code})", step)
    reason = f"the driver (pid {pid}) was killed by {signal.Signals(-code).name}"
    if line := kernel_line(pid):
        return End(f"{reason}: {line}", step, link.OUT_OF_MEMORY)
    return End(reason, step)


def _interrupted(number: int, facts: dict[str, Any]) -> str:
    by = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    at = f" in step {facts['step']}" if facts.get("step") else ""
    saved = f"; {facts['saved']} was saved" if facts.get("saved") else ""
    return f"{by}{at}{saved}" + (f"; the run's folder is {facts['folder']}" if facts.get("folder") else "")


def what_is_left(overrides: Sequence[str], folder: str | None, step: int) -> str | None:
    """Return which steps of an interrupted run are saved, and in a line of its own the command that continues it.

    `step` had begun; 0: none, for which None is returned without a checkpoint.
    """
    saved = steps_in(Path(folder, "checkpoints")) if folder else {}
    newest = max(saved, default=0)
    finished = max(step - 1 - newest, 0)
    lost = f"; finished steps that are lost: {finished}" if finished else ""
    if not saved:
        is_set = any(each.startswith("trainer.save_") for each in overrides)
        return f"ended without a checkpoint{lost}{'' if is_set else HINT}" if step else None
    again = continuing(saved[newest], overrides)
    return f"ended; newest checkpoint: step {newest}{lost}; to continue from it:\n{again}"


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2.0):
        return True
    return False


def _remove(facts: dict[str, Any]) -> None:
    if facts.get("scratch"):
        shutil.rmtree(facts["scratch"], ignore_errors=True)
