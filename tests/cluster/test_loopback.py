"""A run on one machine cannot be reached from another one, its folders not by other users, and Ctrl-C leaves nothing of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlx.supervisor.family import is_dead

ROOT = Path(__file__).parents[2]
RUN = (
    *("experiment=arithmetic", "data.arithmetic.train_size=64", "data.arithmetic.val_size=2"),
    *("data.train_batch_size=4", "data.max_response_length=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *("actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1000", "trainer.val_before_train=False"),
    *("trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.logger=[jsonl]"),
)


def open_addresses(processes: list[psutil.Process]) -> set[str]:
    """Return the local addresses at which these processes wait for connections or datagrams."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    found.add(f"{connection.laddr.ip} ({' '.join(process.cmdline())[:60]})")
    return found


def name_of(process: psutil.Process) -> str:
    """Return its name, empty if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


@pytest.mark.slow
@pytest.mark.e2e
def test_every_socket_of_a_run_is_on_loopback_and_its_folder_private_and_ctrl_c_ends_it_cleanly(
    untrained: str, tmp_path: Path
):
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    options = (f"actor_rollout_ref.model.path={untrained}", f"trainer.default_local_dir={tmp_path}/runs")
    driver = subprocess.Popen(
        [sys.executable, "-m", "rlx.main_ppo", *RUN, *options],
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores the signal, and so would this run.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    family: list[psutil.Process] = []
    try:
        deadline_s = time.monotonic() + 120
        while not any(file.stat().st_size for file in tmp_path.glob("runs/*/metrics.jsonl")):
            assert driver.poll() is None and time.monotonic() < deadline_s, driver.stderr.read()
            time.sleep(0.5)
        family = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
        seen = open_addresses(family)
        assert len(seen) > 3, seen  # Ray alone has as many
        strangers = [each for each in seen if not each.startswith(("127.0.0.1 ", "::ffff:127.0.0.1 ", "::1 "))]
        assert not strangers
        (raylet,) = [process for process in family if name_of(process) == "raylet"]
        (sockets,) = {Path(c.laddr).parent for c in raylet.net_connections("unix") if "/sockets/" in c.laddr}
        private = sockets.parents[2]
        assert private.name.startswith("rlx_") and private.stat().st_mode & 0o777 == 0o700
    finally:
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=60)
        assert not [process for process in family if not is_dead(process.pid) and process.is_running()]
    assert driver.returncode == 130 and "Traceback" not in errors, errors
    assert not private.exists()
