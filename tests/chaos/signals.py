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
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from task import LIMIT_S, command_in

MARK = "RLX_CHAOS_MARK"
MOST_S = 40.0  # about the length of a run on a free machine


def marked(mark: str) -> list[str]:
    """Return the command lines of living processes that have inherited the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
            except OSError:
                continue
    return found


def ended(signum: int, after_s: float, folder: Path, extra: list[str]) -> list[str]:
    """Run the command, send the signal after so many seconds, and return what is wrong afterwards."""
    mark, ray = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="rs"))
    shared = set(os.listdir("/dev/shm"))
    command, environment = command_in(folder, extra)
    environment |= {MARK: mark, "RAY_TMPDIR": str(ray)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(after_s)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=LIMIT_S)
    own = [line for line in errors.splitlines() if line.startswith("rlx ")]
    wrong = [] if process.returncode == 128 + signum else [f"exit code {process.returncode}"]
    wrong += [] if len(own) == 1 else [f"{len(own)} lines: {own}"]
    wrong += ["a traceback"] * ("Traceback" in errors)
    wrong += [f"left: {line}" for line in marked(mark)]
    wrong += [f"left: {each}" for each in ray.iterdir()]
    new = {
        name for name in set(os.listdir("/dev/shm")) - shared if name.startswith(("psm_", "torch_", "sem.", "plasma"))
    }
    wrong += [f"perhaps left: /dev/shm/{name}" for name in sorted(new)]  # or another run's on this machine
    shutil.rmtree(ray, ignore_errors=True)
    return wrong


def main() -> int:
    """Parse the command line, end the runs, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first; run N has this seed + N")
    options, extra = parser.parse_known_args()
    bad = 0
    for seed in range(options.seed, options.seed + options.runs):
        draw = random.Random(seed)
        signum, after_s = draw.choice([signal.SIGINT, signal.SIGTERM]), draw.uniform(0.15, MOST_S)
        with tempfile.TemporaryDirectory(prefix="rlxsignal") as folder:
            wrong = ended(signum, after_s, Path(folder) / "runs", extra)
        bad += bool(wrong)
        print(f"{seed:4} {signum.name} after {after_s:5.1f} s: {'; '.join(wrong) or 'ok'}", flush=True)
    print(f"{options.runs - bad} of {options.runs} ended as they should")
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main())
