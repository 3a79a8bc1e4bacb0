"""Folders and files that appear complete or not at all: written under another name, then renamed. Their modes follow the umask.

`RemoteFolder` copies finished folders to and from a file system that fsspec knows: s3://, gs://, abfs://, file:// and others.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TextIO

from rlx.errors import StorageError

MANIFEST = "manifest.json"


def partial_of(folder: Path) -> Path:
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


class RemoteFolder:
    """A folder in object storage, `scheme://path`. Raises StorageError if the scheme is unknown, or its package is missing.

    Credentials come from the environment, as the scheme's package reads them.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = url.rstrip("/")
        with _explained(self.url):
            self._files, path = fsspec.core.url_to_fs(self.url)
        self._path = path.rstrip("/")

    def names(self, below: str = "") -> list[str]:
        """Return the names in a folder, in order; none if it does not exist."""
        with _explained(self.url):
            self._files.invalidate_cache()
            place = self._at(below)
            found = self._files.ls(place, detail=False) if self._files.exists(place) else []
            return sorted(PurePosixPath(each).name for each in found)

    def has(self, name: str) -> bool:
        with _explained(self.url):
            return bool(self._files.exists(self._at(name)))

    def upload(self, folder: Path, below: str) -> None:
        """Copy a sealed folder; its manifest goes last, so a folder with a manifest is complete."""
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        for path in sorted(files, key=lambda path: path == folder / MANIFEST):
            self.put(path, f"{below}/{path.relative_to(folder).as_posix()}")

    def put(self, path: Path, name: str) -> None:
        with _explained(f"{self.url}/{name}"):
            self._files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), self._at(name))

    def get(self, name: str, path: Path) -> None:
        with _explained(f"{self.url}/{name}"):
            self._files.get_file(self._at(name), str(path))

    def download(self, below: str, folder: Path) -> None:
        """Copy a sealed folder; it appears when all of it is there. Raises StorageError if there is none."""
        url = f"{self.url}/{below}".rstrip("/")
        with replacing(folder) as partial, _explained(url):
            places = self._files.find(self._at(below))
            if f"{self._at(below)}/{MANIFEST}".lstrip("/") not in {place.lstrip("/") for place in places}:
                raise StorageError(f"{url}: got {len(places)} files without {MANIFEST}, expected a finished checkpoint")
            for place in places:
                name = PurePosixPath(place).relative_to(PurePosixPath(self._at(below)))
                if ".." in name.parts:
                    raise OSError(f"{name} leads out of the folder")
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(place, str(target))

    def move(self, below: str, to: str) -> None:
        """Give a folder another place, where it replaces what is there."""
        self.remove(to)
        with _explained(f"{self.url}/{below}"):
            self._files.mv(self._at(below), self._at(to), recursive=True)

    def remove(self, below: str) -> None:
        """Remove a folder, its manifest first; do nothing if it does not exist."""
        with _explained(f"{self.url}/{below}"):
            if self.has(f"{below}/{MANIFEST}"):
                self._files.rm_file(self._at(f"{below}/{MANIFEST}"))
            if self._files.exists(self._at(below)):
                self._files.rm(self._at(below), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path


@contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except ImportError as error:
        raise StorageError(f"{url}: its file system needs a package: {error}") from None
    except Exception as error:  # each file system has errors of its own
        raise StorageError(f"{url}: {type(error).__name__}: {error}") from None
