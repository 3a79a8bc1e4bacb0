"""The sandbox: what a model's program may do, and what it may not. Where the system has no name spaces only the limits are tried."""

import asyncio
import contextlib
import os
import socket
import threading

import psutil
import pytest

from rlx.environments.protocol import Turn
from rlx.environments.python_tool import PythonTool
from rlx.environments.sandbox import NotIsolated, SandboxLimits, check_isolation, run_python
from rlx.user_code import UserCodeError

LIMITS = SandboxLimits(time_s=20.0, processes=8, file_bytes=10**6, output_bytes=1000, memory_bytes=5 * 10**8)


def is_isolated():
    try:
        check_isolation(LIMITS)
    except NotIsolated:
        return False
    return True


isolated = pytest.mark.skipif(not is_isolated(), reason="this system allows no name spaces")


def run(code, **limits):
    return asyncio.run(run_python(code, SandboxLimits(**{**vars(LIMITS), "require_isolation": False, **limits})))


def test_a_program_prints_and_fails():
    assert run("import math\nprint(math.factorial(5))") == ("120\n", "")
    output, fault = run("def f(): return 1/0\nprint(3)\nf()")
    assert (
        fault == "exit code 1"
        and output.startswith("3\nTraceback")
        and output.endswith("ZeroDivisionError: division by zero\n")
    )
    assert "sandbox_child" not in output and 'File "<code>", line 3' in output
    assert run("import sys; sys.exit(7)").fault == "exit code 7" and run("1 +").fault == "exit code 1"
    assert run("print(input())").fault == "exit code 1", "its input is empty"
    assert run("print('\\x00é')").output == "\x00é\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os\nif os.fork(): os._exit(0)\nwhile True: pass", ""),
        ("while True: print('y' * 1000)", "printed more than 1,000 bytes"),
    ],
)
def test_limits_that_end_a_program_before_its_time(code, expected):
    assert run(code).fault == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("while True: pass", "took longer than 1 s"),
        ("import time; time.sleep(100)", "took longer than 1 s"),
        ("import os\nwhile True: os.fork()", "took longer than 1 s|exit code"),
        ("bytearray(10**9)", "exit code 1|took longer than 1 s"),
        ("open('x', 'wb').write(bytes(10**7))", "exit code 1|took longer than 1 s"),
        ("import resource, os\nwhile True: pass", "took longer than 1 s"),
    ],
)
def test_limits(code, expected):
    fault = run(code, time_s=1.0).fault
    assert fault.startswith(tuple(expected.split("|"))), fault


@isolated
def test_a_program_that_leaves_its_group_does_not_outlive_its_time():
    leaving = "import ctypes, os, time\nos.setsid()\nctypes.CDLL(None).prctl(1, 0)\ntime.sleep(1000)"
    assert run(leaving, time_s=1.375).fault.startswith("took longer")
    left = [process for process in psutil.process_iter() if '"time_s": 1.375' in " ".join(command_of(process))]
    assert not psutil.wait_procs(left, timeout=60)[1]


def command_of(process):
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def test_limits_that_the_system_cannot_read_are_refused():
    with pytest.raises(UserCodeError, match="cannot run an empty program"):
        check_isolation(SandboxLimits(**{**vars(LIMITS), "require_isolation": False, "memory_bytes": 2e9}))


def test_it_has_none_of_the_variables_of_the_run(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert run("import os; print(os.environ.get('WANDB_API_KEY'))").output == "None\n"


@isolated
def test_it_has_no_network_no_other_processes_and_no_files_to_write(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=server.accept, daemon=True).start()
        output, fault = run(f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 3)")
        assert fault == "exit code 1" and ("refused" in output or "unreachable" in output)
        server.settimeout(0.01)
        socket.create_connection(server.getsockname()).close()  # for the thread
    assert "ProcessLookupError" in run(f"import os; os.kill({os.getpid()}, 0)").output
    assert run("import os; print(os.listdir('/proc'), os.listdir('.'))").output == "[] []\n"
    for place in (tmp_path / "x", os.path.expanduser("~/x"), "/x"):
        assert run(f"open({str(place)!r}, 'w')").fault == "exit code 1" and not os.path.exists(place)
    assert run("open('x', 'w').write('y'); print(open('x').read())").output == "y\n"
    assert run("import os; print(os.listdir('.'))").output == "[]\n", "each program begins anew"


@isolated
def test_the_tool(make_pool, answers):
    text = "<python>print(6 * 7)</python>"
    environment = PythonTool("tags", time_s=20.0)
    assert asyncio.run(environment.step(Turn(text, 0))).messages[0]["content"] == "42\n"
    found = asyncio.run(environment.step(Turn("<python>print(1)\n1/0</python>", 1)))
    assert (
        found.messages[0]["content"].startswith("error: ProgramFailed: exit code 1\n1\nTraceback")
        and found.info["tool_errors"] == 1
    )
    pool = make_pool("python", kwargs={"seconds": 3})
    pool.reset(0, {"prompt": []})
    with pytest.raises(UserCodeError, match=r"environment.kwargs.*seconds"):
        pool.poll(60.0)
