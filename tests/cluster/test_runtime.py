import contextlib
import os
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

from rlx.cluster.errors import ClusterError
from rlx.cluster.runtime import check_options
from rlx.config.check.validate import check
from rlx.config.compose.command_line import compose
from rlx.config.machine import inspect_machine
from rlx.config.schema import PPOConfig, RayConfig

ROOT = Path(__file__).parents[2]
STUCK = """
    import ctypes, ray, signal, sys
    from pathlib import Path
    from rlx.cluster.runtime import session
    from rlx.config.schema import PPOConfig

    @ray.remote
    class Worker:
        def sleep(self, holding_the_interpreters_lock, stuck):
            stuck.touch()
            library = ctypes.PyDLL(None) if holding_the_interpreters_lock else ctypes.CDLL(None)
            library.sleep(1000)

        def ready(self):
            return True

    # A shell lets what it starts in the background ignore Ctrl-C, and so whatever that starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with session(PPOConfig()):
        workers = [Worker.options(num_cpus=0.1).remote() for _ in range(2)]
        ray.get([worker.ready.remote() for worker in workers])
        calls = [worker.sleep.remote(i == 0, Path(sys.argv[1], f"stuck{i}")) for i, worker in enumerate(workers)]
        print("started", flush=True)
        ray.get(calls)
"""


def words_of(process):
    """The command line of a process, empty if it has just ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def ignores_ctrl_c(pid):
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line]
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def wait_until(condition, seconds=30):
    deadline_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return condition()


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_process(tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STUCK), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
        start_new_session=True,
    )
    try:
        assert driver.stdout.readline() == "started\n", driver.stderr.read()
        family = psutil.Process(driver.pid).children(recursive=True)
        assert any("ray::" in words_of(child) for child in family)
        assert wait_until(lambda: len(list(tmp_path.glob("stuck*"))) == 2)
        driver.terminate()
        # Ctrl-C during the cleanup, which takes a second at least; a terminal sends it to the whole group.
        assert wait_until(lambda: ignores_ctrl_c(driver.pid))
        os.killpg(driver.pid, signal.SIGINT)
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
        assert wait_until(lambda: any("/raylet" in words_of(child).split(" ")[0] for child in mine.children()))
        driver.send_signal(signal.SIGINT)
        assert driver.wait(timeout=60) != 0
        assert wait_until(lambda: not session_members(driver.pid)), session_members(driver.pid)
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.slow
def test_a_process_of_ray_that_is_killed_while_ray_starts_is_named(tmp_path):
    """Ray itself would wait for it for half a minute, and then give the reason as a traceback."""
    script = """
        import sys
        from rlx.cluster.runtime import session
        from rlx.config.schema import PPOConfig
        from rlx.supervisor.link import restarts, tell
        if restarts():
            sys.exit(0)
        tell(max_restarts=1)
        with session(PPOConfig()):
            print("up")
    """
    (tmp_path / "driver.py").write_text(textwrap.dedent(script))
    keep = (
        "import sys; from rlx.supervisor.keeper import Keeper; sys.exit(Keeper([sys.executable, 'driver.py']).keep())"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", keep]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as keeper:
        found = []

        def is_killed():
            for child in psutil.Process(keeper.pid).children(recursive=True):
                if words_of(child).split(" ")[0].endswith("/gcs_server"):
                    child.kill()
                    found.append(child.pid)
            return found

        assert wait_until(is_killed)
        out, errors = keeper.communicate(timeout=120)
    assert (keeper.returncode, out) == (0, "")
    assert errors.splitlines() == [f"rlx restart 1 of 1: the gcs_server of Ray (pid {found[0]}) died"]


def session_members(leader):
    """Living processes of the Unix session that the process has led; zombies have ended."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


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


@pytest.fixture
def refusing_port():
    """A port that nobody listens at, nor can, for it is taken."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


JOIN = """
    import sys
    from rlx.cluster.errors import ClusterError
    from rlx.cluster.runtime import session
    from rlx.config.schema import PPOConfig, RayConfig
    try:
        with session(PPOConfig(ray_kwargs=RayConfig(OPTIONS))):
            pass
    except ClusterError as error:
        print(error)
"""


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "127.0.0.1:{port}"], ids=["client", "nobody"])
def test_an_address_that_cannot_be_joined_is_told_at_once(address, refusing_port):
    address = address.format(port=refusing_port)
    done = run(JOIN.replace("OPTIONS", repr({"address": address})))
    assert address in done.stdout, done.stderr


def test_a_folder_too_long_for_sockets_is_told_before_ray_starts(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", f"/tmp/{'x' * 130}")
    faults = check(compose([]), inspect_machine()).faults
    assert [fault.got for fault in faults if "Ray's folder" in fault.what] == ["RAY_TMPDIR of 135 bytes"]


def test_options_that_ray_does_not_know_are_named_before_it_starts():
    check_options(
        PPOConfig(ray_kwargs=RayConfig({"address": "x:1", "num_cpus": 2, "runtime_env": {}, "_temp_dir": "/r"}))
    )
    wrong = PPOConfig(ray_kwargs=RayConfig({"num_cpu": 2, "include_dashboard": True, "zzz": 1}))
    expected = r"does not know 'num_cpu' \(did you mean num_cpus\?\), 'zzz' \(remove it\)$"
    with pytest.raises(ClusterError, match=expected):
        check_options(wrong)
