"""A folder appears complete or not at all, wherever its writer is killed; and folders in object storage."""

import os
from pathlib import Path
from uuid import uuid4

import pytest

from rlx.checkpoint.folders import RemoteFolder, begin, commit, replacing
from rlx.checkpoint.manifest import damage, seal
from rlx.errors import StorageError


class Killed(BaseException):
    pass


def write(folder: Path, text: str) -> None:
    with replacing(folder) as partial:
        (partial / "file").write_text(text)


def test_a_folder_replaces_the_one_before(tmp_path: Path):
    for text in ("first", "second"):
        write(tmp_path / "x", text)
        assert (tmp_path / "x" / "file").read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "x"
    write(folder, "first")
    (begin(folder) / "file").write_text("second")
    real = Path.rename

    def killed_at_the_second(path: Path, target: Path) -> Path:
        if path != folder:
            raise Killed
        return real(path, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", killed_at_the_second)
        commit(folder)
    assert not folder.exists()
    (begin(folder) / "file").write_text("third")
    assert (folder / "file").read_text() == "first", "until the third one is whole"
    commit(folder)
    assert (folder / "file").read_text() == "third"
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.fixture(params=["memory", "file"])
def remote(request, tmp_path):
    return RemoteFolder({"memory": f"memory://{uuid4()}/runs", "file": f"file://{tmp_path}/bucket/runs"}[request.param])


def sealed(folder):
    (folder / "below").mkdir(parents=True)
    (folder / "below/file").write_text("text")
    (folder / "empty").write_text("")
    seal(folder, {})
    return folder


def test_a_folder_comes_back_whole(remote, tmp_path):
    assert remote.names() == [] and not remote.has("a/manifest.json")
    remote.upload(sealed(tmp_path / "own"), "a")
    remote.put(tmp_path / "own/empty", "beside")
    assert remote.names() == ["a", "beside"] and remote.names("a") == ["below", "empty", "manifest.json"]
    remote.download("a", tmp_path / "back")
    assert damage(tmp_path / "back") == [] and (tmp_path / "back/below/file").read_text() == "text"
    remote.remove("a")
    remote.remove("a")
    assert remote.names() == ["beside"]


def test_a_broken_upload_has_no_manifest(remote, tmp_path, monkeypatch):
    folder, put = sealed(tmp_path / "own"), RemoteFolder.put
    monkeypatch.setattr(
        RemoteFolder, "put", lambda self, path, name: put(self, path, name) if "below" in name else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        remote.upload(folder, "a")
    assert remote.names("a") == ["below"]


def test_what_a_file_system_says_is_explained(remote, tmp_path):
    remote.put(__file__, "a/file")
    with pytest.raises(StorageError, match=r"runs/x: FileNotFoundError"):
        remote.put(tmp_path / "nothing", "x")
    with pytest.raises(StorageError, match="nonsense://x"):
        RemoteFolder("nonsense://x")
    assert not os.path.exists(tmp_path / "back")
