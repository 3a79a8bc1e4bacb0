"""`python benchmarks/chaos --runs 50 --seed 0 --jobs 6`: breaks runs in random ways, and compares each with a run left alone.

Nobody touches a run after its fault. A command that was ended itself is given once more, as systemd would do. The last lines
are a table of faults and outcomes; the exit code is the number of runs that ended wrong.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from faults import ENDS_THE_COMMAND, FAULTS, OVER, SIGNALLED, Plan, Run, plans, wait_for
from outcome import RESTART, Clock, Trajectory, differences, end_what_is_left, new_mark, of_run, shared_files
from task import ENGINES, LIMIT_S, LOCAL_RAY, STEPS, make_model, newest, start

# After SIGKILL of the command Ray's agents ask the gcs_server, which is gone, for 60 s before they end.
SLOW_TO_END = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
COMMANDS = 3  # times that the command is given when it is ended


class Outcome(NamedTuple):
    """How one broken run went.

    Args:
        plan: the fault.
        done: what was done in fact.
        wrong: differences to the unbroken run, or why it did not end, or what it left.
        restarts: of the driver, by the supervisor.
        commands: times that the command was given.
        wall_s: seconds of all.
        lost_s: from the notice of each failure, or from another start of the command, to the next row.
        said: the lines that the commands printed about failures and ends.
    """

    plan: Plan
    done: str
    wrong: list[str]
    restarts: int
    commands: int
    wall_s: float
    lost_s: list[float]
    said: list[str]

    def row(self) -> str:
        """Return a line of the table."""
        result, (seed, fault, moment) = "; ".join(self.wrong) or "ok", self.plan
        lost = " ".join(f"{each:.0f}" for each in self.lost_s)
        return (
            f"{seed:5} {fault:20} {moment:13} {self.done[:40]:40} {self.restarts:8} {self.commands:8} {lost:>9} "
            f"{self.wall_s:5.0f}  {result}"
        )


HEADER = f"{'seed':>5} {'fault':20} {'moment':13} {'done':40} {'restarts':>8} {'commands':>8} {'lost s':>9} {'s':>5}  outcome"


class Ground(NamedTuple):
    """Where runs are broken.

    Args:
        base: folder of all runs and logs.
        extra: further overrides.
        deadline_s: monotonic time at which the last run must have ended.
    """

    base: Path
    extra: Sequence[str]
    deadline_s: float

    def start(self, folder: Path, added: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the command for a run's folder; its output is appended to a log beside it."""
        with folder.with_suffix(".log").open("ab") as output:
            return start(folder, self.extra, added, stdout=output, stderr=output, cwd=folder.parent)

    def end_of(self, process: subprocess.Popen[bytes]) -> int | None:
        """Wait for the end of a command and return its exit code; None: it took too long and was killed."""
        try:
            return process.wait(max(0.0, min(LIMIT_S, self.deadline_s - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def unbroken(ground: Ground) -> tuple[Trajectory, float]:
    """Run the command once without a fault; return what is left of it, and the seconds to its first row."""
    folder = ground.base / "unbroken"
    folder.mkdir()
    began_s = time.time()
    process = ground.start(folder, {})
    if process.wait(LIMIT_S) != 0:
        raise SystemExit(folder.with_suffix(".log").read_text()[-3000:])
    return of_run(newest(folder)), Run(process.pid, folder, 0.0).times()[0] - began_s


def broken(plan: Plan, expected: Trajectory, start_s: float, ground: Ground) -> Outcome:
    """Run the command with a fault, again as often as the fault ends it, and compare.

    Args:
        plan: the fault.
        expected: of the unbroken run.
        start_s: seconds from the command to the first row.
        ground: the place.
    """
    folder = ground.base / f"seed_{plan.seed}"
    folder.mkdir()
    if plan.fault == "fill disk":
        mount(folder)
    mark, ray = new_mark(), Path(tempfile.mkdtemp(prefix="rc"))
    added = {**mark, "RAY_TMPDIR": str(ray)}
    began_s = time.monotonic()
    with Clock(folder, folder.with_suffix(".log"), faults=2 if plan.moment == "resume" else 1) as clock:
        process = ground.start(folder, added)
        draw, run = random.Random(plan.seed), Run(process.pid, folder, start_s)
        has_come, files = wait_for(plan.moment, run, draw, STEPS), shared_files(mark)
        done = FAULTS[plan.fault](run, draw) if has_come else OVER
        commands, code = 1, ground.end_of(process)
        signalled = SIGNALLED.get(plan.fault) if done != OVER and code != 0 else None
        first = [f"exit code {code} after {plan.fault}"] * (signalled is not None and code != 128 + signalled)
        may_end = plan.fault in ENDS_THE_COMMAND or "supervisor" in done
        while code not in (0, None) and may_end and commands < COMMANDS:
            clock.notice()
            commands, process = commands + 1, ground.start(folder, added)
            code = ground.end_of(process)
    text = folder.with_suffix(".log").read_text(errors="replace")
    wrong = first + ([f"exit code {code}"] if code != 0 else differences(expected, of_run(newest(folder))))
    killed = "SIGKILL supervisor" in done
    wrong += [f"left: {each}" for each in end_what_is_left(mark) if not (killed and each.startswith(SLOW_TO_END))]
    if signalled is not None:
        wrong += [f"left: {each}" for each in [*ray.iterdir(), *filter(os.path.exists, files)]]
    shutil.rmtree(ray, ignore_errors=True)
    wall_s = time.monotonic() - began_s
    if plan.fault == "fill disk":
        subprocess.run(["umount", "-l", str(folder)], check=True)
    if not wrong:
        shutil.rmtree(folder)
    said = [line for line in text.splitlines() if line.startswith("rlx ")]
    return Outcome(plan, done, wrong, len(RESTART.findall(text)), commands, wall_s, clock.lost_s, said)


def mount(folder: Path) -> None:
    """Mount a small disk there, so that filling it harms nothing else."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True, capture_output=True)


def can_mount(base: Path) -> bool:
    """Whether this process may mount a disk."""
    try:
        mount(base)
    except (OSError, subprocess.CalledProcessError):
        return False
    subprocess.run(["umount", str(base)], check=True)
    return True


def summary(outcomes: Sequence[Outcome], planned: int) -> str:
    """Return the lines below the table."""
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    lost_s = [each for outcome in outcomes for each in outcome.lost_s] or [0.0]
    text = f"{len(outcomes) - wrong} of {len(outcomes)} runs ended as the unbroken one"
    if len(outcomes) < planned:
        text += f"; the time did not suffice for {planned - len(outcomes)} more"
    return f"{text}\nfrom notice to next row: median {median(lost_s):.0f} s, worst {max(lost_s):.0f} s ({len(lost_s)})"


def options_of() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line; what is not known are overrides of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first; run N has this seed + N")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each takes about two cores")
    parser.add_argument("--minutes", type=float, default=1e6, help="end after this time, also without all faults")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="only this one; may be given several times")
    parser.add_argument("--engines", action="store_true", help="sample with two vLLM engines, and break these too")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/rlx_chaos"), help="for runs and logs")
    return parser.parse_known_args()


def main() -> int:
    """Run the plans and print the table."""
    options, extra = options_of()
    began_s = time.monotonic()
    base = options.folder / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}"
    base.mkdir(parents=True)
    faults = tuple(options.fault or (each for each in FAULTS if options.engines or "engine" not in each))
    if "fill disk" in faults and not can_mount(base):
        faults = tuple(each for each in faults if each != "fill disk")
        print("without `fill disk`: this user may not mount a disk", flush=True)
    extra = [make_model(base / "model"), *LOCAL_RAY, *(ENGINES if options.engines else ()), *extra]
    ground = Ground(base, extra, began_s + 60 * options.minutes)
    expected, start_s = unbroken(ground)
    spent_s = time.monotonic() - began_s
    print(f"unbroken: first row after {start_s:.0f} s, end after {spent_s:.0f} s; logs in {base}\n{HEADER}", flush=True)
    outcomes = []

    def one(plan: Plan) -> None:
        if time.monotonic() + 2 * spent_s > ground.deadline_s:
            return
        outcome = broken(plan, expected, start_s, ground)
        if time.monotonic() > ground.deadline_s:
            return  # it was cut off
        outcomes.append(outcome)
        print(outcome.row(), flush=True)
        with (base / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(outcome._asdict()) + "\n")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, plans(options.seed, options.runs, faults)))
    print(summary(outcomes, options.runs))
    return min(sum(bool(outcome.wrong) for outcome in outcomes), 100)


if __name__ == "__main__":
    sys.exit(main())
