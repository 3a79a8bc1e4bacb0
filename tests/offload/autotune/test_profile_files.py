"""Measurements as files: what is written is read again field by field, and whatever else lies there is ignored."""

import dataclasses
import itertools
import json
import logging
import os
import threading
import types
import typing
from pathlib import Path

import pytest

from rlx.offload import OffloadOptions
from rlx.offload.autotune.pass_profile import PassProfile
from rlx.offload.autotune.profile_files import FORMAT, ProfileFolder, from_json, to_json

ABOUT = {"layers": ["a", 1], "machine": {"device": "CPU", "threads": 2}}


def made(hint, numbers, empty=False):
    """A value of a type, of numbers that differ; with `empty` tuples without items, and None where that may be."""
    names = getattr(hint, "_fields", None)
    if dataclasses.is_dataclass(hint):
        names = [field.name for field in dataclasses.fields(hint)]
    if names:
        hints = typing.get_type_hints(hint)
        return hint(**{name: made(hints[name], numbers, empty) for name in names})
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if empty and type(None) in arguments else made(arguments[0], numbers, empty)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(made(one, numbers, empty) for one in arguments)
    if origin in (tuple, frozenset):
        return origin(made(arguments[0], numbers, empty) for _ in range(0 if empty else 3))
    number = next(numbers)
    return {int: number, float: number + 0.1, str: f"text {number}", bool: bool(number % 2)}[hint]


def measurement(empty=False):
    return made(PassProfile, itertools.count(1), empty)


@pytest.fixture
def folder(tmp_path):
    return ProfileFolder(tmp_path / "measurements")


@pytest.fixture
def file(folder):
    """A file with a measurement."""
    folder.write(ABOUT, 7, measurement())
    (found,) = folder.root.glob("*/*.json")
    return found


@pytest.mark.parametrize("empty", [False, True])
def test_every_field_comes_back_as_it_was(folder, empty):
    written = measurement(empty)
    assert from_json(PassProfile, json.loads(json.dumps(to_json(written)))) == written
    folder.write(ABOUT, 3, written)
    assert folder.read(ABOUT, 3) == ProfileFolder(folder.root).read(ABOUT, 3) == written
    assert len(list(folder.root.glob("*/*"))) == 1  # nothing unfinished is left


class Named(typing.NamedTuple):
    names: frozenset[str]
    pairs: tuple[tuple[int, str], ...]
    share: float | None = None


@dataclasses.dataclass(frozen=True)
class Figures:
    named: Named
    is_known: bool
    several: tuple[Named, ...] = ()


def test_fields_of_other_types_need_nothing():
    one = Named(frozenset("ab"), ((1, "a"), (2, "b")))
    value = Figures(one, True, (one, one._replace(share=0.25)))
    assert from_json(Figures, json.loads(json.dumps(to_json(value)))) == value
    with pytest.raises(TypeError, match="got a dict"):
        to_json({})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"turnaround_s": "long"}, r"PassProfile.turnaround_s: got 'long', expected float"),
        ({"turnaround_s": float("nan")}, r"turnaround_s: got 'nan'"),
        ({"outside_bytes": 1.5}, r"outside_bytes: got '1.5', expected int"),
        ({"outside_bytes": True}, r"outside_bytes: got 'True'"),
        ({"kinds": 3}, r"kinds: got '3'"),
        ({"more": 3}, r"expected the fields kinds, outside_bytes, turnaround_s"),
    ],
)
def test_data_of_other_types_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        from_json(PassProfile, {**to_json(measurement()), **change})


def test_other_descriptions_and_lengths_are_other_measurements(folder, file):
    assert folder.read(ABOUT, 7) == measurement()
    assert folder.read(ABOUT, 8) is None
    assert folder.read({**ABOUT, "layers": ["a", 2]}, 7) is None
    assert (folder.lengths(ABOUT), folder.lengths({})) == ([7], [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: text.replace('"outside_bytes": ', '"outside_bytes": 1'),
        lambda text: text.replace(f'"format": {FORMAT}', '"format": 0'),
        lambda text: text.replace('"device": "CPU"', '"device": "TPU"'),
        lambda text: "[" * 100_000,
        lambda text: "\0\x80",
    ],
    ids=["cut", "empty", "other", "a figure", "format", "of something else", "deep", "bytes"],
)
def test_a_damaged_or_foreign_file_is_ignored_with_one_line_and_replaced(folder, file, caplog, damage):
    file.write_bytes(damage(file.read_text()).encode("latin-1"))
    assert folder.read(ABOUT, 7) is None and folder.read(ABOUT, 7) is None
    (record,) = caplog.records
    assert str(file) in record.getMessage() and record.levelno == logging.WARNING
    folder.write(ABOUT, 7, measurement())
    assert folder.read(ABOUT, 7) == measurement()


def test_a_folder_where_a_file_should_be_is_ignored(folder, file, caplog):
    file.unlink()
    file.mkdir()
    assert folder.read(ABOUT, 7) is None
    folder.write(ABOUT, 7, measurement())
    assert [("cannot be read" in r.getMessage(), "cannot be kept" in r.getMessage()) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]
    assert list(file.parent.iterdir()) == [file]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folder = ProfileFolder(tmp_path / "file" / "below")
    for length in range(3):
        folder.write(ABOUT, length, measurement())
    assert sum("cannot be kept" in record.getMessage() for record in caplog.records) == 1
    assert folder.read(ABOUT, 0) is None and folder.lengths(ABOUT) == []


def test_who_reads_while_others_write_has_a_whole_file(folder):
    one, other = measurement(), measurement()._replace(outside_bytes=5)
    folder.write(ABOUT, 0, one)
    is_over = threading.Event()

    def write():
        while not is_over.is_set():
            ProfileFolder(folder.root).write(ABOUT, 0, one)
            ProfileFolder(folder.root).write(ABOUT, 0, other)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    found = [folder.read(ABOUT, 0) for _ in range(100)]
    is_over.set()
    for writer in writers:
        writer.join()
    assert all(measured in (one, other) for measured in found)


def test_where_they_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = tmp_path / ".cache" / "rlx" / "measurements"
    for named, expected in (("/there", Path("/there/rlx/measurements")), ("", at_home), ("relative", at_home)):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert OffloadOptions().measurements_folder == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert OffloadOptions().measurements_folder == at_home
    assert OffloadOptions(cache_directory="~/mine").measurements_folder == tmp_path / "mine"
    assert OffloadOptions(cache_directory=None).measurements_folder is None
    assert not os.path.exists(at_home)
