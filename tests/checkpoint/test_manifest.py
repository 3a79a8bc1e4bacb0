"""What a manifest lists and finds."""

import errno
import json
import os
from pathlib import Path

import pytest

from rlx.checkpoint import manifest as m


@pytest.fixture
def sealed(tmp_path, monkeypatch):
    """A folder with a long file of several chunks, a short one in a folder, and a folder that has its own manifest."""
    monkeypatch.setattr(m, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(m, "SMALL_BYTES", 1000)
    folder = tmp_path / "sealed"
    for name, nbytes in (("long", 3500), ("below/short", 10), ("below/empty", 0), ("inner/long", 2500)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(nbytes))
    m.seal(folder / "inner", {})
    m.seal(folder, {})
    return folder


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_folder_is_whole_until_a_bit_changes(sealed):
    assert m.damage(sealed) == m.damaged_chunks(sealed) == []
    listed = json.loads((sealed / "manifest.json").read_text())["files"]
    assert set(listed) == {"long", "below/short", "below/empty", "inner/manifest.json"}
    assert listed["long"]["bytes"] == 3500 and len(listed["long"]["xxh3_128"]) == 4


@pytest.mark.parametrize(
    ("name", "at", "chunk"),
    [("long", 0, "0 to 1000"), ("long", 3499, "3000 to 3500"), ("inner/long", 1500, "1000 to 2000")],
)
def test_a_flipped_bit_in_a_long_file_is_found_by_the_process_that_reads_its_chunk(name, at, chunk, sealed):
    flip(sealed / name, at)
    assert m.damage(sealed) == [], "names and sizes are right"
    found = [m.damaged_chunks(sealed, part, 3) for part in range(3)]
    (fault,) = [fault for each in found for fault in each]
    assert fault == f"{sealed / name}: bytes {chunk} have changed since they were written"


@pytest.mark.parametrize("name", ["manifest.json", "inner/manifest.json"])
def test_a_manifest_is_refused_with_any_of_its_bits_changed(sealed, name):
    path = sealed / name
    whole = path.read_bytes()
    for at in range(len(whole)):
        flip(path, at)
        if whole[at : at + 1].isspace() and path.read_bytes()[at : at + 1].isspace():
            continue
        try:
            found = m.damage(sealed) or m.damaged_chunks(sealed)
        except m.OtherVersionError as error:  # format 2 became 6
            found = [str(error)]
        assert found, (at, path.read_bytes()[max(0, at - 20) : at + 20])
        path.write_bytes(whole)


def test_links_and_files_that_nobody_listed_are_refused(sealed, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (sealed / "inner/linked").symlink_to(tmp_path / "elsewhere")
    (sealed / ".hidden").write_text("")
    assert m.damage(sealed) == [
        f"{sealed / '.hidden'}: is not in the manifest; remove it",
        f"{sealed / 'inner/linked'}: is not in the manifest; remove it",
    ]


def test_a_file_that_another_node_wrote_elsewhere_is_missed_before_the_manifest_is_written(sealed):
    entry = m.FileEntry(3, ("0",))
    with pytest.raises(m.CheckpointError, match=r"model/shard: another process wrote it.*same file system"):
        m.seal(sealed, {"model/shard": entry})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not valid JSON"),
        ("[1]", "got a JSON list, expected an object"),
        ("{" * 100_000, "is not valid JSON"),
        ('{"a": "\udcff"}', "is not valid JSON"),
    ],
)
def test_a_file_that_is_no_json_is_named(text, said, tmp_path):
    path = tmp_path / "state.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(m.CheckpointError, match=rf"state\.json: {said}"):
        m.read_json(path)
    path.unlink()
    with pytest.raises(m.CheckpointError, match=r"state\.json: cannot be read \(No such file"):
        m.read_json(path)


def test_a_process_that_sees_other_files_raises_and_finds_no_damage(sealed):
    (sealed / "inner/long").unlink()
    with pytest.raises(m.CheckpointError, match="inner/long: is missing"):
        m.damaged_chunks(sealed)
    (sealed / "inner/manifest.json").unlink()
    (sealed / "manifest.json").unlink()
    with pytest.raises(m.CheckpointError, match=r"manifest\.json: is missing"):
        m.damaged_chunks(sealed)


def test_a_file_that_cannot_be_read_is_no_damage(sealed, monkeypatch):
    def fails(path, *_, **__):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match="Input/output error"):
        m.damage(sealed)
    with pytest.raises(OSError, match="Input/output error"):
        m.damaged_chunks(sealed)
