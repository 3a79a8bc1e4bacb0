"""Folders and files that appear complete or not at all: written under another name, then renamed. Their modes follow the umask."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def partial_of(folder: Path) -> Path:
    """Return the name of the folder while it is written."""
    return folder.parent / f".{folder.name}.partial"


def begin(folder: Path) -> Path:
    """Make the empty folder to write into, without leftovers of an earlier attempt, and return it."""
    partial, old = partial_of(folder), _old(folder)
    if old.exists() and not folder.exists():  # a kill between the two renames of `commit`
        old.rename(folder)
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def commit(folder: Path) -> None:
    """Put what was written in place of `folder`."""
    if folder.exists():
        folder.rename(_old(folder))
    partial_of(folder).rename(folder)
    shutil.rmtree(_old(folder), ignore_errors=True)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; at the end it replaces `folder`. After an error `folder` is unchanged."""
    partial = begin(folder)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    commit(folder)


@contextmanager
def replacing_file(path: Path) -> Iterator[TextIO]:
    """Yield a text file to write; at the end it is on the disk and replaces `path`, of a link the link itself."""
    partial = path.with_name(f".{path.name}.part")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("x", encoding="utf-8") as file:  # x follows no link that somebody put there
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _old(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.old"
