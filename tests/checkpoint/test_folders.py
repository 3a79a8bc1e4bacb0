"""A folder appears complete or not at all, wherever its writer is killed."""

from pathlib import Path

import pytest

from rlx.checkpoint.folders import begin, commit, replacing


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
