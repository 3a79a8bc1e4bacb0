import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import ray

from rlx.cluster.errors import ClusterError
from rlx.cluster.runtime import check_options, session
from rlx.config.schema import PPOConfig, RayConfig
from rlx.supervisor.link import DESCRIPTOR

STUCK = """
    import ctypes, ray, signal
    from rlx.cluster.runtime import session
    from rlx.config.schema import PPOConfig

    @ray.remote
    class Worker:
        def sleep(self, holding_the_interpreters_lock):
            library = ctypes.PyDLL(None) if holding_the_interpreters_lock else ctypes.CDLL(None)
            library.sleep(1000)

        def ready(self):
            return True

    # A shell lets what it starts in the background ignore Ctrl-C, and so whatever that starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with session(PPOConfig()):
        workers = [Worker.options(num_cpus=0.1).remote() for _ in range(2)]
        ray.get([worker.ready.remote() for worker in workers])
        calls = [worker.sleep.remote(i == 0) for i, worker in enumerate(workers)]
        print("started", flush=True)
        ray.get(calls)
"""


def wait_until(condition, seconds=30):
    deadline_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return condition()


@pytest.mark.parametrize("how", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_an_interrupted_run_leaves_no_process(tmp_path, how):
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STUCK)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        start_new_session=True,
    )
    try:
        assert driver.stdout.readline() == "started\n", driver.stderr.read()
        family = psutil.Process(driver.pid).children(recursive=True)
        assert any("ray::" in " ".join(child.cmdline()) for child in family)
        time.sleep(0.5)
        if how == "SIGINT":
            os.killpg(driver.pid, signal.SIGINT)  # a terminal sends Ctrl-C to the whole group
            time.sleep(0.3)
            os.killpg(driver.pid, signal.SIGINT)
        else:
            driver.terminate()
        _, errors = driver.communicate(timeout=60)
        assert driver.returncode != 0
        assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
        assert "received at time" not in errors, "Ray's own handler has run"
        assert wait_until(lambda: not any(child.is_running() for child in family)), family
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.slow
def test_ctrl_c_while_ray_starts_leaves_no_process(tmp_path):
    script = "from rlx.cluster.runtime import session; from rlx.config.schema import PPOConfig; " + (
        "print('starting', flush=True); session(PPOConfig()).__enter__()"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
        text=True,
        start_new_session=True,
    )
    mine = psutil.Process(driver.pid)
    try:
        assert driver.stdout.readline() == "starting\n"
        assert wait_until(lambda: any("raylet" in child.name() for child in mine.children()))
        driver.send_signal(signal.SIGINT)
        assert driver.wait(timeout=60) != 0
        assert wait_until(lambda: not session_members(driver.pid)), session_members(driver.pid)
    finally:
        driver.kill()
        driver.wait()


def test_the_supervisor_knows_the_processes_of_ray_before_ray_is_up(tmp_path):
    told, given = os.pipe()
    script = "from rlx.cluster.runtime import session; from rlx.config.schema import PPOConfig; " + (
        "session(PPOConfig()).__enter__(); print('up', flush=True)"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, DESCRIPTOR: str(given)},
        pass_fds=[given],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        start_new_session=True,
    )
    os.close(given)
    try:
        with os.fdopen(told) as lines:
            parts = (json.loads(line).get("daemons") for line in lines)
            gcs_server = next(part for part in parts if part)["the gcs_server"]
            assert psutil.Process(gcs_server).name() == "gcs_server"
        assert not select.select([driver.stdout], [], [], 0)[0], "Ray is not up yet"
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert wait_until(lambda: not psutil.pid_exists(gcs_server))


def session_members(leader):
    """Living processes of the Unix session that the process has led; zombies have ended."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def test_a_session_inside_a_running_ray_leaves_it_running(ray_session):
    with session(PPOConfig()):
        assert ray.is_initialized()
    assert ray.is_initialized()


def run(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def short_folder():
    """Ray's sockets lie in it, and a socket's path is at most 107 bytes long."""
    with tempfile.TemporaryDirectory(prefix="rlx") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_local_session_ignores_stale_addresses_and_keeps_out_of_the_home_folder(tmp_path, short_folder):
    """Ray notes the last cluster's address in a file, and would write its token to the home folder."""
    (short_folder / "ray_current_cluster").write_text("127.0.0.1:1")
    done = run(
        f"""
        import os, ray
        from rlx.cluster.runtime import session
        from rlx.config.schema import PPOConfig, RayConfig

        config = PPOConfig(ray_kwargs=RayConfig({{"num_cpus": 3, "_temp_dir": {str(short_folder)!r}}}))
        for attempt in range(2):
            with session(config):
                assert ray.cluster_resources()["CPU"] == 3
                print(ray.get_runtime_context().get_session_name())
                assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0), "a worker waits for nobody"
            assert not ray.is_initialized()
        """,
        HOME=str(tmp_path),
        RAY_ADDRESS="",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "Ray is quiet"
    for name in done.stdout.split():
        assert not (short_folder / name).exists()
    assert not (tmp_path / ".ray").exists()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", f"127.0.0.1:{free_port()}"], ids=["client", "nobody"])
def test_an_address_that_cannot_be_joined_is_told_at_once(address):
    script = f"""
        from rlx.cluster.errors import ClusterError
        from rlx.cluster.runtime import session
        from rlx.config.schema import PPOConfig, RayConfig

        try:
            with session(PPOConfig(ray_kwargs=RayConfig({{"address": {address!r}}}))):
                pass
        except ClusterError as error:
            print(error)
    """
    done = run(script)
    assert address in done.stdout, done.stderr


def test_options_that_ray_does_not_know_are_named_before_it_starts():
    check_options(
        PPOConfig(ray_kwargs=RayConfig({"address": "x:1", "num_cpus": 2, "runtime_env": {}, "_temp_dir": "/r"}))
    )
    wrong = PPOConfig(ray_kwargs=RayConfig({"num_cpu": 2, "include_dashboard": True, "zzz": 1}))
    expected = r"does not know 'num_cpu' \(did you mean num_cpus\?\), 'zzz' \(remove it\)$"
    with pytest.raises(ClusterError, match=expected):
        check_options(wrong)
