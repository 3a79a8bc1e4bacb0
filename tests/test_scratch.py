"""Temporary folders of processes: they go with their process, also if it is killed."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rlx import scratch
from rlx.identity import machine_identity, start_of

MAKE = "from rlx.scratch import scratch_folder; made = scratch_folder('test'); print(made.name, flush=True); input()"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_goes_when_its_process_was_killed(temporary):
    (temporary / "rlx-test-of-somebody-else-x").mkdir()
    command = [sys.executable, "-c", MAKE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        folder = Path(process.stdout.readline().strip())
        (folder / "weights").write_text("x")
        scratch.remove_scratch()
        assert folder.parent == temporary and folder.is_dir(), "its process lives"
        process.kill()
    scratch.remove_scratch()
    assert [each.name for each in temporary.iterdir()] == ["rlx-test-of-somebody-else-x"]


def test_folders_of_other_machines_stay(temporary, monkeypatch):
    with scratch.scratch_folder("test") as folder:
        monkeypatch.setattr(scratch, "start_of", lambda pid: None)
        monkeypatch.setattr(scratch, "machine_identity", lambda: "another")
        scratch.remove_scratch()
        assert Path(folder).is_dir()


def test_a_process_has_one_start(temporary):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert start_of(process.pid) is None
    assert start_of(os.getpid()) == start_of(os.getpid()) is not None
    assert machine_identity() == machine_identity()
