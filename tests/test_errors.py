import errno
import os
import re
import subprocess
from pathlib import Path

import pytest

from rlx.errors import StorageError, did_you_mean, storing, wrapped


def test_names_that_look_alike_come_first_and_the_rest_where_there_is_none():
    known = ["num_cpus", "num_gpus", "address"]
    assert did_you_mean("num_cpu", known, "remove it") == "did you mean num_cpus?"
    assert did_you_mean("num_cpu", known, "remove it", most=3) == "did you mean num_cpus or num_gpus?"
    assert did_you_mean("xyz", known, "remove it") == "remove it"


def test_long_lines_are_wrapped_below_their_labels_and_paths_stay_whole():
    path = "/a/" + "long-" * 30
    text = f"2 faults\n  1. {'word ' * 30}\n     got: {path} {'word ' * 20}"
    lines = wrapped(text).split("\n")
    assert (
        lines[0] == "2 faults"
        and lines[2].startswith("     word")
        and f" {path}"[1:] in [each.strip() for each in lines]
    )
    assert lines[-1].startswith("          word") and all(len(each) <= 100 for each in lines if path not in each)
    assert " ".join(wrapped(text).split()) == " ".join(text.split())


def test_a_full_disk_is_named_with_its_path_and_space(tiny_disk: Path):
    file = tiny_disk / "metrics.jsonl"
    expected = re.escape(f"cannot write {file}: no space is left (0.000 GB free); free some space")
    with pytest.raises(StorageError, match=expected), storing(file):
        file.write_bytes(bytes(100_000))


@pytest.mark.parametrize("said", ["I/O error: No space left on device (os error 28)", "unexpected pos 704 vs 598"])
def test_a_library_that_hides_a_full_disk_is_understood(tiny_disk: Path, said: str):
    with pytest.raises(OSError):
        (tiny_disk / "filler").write_bytes(bytes(100_000))
    with pytest.raises(StorageError, match="no space is left"), storing(tiny_disk / "model"):
        raise RuntimeError(said)


def test_a_disk_that_became_read_only_is_named(tiny_disk: Path):
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    expected = r"the file system is read-only \(0\.000 GB free\); correct that"
    with pytest.raises(StorageError, match=expected), storing(tiny_disk / "a"):
        (tiny_disk / "a").write_text("a")


def test_a_full_device_a_lost_folder_and_a_quota_are_named_without_a_mount(tmp_path: Path):
    with pytest.raises(StorageError, match="/dev/full: no space is left"), storing("/dev/full"):
        Path("/dev/full").write_text("a")
    gone = tmp_path / "gone" / "deep" / "a"
    with pytest.raises(StorageError, match=r"gone/deep/a: the folder is gone \(\d+\.\d+ GB free\)"), storing(gone):
        gone.write_text("a")
    with pytest.raises(StorageError, match="the quota is used up"), storing(tmp_path):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_other_errors_pass_unchanged(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"^unexpected pos$"), storing(tmp_path):
        raise RuntimeError("unexpected pos")
    with pytest.raises(StorageError, match=r"^inner$"), storing(tmp_path):
        raise StorageError("inner")
