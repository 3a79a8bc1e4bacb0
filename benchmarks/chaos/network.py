"""`python benchmarks/chaos/network.py --seconds 60`: cuts the network between the two nodes of a run (Linux, as root).

Two network namespaces with a cable between them are the nodes. Each has a Ray daemon that is started again when it ends, as
Kubernetes or systemd would do. A short cut must pass unnoticed; a long one restarts the run when the node is back, or with
`--min-nodes 1` goes on without it.
"""

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from outcome import Trajectory, differences, of_run
from task import LIMIT_S, command_in, make_model, newest

NAMES, ADDRESSES, PORT = ("rlxnode0", "rlxnode1"), ("10.77.0.1", "10.77.0.2"), 6379
FOREVER = "trap 'kill $! 2>/dev/null; exit' TERM; while :; do {} & wait $!; sleep 2; done"


def ip(command: str) -> None:
    """Run `ip` with these words."""
    subprocess.run(["ip", *command.split()], check=True)


@contextlib.contextmanager
def two_nodes() -> Iterator[None]:
    """Two network namespaces, connected by a cable."""
    try:
        for name in NAMES:
            ip(f"netns add {name}")
            ip(f"-n {name} link set lo up")
        ip(f"link add rlxcable type veth peer name rlxcable1 netns {NAMES[1]}")
        ip(f"link set rlxcable name rlxcable0 netns {NAMES[0]}")
        for number, (name, address) in enumerate(zip(NAMES, ADDRESSES, strict=True)):
            ip(f"-n {name} addr add {address}/24 dev rlxcable{number}")
            ip(f"-n {name} link set rlxcable{number} up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def in_node(number: int, command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command on a node, with a file for its output."""
    inside = ["ip", "netns", "exec", NAMES[number], *command]
    with log.open("ab") as output:
        return subprocess.Popen(inside, stdout=output, stderr=output, env={**command_in(log, [])[1], **environment})


@contextlib.contextmanager
def cluster(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """A Ray cluster of the two nodes."""
    ray = str(Path(sys.executable).with_name("ray"))
    common = (
        f"--num-cpus=2 --object-store-memory=100000000 --disable-usage-stats --block --node-ip-address={ADDRESSES[0]}"
    )
    head = f"{ray} start --head --port={PORT} --include-dashboard=false --temp-dir={folder}/ray {common}"
    worker = f"{ray} start --address={ADDRESSES[0]}:{PORT} {common.replace(*ADDRESSES)}"
    daemons = []
    try:
        for number, command in enumerate((head, worker)):
            shell = ["bash", "-c", FOREVER.format(command)]
            daemons.append(in_node(number, shell, folder / f"node{number}.log", environment))
            time.sleep(15)
        yield
    finally:
        for daemon in daemons:
            daemon.terminate()
        for name in NAMES:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
        for daemon in daemons:
            daemon.wait()


def train(folder: Path, cut_s: float, extra: list[str], environment: dict[str, str]) -> Trajectory:
    """Run the task on both nodes, with a cut of so many seconds after the fourth row."""
    log = folder.with_suffix(".log")
    command, _ = command_in(folder, ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", *extra])
    run = in_node(0, command, log, {"RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}", **environment})
    if cut_s:
        deadline_s = time.monotonic() + LIMIT_S
        rows = lambda: sum(file.read_bytes().count(b"\n") for file in folder.glob("*/metrics.jsonl"))  # noqa: E731
        while rows() < 4 and run.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        ip(f"-n {NAMES[1]} link set rlxcable1 down")
        print(f"cut for {cut_s:.0f} s after row {rows()}", flush=True)
        time.sleep(cut_s)
        ip(f"-n {NAMES[1]} link set rlxcable1 up")
    if run.wait(LIMIT_S) != 0:
        raise SystemExit(log.read_text(errors="replace")[-4000:])
    print(*(line for line in log.read_text().splitlines() if line.startswith("rlx ")), sep="\n")
    return of_run(newest(folder))


def main() -> int:
    """Compare a run with a cut network with one without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the cut")
    parser.add_argument("--min-nodes", type=int, default=2)
    options = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="rlxnet"))
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    model = make_model(base / "model")
    with two_nodes(), cluster(base, environment):
        expected = train(base / "unbroken", 0.0, [model], environment)
        fewer = f"trainer.min_nodes={options.min_nodes}"
        got = train(base / "cut", options.seconds, [model, fewer], environment)
    found = differences(expected, got)
    print("as the unbroken run" if not found else "; ".join(found))
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
