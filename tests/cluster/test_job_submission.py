"""`ray job submit` to a cluster of two nodes that asks for a token."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

RAY = str(Path(sys.executable).with_name("ray"))

DRIVER = """
    import os
    import ray
    from rlx.cluster.group import WorkerGroup
    from rlx.cluster.placement import Pool
    from rlx.cluster.runtime import session
    from rlx.config.schema import PPOConfig

    class Worker:
        def __init__(self):
            import torch.distributed
            torch.distributed.init_process_group("gloo")

        def call(self, role, method):
            import torch.distributed
            ranks = torch.tensor([float(os.environ["RANK"])])
            torch.distributed.all_reduce(ranks)
            return ray.get_runtime_context().get_node_id(), os.environ["LOCAL_RANK"], ranks.item()

    print("uploaded:", sorted(os.listdir()))
    with session(PPOConfig()), WorkerGroup(Pool.reserve(2, 2, "cpu"), Worker) as group:
        nodes, local_ranks, sums = zip(*group.broadcast("any", "meet"))
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3], nodes
        print("local ranks:", local_ranks, "sums:", sums)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture
def cluster():
    """Environment of a user of a head and a second node on this machine, which ask for a token.

    The temporary folder has a short name: Ray's sockets lie in it, and a socket's path is at most 107 bytes long.
    """
    with tempfile.TemporaryDirectory(prefix="rlx") as name:
        folder, port, dashboard = Path(name), free_port(), free_port()
        (folder / "token").write_text(secrets.token_hex(32))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment = kept | {
            "HOME": name,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        }
        common = ["--num-cpus=2", "--disable-usage-stats", "--block"]
        head = ["--head", f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={name}/ray"]
        nodes = [start(folder / "head.log", environment, *head, *common)]
        try:
            wait_for_port(dashboard, nodes[0], folder / "head.log")
            nodes.append(start(folder / "node.log", environment, f"--address=127.0.0.1:{port}", *common))
            yield environment, port
        finally:
            for node in reversed(nodes):
                stop(node)


def start(log: Path, environment: dict[str, str], *options: str) -> subprocess.Popen:
    with log.open("w") as output:
        command = [RAY, "start", *options]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def wait_for_port(port: int, process: subprocess.Popen, log: Path) -> None:
    deadline_s = time.monotonic() + 90
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)


def stop(node: subprocess.Popen) -> None:
    node.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(timeout=20)
    # What outlives `ray start --block` is in its process group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


def submit(environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess:
    """Submits the driver, again while the cluster is not ready for jobs yet."""
    command = [RAY, "job", "submit", "--working-dir", ".", "--", sys.executable, "driver.py"]
    deadline_s = time.monotonic() + 60
    while True:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
        if "No available agent" not in done.stderr or time.monotonic() > deadline_s:
            return done


@pytest.mark.e2e
def test_a_submitted_job_runs_on_both_nodes(cluster, tmp_path):
    environment, port = cluster
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    (tmp_path / ".gitignore").write_text("outputs/\n.venv/\n")
    (tmp_path / ".rayignore").write_text("*.bin\n")
    for name in ("outputs", ".venv"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "large").write_text("x")
    (tmp_path / "weights.bin").write_text("x")

    # Without the token; it takes Ray half a minute to give up, so both run at once.
    tokenless = {k: v for k, v in environment.items() if not k.startswith("RAY_AUTH")}
    stranger = subprocess.Popen(
        [sys.executable, str(tmp_path / "driver.py")],
        env=tokenless | {"RAY_ADDRESS": f"127.0.0.1:{port}"},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    done = submit(environment, tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "local ranks: ('0', '1', '0', '1') sums: (6.0, 6.0, 6.0, 6.0)" in output
    assert "uploaded: ['.gitignore', '.rayignore', 'driver.py']" in output

    _, errors = stranger.communicate(timeout=240)
    assert stranger.returncode == 1
    assert "RAY_AUTH_TOKEN_PATH" in errors.strip().splitlines()[-1]
