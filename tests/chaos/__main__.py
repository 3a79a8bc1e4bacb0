"""`python tests/chaos --runs 50 --seed 0`: breaks runs in random ways, and compares each with a run that nothing happened to.

Nobody touches a run after its fault. A command that was killed itself is given once more, as systemd would do. The last lines
are a table of faults and outcomes; the exit code is the number of runs that ended wrong.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from faults import ENDS_THE_COMMAND, FAULTS, Plan, Run, plans, wait_for
from task import LIMIT_S, STEPS, command_in, newest
from trajectory import Trajectory, differences, of_run

COMMANDS = 3  # times that the command is given when it is killed


class Outcome(NamedTuple):
    """How one broken run went.

    Args:
        plan: the fault.
        done: what was done in fact.
        wrong: differences to the unbroken run, or why it did not end.
        restarts: of the driver, by the supervisor.
        commands: times that the command was given.
        wall_s: seconds of all.
        recovery_s: longest time from the notice of a restart, or from another start of the command, to the next row.
    """

    plan: Plan
    done: str
    wrong: list[str]
    restarts: int
    commands: int
    wall_s: float
    recovery_s: float

    def row(self) -> str:
        """Return a line of the table."""
        result = "ok" if not self.wrong else "; ".join(self.wrong)
        seed, fault, moment = self.plan
        return f"{seed:5} {fault:22} {moment:14} {self.done[:44]:44} {self.restarts:8} {self.commands:8} {self.recovery_s:5.0f} {self.wall_s:5.0f}  {result}"


HEADER = (
    f"{'seed':>5} {'fault':22} {'moment':14} {'done':44} {'restarts':>8} {'commands':>8} {'lost':>5} {'s':>5}  outcome"
)


def start(folder: Path, log: Path, extra: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command; its output is appended to `log`."""
    command, environment = command_in(folder, extra)
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder.parent)


def unbroken(folder: Path, extra: Sequence[str]) -> Trajectory:
    """Run the command once without a fault."""
    folder.mkdir(parents=True)
    process = start(folder, folder.with_suffix(".log"), extra)
    if process.wait(LIMIT_S) != 0:
        raise SystemExit(folder.with_suffix(".log").read_text()[-3000:])
    return of_run(newest(folder))


def broken(plan: Plan, expected: Trajectory, folder: Path, extra: Sequence[str]) -> Outcome:
    """Run the command with a fault, again as often as the fault ends it, and compare."""
    log = folder.with_suffix(".log")
    folder.mkdir(parents=True)
    on_small_disk = plan.fault == "fill disk" and mount(folder)
    began_s = time.monotonic()
    process = start(folder, log, extra)
    draw = random.Random(plan.seed)
    run = Run(process.pid, folder, began_s)
    clock = Clock(folder, log)
    done = "the run was over" if not wait_for(plan.moment, run, draw, STEPS) else FAULTS[plan.fault](run, draw)
    commands, code = 1, clock.until_end_of(process)
    may_end = plan.fault in ENDS_THE_COMMAND or "supervisor" in done
    while code != 0 and may_end and commands < COMMANDS:
        clock.notice()
        commands, process = commands + 1, start(folder, log, extra)
        code = clock.until_end_of(process)
    wall_s = time.monotonic() - began_s
    text = log.read_text(errors="replace")
    wrong = [f"exit code {code}"] if code != 0 else differences(expected, of_run(newest(folder)))
    outcome = Outcome(plan, done, wrong, text.count("rlx restart "), commands, wall_s, clock.longest_s)
    if on_small_disk:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    if not wrong:
        shutil.rmtree(folder)
    return outcome


class Clock:
    """Measures the time from the notice of a failure to the next row.

    Attributes:
        longest_s: of all failures so far.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self.longest_s = 0.0
        self._folder, self._log, self._restarts = folder, log, 0
        self._noticed: float | None = None

    def notice(self) -> None:
        """A failure is known now."""
        self._noticed = time.time()

    def until_end_of(self, process: subprocess.Popen[bytes]) -> int | None:
        """Wait for the end of a command and return its exit code; None: it had to be killed."""
        deadline_s = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.5)
            self._look()
        if self._noticed is not None:
            self.longest_s, self._noticed = max(self.longest_s, time.time() - self._noticed), None
        if process.poll() is None:
            process.kill()
            process.wait()
            return None
        return process.returncode

    def _look(self) -> None:
        restarts = self._log.read_text(errors="replace").count("rlx restart ")
        if restarts > self._restarts:
            self._restarts = restarts
            self.notice()
        if self._noticed is None:
            return
        files = sorted(self._folder.glob("*/metrics.jsonl"))
        lines = files[-1].read_text().splitlines() if files else []
        last = json.loads(lines[-1])["time"] if lines and lines[-1].endswith("}") else 0.0
        if last > self._noticed:
            self.longest_s, self._noticed = max(self.longest_s, last - self._noticed), None


def mount(folder: Path) -> bool:
    """Mount a small disk there, so that filling it harms nothing else."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    return True


def main() -> int:
    """Parse the command line, run the plans and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first; run N has this seed + N")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this one; may be given several times")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/rlx_chaos"), help="for runs and logs")
    options, extra = parser.parse_known_args()
    base = options.folder / time.strftime("%Y-%m-%d_%H-%M-%S")
    expected = unbroken(base / "unbroken", extra)
    print(f"unbroken: {len(expected.rows)} rows, weights {expected.weights[:12]}; logs in {base}\n{HEADER}", flush=True)
    outcomes = []
    for plan in plans(options.seed, options.runs, tuple(options.fault or FAULTS)):
        outcomes.append(broken(plan, expected, base / f"seed_{plan.seed}", extra))
        print(outcomes[-1].row(), flush=True)
        with (base / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(outcomes[-1]._asdict()) + "\n")
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    print(f"{len(outcomes) - wrong} of {len(outcomes)} runs ended as the unbroken one")
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
