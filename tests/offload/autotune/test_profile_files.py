"""Files of the profile cache: every field that is written is read again, and a damaged or foreign file is ignored."""

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
from rlx.offload.autotune.pass_profile import PROFILE_VERSION, LayerKind, PassProfile
from rlx.offload.autotune.profile_cache import ProfileCache, from_json, to_json
from rlx.offload.autotune.profile_key import digest
from rlx.offload.plan.costs import LayerCost, Operation, Point
from rlx.offload.replay.dataflow import Dataflow, OpNode

KEY = {"version": 1, "layers": ["a", 1], "devices": ["CPU"]}
LENGTH, OTHER = (0, 7), (1, -3)  # device and length


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
def open_cache(tmp_path):
    """`open_cache(folder)`: a cache as another process opens it."""
    return lambda folder=tmp_path / "profiles": ProfileCache(folder, OffloadOptions(), lambda: None, lambda: ())


@pytest.fixture
def cache(open_cache):
    return open_cache()


@pytest.fixture
def file(cache, tmp_path):
    """A file with one profile."""
    cache.write(KEY, {LENGTH: measurement()}, keep_others=True)
    (found,) = (tmp_path / "profiles").iterdir()  # nothing unfinished is left
    return found


@pytest.mark.parametrize("empty", [False, True])
def test_every_field_comes_back_as_it_was(cache, open_cache, empty):
    written = measurement(empty)
    assert from_json(json.loads(json.dumps(to_json(written)))) == written
    cache.write(KEY, {LENGTH: written}, keep_others=True)
    assert cache.read(KEY) == open_cache().read(KEY) == {LENGTH: written}


def test_a_change_of_fields_has_a_version_of_its_own():
    """Whoever changes a field of a profile raises `PROFILE_VERSION`, and then changes both numbers here."""
    fields = [
        list(typing.get_type_hints(kind))
        for kind in (PassProfile, LayerKind, LayerCost, Operation, Point, Dataflow, OpNode)
    ]
    assert (PROFILE_VERSION, digest(fields)[:8]) == (5, "fe2e8fb7")


def test_lengths_of_several_runs_are_in_one_file(cache, open_cache, file):
    other = measurement()._replace(loss_bytes=5)
    second = open_cache()
    second.write(KEY, {OTHER: other}, keep_others=True)
    assert cache.read(KEY) == {LENGTH: measurement(), OTHER: other}
    second.write(KEY, {}, keep_others=False)
    assert cache.read(KEY) == {OTHER: other}
    assert cache.read({**KEY, "layers": ["a", 2]}) == {}


def with_right_checksum(text):
    content = json.loads(text)
    content["profiles"]["0.7"]["kinds"] = 3
    return json.dumps({**content, "check": digest(content["profiles"])})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[1, 2]",
        lambda text: text.replace('"loss_bytes": ', '"loss_bytes": 1'),
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: text.replace('"CPU"', '"TPU"'),
        with_right_checksum,
        lambda text: "[" * 100_000,
        lambda text: "\0\x80",
    ],
    ids=["cut", "empty", "other", "a figure", "version", "of something else", "other types", "deep", "bytes"],
)
def test_a_damaged_or_foreign_file_is_ignored_with_one_line_and_replaced(cache, file, caplog, damage):
    file.write_bytes(damage(file.read_text()).encode("latin-1"))
    assert cache.read(KEY) == cache.read(KEY) == {}
    (record,) = caplog.records
    assert str(file) in record.getMessage() and record.levelno == logging.WARNING
    cache.write(KEY, {LENGTH: measurement()}, keep_others=True)
    assert cache.read(KEY) == {LENGTH: measurement()}


def test_a_folder_where_a_file_should_be_is_ignored(cache, file, caplog):
    file.unlink()
    file.mkdir()
    assert cache.read(KEY) == {}
    cache.write(KEY, {LENGTH: measurement()}, keep_others=True)
    assert [("is ignored" in r.getMessage(), "cannot be kept" in r.getMessage()) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]
    assert list(file.parent.iterdir()) == [file]


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, open_cache, caplog):
    (tmp_path / "file").write_text("")
    cache = open_cache(tmp_path / "file" / "below")
    for length in range(3):
        cache.write(KEY, {(0, length): measurement()}, keep_others=False)
    assert sum("cannot be kept" in record.getMessage() for record in caplog.records) == 1
    assert cache.read(KEY) == {}


def test_who_reads_while_others_write_has_a_whole_file(cache, open_cache, caplog):
    one, other = measurement(), measurement()._replace(loss_bytes=5)
    cache.write(KEY, {LENGTH: one}, keep_others=True)
    is_over = threading.Event()

    def write():
        while not is_over.is_set():
            open_cache().write(KEY, {LENGTH: one}, keep_others=True)
            open_cache().write(KEY, {LENGTH: other}, keep_others=True)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    found = [cache.read(KEY) for _ in range(100)]
    is_over.set()
    for writer in writers:
        writer.join()
    assert all(read in ({LENGTH: one}, {LENGTH: other}) for read in found)
    assert not caplog.records


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
