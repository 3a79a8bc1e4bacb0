import os
import shlex
import socket
import subprocess
import sys

import pytest

from rlx.cluster.template import template

WORKER = """
import os, sys
print(sys.argv[1:], os.environ["MINE"], os.getcwd(), "torch" in sys.modules, os.getppid())
print("an error", file=sys.stderr)
"""


@pytest.fixture
def said(tmp_path):
    """Return a function that starts a worker by a command; it returns output, errors and the command's process id."""
    (tmp_path / "worker.py").write_text(WORKER)

    def start(command: str):
        own = {**os.environ, "MINE": "of the command"}
        line = [*shlex.split(command), str(tmp_path / "worker.py"), "--rank", "1"]
        process = subprocess.Popen(
            line, env=own, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return *process.communicate(timeout=60), process.pid

    return start


def test_a_worker_has_the_imports_of_the_template_and_all_else_of_its_command(said, tmp_path):
    with template(tmp_path, ["rlx.data.batch"]) as command:
        output, errors, _ = said(command)
        again, _, _ = said(command)
    assert output.startswith(f"['--rank', '1'] of the command {tmp_path} True ")
    assert again == output  # of the same parent
    assert errors == "an error\n"


def test_without_a_template_the_command_is_the_worker(said, tmp_path):
    with template(tmp_path, []) as command:
        pass
    output, errors, _ = said(command)
    assert output == f"['--rank', '1'] of the command {tmp_path} False {os.getpid()}\n"
    assert errors == "an error\n"


def test_an_import_that_fails_is_left_to_the_worker(said, tmp_path):
    with template(tmp_path, ["no_such_module"]) as command:
        output, errors, _ = said(command)
    assert "False" in output and errors == "an error\n"
    assert sys.executable in command


def test_variables_that_an_import_sets_hold_in_the_worker_unless_its_command_sets_them(said, tmp_path, monkeypatch):
    (tmp_path / "sets_variables.py").write_text(
        'import os\nos.environ["MINE"] = "of the import"\nos.environ["SET"] = "yes"\n'
    )
    (tmp_path / "worker.py").write_text('import os\nprint(os.environ["MINE"], os.environ["SET"])\n')
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with template(tmp_path, ["sets_variables"]) as command:
        output, _, _ = said(command)
    assert output == "of the command yes\n"


def test_a_command_that_ends_before_its_order_is_whole_leaves_no_process(tmp_path):
    with template(tmp_path, []) as command, socket.socket(socket.AF_UNIX) as connection:
        connection.connect(shlex.split(command)[-1])
        socket.send_fds(connection, [(100).to_bytes(8)], [0, 1, 2])
        connection.sendall(b"[")
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(60)
        assert connection.recv(1) == b""  # the fork is gone, and did not become a worker


def test_the_thread_that_imports_lives_when_workers_are_forked(said, tmp_path, monkeypatch):
    """A thread that ends may hold locks of libraries, of MKL for example, which a fork would inherit."""
    (tmp_path / "notes_its_thread.py").write_text("from threading import get_native_id\nTHREAD = get_native_id()\n")
    (tmp_path / "worker.py").write_text(
        "import os, sys\n"
        'thread = sys.modules["notes_its_thread"].THREAD\n'
        'print(thread != os.getppid(), os.path.exists(f"/proc/{os.getppid()}/task/{thread}"))\n'
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with template(tmp_path, ["notes_its_thread"]) as command:
        output, _, _ = said(command)
    assert output == "True True\n"


def test_ray_is_not_imported_before_the_worker_has_its_variables(said, tmp_path, monkeypatch):
    """Ray would keep the mode of tokens that the template's environment has, and its cluster would refuse the worker."""
    (tmp_path / "wants_ray.py").write_text("try:\n    import ray\nexcept ImportError:\n    ray = None\n")
    (tmp_path / "worker.py").write_text(
        'import sys\nprint(sys.modules["wants_ray"].ray, any(name.partition(".")[0] == "ray" for name in sys.modules))\n'
        "import ray\nprint(ray.__name__)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with template(tmp_path, ["wants_ray"]) as command:
        output, _, _ = said(command)
    assert output == "None False\nray\n"
