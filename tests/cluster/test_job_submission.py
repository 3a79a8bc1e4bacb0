"""`ray job submit` to a cluster of two nodes that asks for a token."""

import contextlib
import json
import os
import random
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

# Says on the driver what the job took along; every response scores by its variety, so that there is something to learn.
REWARD = """
    import os

    print("uploaded:", sorted(set(os.listdir()) - {"__pycache__"}))  # which comes from this import

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return len(set(solution_str)) / 16
"""


def command(untrained: str, runs: Path) -> list[str]:
    """Two steps of the arithmetic experiment on two nodes with a process each."""
    return [
        *(sys.executable, "-m", "rlx.main_ppo", "experiment=arithmetic", f"actor_rollout_ref.model.path={untrained}"),
        *(f"trainer.default_local_dir={runs}", "custom_reward_function.path=my_reward.py", "trainer.nnodes=2"),
        *("trainer.n_gpus_per_node=1", "trainer.total_training_steps=2", "trainer.val_before_train=False"),
        *("trainer.test_freq=-1", "data.train_batch_size=8", "data.max_response_length=8"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2"),
        "trainer.logger=[console]",
    ]


def free_port() -> int:
    """A port below those that the system gives to whoever asks for any, so that nobody else takes it before Ray does."""
    while True:
        port = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


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
            # A folder of its own, as on a machine of its own: nodes that share one replace each other's copies of the job.
            joins = [f"--address=127.0.0.1:{port}", f"--temp-dir={name}/other"]
            nodes.append(start(folder / "node.log", environment, *joins, *common))
            yield environment, port
        finally:
            for node in reversed(nodes):
                stop(node)


def start(log: Path, environment: dict[str, str], *options: str) -> subprocess.Popen:
    # A free port for the agent that takes jobs: another cluster of this machine may hold its default, and then no job is taken.
    agent = f"--dashboard-agent-listen-port={free_port()}"
    with log.open("w") as output:
        command = [RAY, "start", agent, *options]
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


def submit(environment: dict[str, str], folder: Path, entry: list[str]) -> subprocess.CompletedProcess:
    """Submits the run, again while the cluster is not ready for jobs yet."""
    command = [RAY, "job", "submit", "--working-dir", ".", "--", *entry]
    deadline_s = time.monotonic() + 150
    while True:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
        if "No available agent" not in done.stderr or time.monotonic() > deadline_s:
            return done


@pytest.mark.slow
@pytest.mark.e2e
def test_a_submitted_run_trains_on_both_nodes(cluster, untrained, tmp_path):
    environment, port = cluster
    entry, folder = command(untrained, tmp_path / "runs"), tmp_path / "job"
    for name in ("outputs", ".venv"):
        (folder / name).mkdir(parents=True)
        (folder / name / "large").write_text("x")
    (folder / "my_reward.py").write_text(textwrap.dedent(REWARD))
    (folder / ".gitignore").write_text("outputs/\n.venv/\n")
    (folder / ".rayignore").write_text("*.bin\n")
    (folder / "weights.bin").write_text("x")

    # Without the token; it takes Ray a while to give up, half a minute by default, so both run at once.
    tokenless = {k: v for k, v in environment.items() if not k.startswith("RAY_AUTH")}
    tokenless["RAY_py_gcs_connect_timeout_s"] = "3"
    stranger = subprocess.Popen(
        entry,
        env=tokenless | {"RAY_ADDRESS": f"127.0.0.1:{port}"},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    done = submit(environment, folder, entry)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "uploaded: ['.gitignore', '.rayignore', 'my_reward.py']" in output
    assert "2/2" in output and "summary" in output
    metrics = next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]
    assert all(json.loads(line)["actor/grad_norm"] > 0 for line in metrics)

    _, errors = stranger.communicate(timeout=240)
    assert stranger.returncode == 2, errors
    assert "RAY_AUTH_TOKEN_PATH" in errors
