"""`python tests/chaos/signals.py --runs 20`: ends runs by SIGINT and SIGTERM at random moments and looks for what is left.

Each run must end with 130 or 143 and one line. No process, no folder of Ray and no file in /dev/shm may stay.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from leftovers import end_what_is_left, new_mark, shared_files
from task import LIMIT_S, LOCAL_RAY, make_model, start

FIRST_S = 0.15  # before, Python itself is starting and dies of the signal
ENOUGH_S = 40.0  # from the signal to the end


def length_of(folder: Path, extra: Sequence[str]) -> float:
    """Return the seconds of a run without a signal."""
    began_s = time.monotonic()
    with start(folder, extra, {}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        if process.wait(LIMIT_S) != 0:
            raise SystemExit(f"a run without a signal ended with {process.returncode}")
    return time.monotonic() - began_s


def ended(signum: int, after_s: float, folder: Path, extra: Sequence[str]) -> tuple[list[str], str] | None:
    """Run the command and send the signal after so many seconds.

    Returns:
        What is wrong afterwards, and the run's line; None if the run was over before the signal came.
    """
    mark, ray = new_mark(), Path(tempfile.mkdtemp(prefix="rs"))
    added = {**mark, "RAY_TMPDIR": str(ray)}
    process = start(folder, extra, added, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    files = shared_files(mark)
    sent_s = time.monotonic()
    process.send_signal(signum)
    _, errors = process.communicate(timeout=LIMIT_S)
    took_s = time.monotonic() - sent_s
    if process.returncode == 0:
        return None
    own = [line for line in errors.splitlines() if line.startswith("rlx ")]
    wrong = [] if process.returncode == 128 + signum else [f"exit code {process.returncode}"]
    wrong += [] if len(own) == 1 else [f"{len(own)} lines: {own}"]
    wrong += ["a traceback"] * ("Traceback" in errors)
    wrong += [f"took {took_s:.0f} s"] * (took_s > ENOUGH_S)
    wrong += [f"left: {each}" for each in [*end_what_is_left(mark), *ray.iterdir(), *filter(os.path.exists, files)]]
    shutil.rmtree(ray, ignore_errors=True)
    return wrong, f"{own[0] if own else ''} ({took_s:.1f} s)"


def main() -> int:
    """Parse the command line, end the runs, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first; run N has this seed + N")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after this time")
    options, extra = parser.parse_known_args()
    stop_s = time.monotonic() + 60 * options.minutes
    base = Path(tempfile.mkdtemp(prefix="rlxsignal"))
    extra = [make_model(base / "model"), *LOCAL_RAY, *extra]
    length_s = length_of(base / "whole", extra)
    print(f"a whole run takes {length_s:.0f} s", flush=True)

    def one(seed: int) -> bool | None:
        if time.monotonic() > stop_s:
            return None
        draw = random.Random(seed)
        signum, after_s = draw.choice([signal.SIGINT, signal.SIGTERM]), draw.uniform(FIRST_S, length_s)
        found = ended(signum, after_s, base / f"seed_{seed}", extra)
        if found is None:
            return None
        wrong, line = found
        print(f"{seed:4} {signum.name:7} after {after_s:5.1f} s: {'; '.join(wrong) or 'ok'}   {line}", flush=True)
        return not wrong

    with ThreadPoolExecutor(options.jobs) as pool:
        results = [each for each in pool.map(one, range(options.seed, options.seed + options.runs)) if each is not None]
    print(f"{sum(results)} of {len(results)} ended as they should")
    shutil.rmtree(base)
    return min(len(results) - sum(results), 100)


if __name__ == "__main__":
    sys.exit(main())
