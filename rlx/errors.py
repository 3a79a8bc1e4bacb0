"""A leaf: errors that explain themselves, of files that cannot be written, in other processes, and of the kernel; suggestions for names."""

import errno
import os
import re
import shutil
import textwrap
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

WIDTH = 100
_FULL = {errno.ENOSPC: "no space is left", errno.EDQUOT: "the quota is used up"}
_CAUSES = _FULL | {
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.ENOENT: "the folder is gone",
    errno.ESTALE: "the folder is gone",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EIO: "the device reports an error",
    errno.EFBIG: "the file would be larger than this process may write (ulimit -f)",
}


class ExplainedError(Exception):
    """An error whose message says what happened and what to do, so it is shown without the driver's traceback.

    If it has a cause, such as an error in a user's reward function, the traceback of the cause is shown.
    """

    may_be_wrapped = True  # False: the text holds a traceback, or its last line must stay whole


class InProcess(Exception):
    """An error in a process that runs a user's code; its text is the traceback from that process."""


def cause_of(trace: str) -> InProcess | None:
    """Return the cause of an error that another process reported, from the traceback there; None if there is none."""
    return InProcess(f"\n{trace}") if trace else None


def shown(fault: BaseException) -> str:
    """Return the traceback of an error for the screen: of one InProcess that from there alone."""
    return str(fault).strip() if isinstance(fault, InProcess) else "".join(traceback.format_exception(fault)).rstrip()


class StorageError(ExplainedError, RuntimeError):
    """A file cannot be written; the message names it, the cause and the free space."""


@contextmanager
def storing(path: str | Path, then: str = "resume the run") -> Iterator[None]:
    """Turn a failure of what is written to this path into a StorageError.

    Libraries report a full disk in their own ways: safetensors names the number of the system's error in its text, and torch
    says that a position is unexpected. So any error counts as a full disk if no space is left there.

    Args:
        path: the file or folder that is written; it need not exist.
        then: what to do when the cause is corrected.

    Raises StorageError: the system refused to write, or no space is left.
    """
    try:
        yield
    except ExplainedError:
        raise
    except Exception as fault:
        free_bytes = _free_bytes(Path(path))
        named = re.search(r"os error (\d+)", str(fault))  # by libraries written in Rust
        number = fault.errno if isinstance(fault, OSError) else int(named[1]) if named else None
        if number is None and free_bytes is not None and free_bytes < 4096:
            number = errno.ENOSPC
        if number is None:
            raise
        what = _CAUSES.get(number, os.strerror(number))
        space = "" if free_bytes is None else f" ({free_bytes / 1e9:.3f} GB free)"
        remedy = "free some space" if number in _FULL else "correct that"
        raise StorageError(f"cannot write {path}: {what}{space}; {remedy}, then {then}") from None


def _free_bytes(path: Path) -> int | None:
    """Return the space that is left for this path, or None if it is not known."""
    nearest = next((each for each in (path, *path.absolute().parents) if os.path.lexists(each)), None)
    try:
        return None if nearest is None else shutil.disk_usage(nearest).free
    except OSError:
        return None


def kernel_line(pid: int, log: str = "/dev/kmsg") -> str:
    """Return the kernel's line about a process that it killed for memory; empty if there is none or the log cannot be read."""
    with suppress(OSError):
        records = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        found = ""
        try:
            while record := os.read(records, 1 << 16):  # one record at a time, until BlockingIOError
                killed = re.search(rf"[^;\n]*\bKilled process {pid}\b[^\n]*", record.decode(errors="replace"))
                found = killed[0].strip() if killed else found
        except BlockingIOError:
            pass
        finally:
            os.close(records)
        return found
    return ""


def wrapped(text: str) -> str:
    """Return the text with lines longer than WIDTH wrapped at blanks; names and paths stay whole.

    A wrapped line continues below its beginning, after its number or its label: `got:`, `expected:`, `remedy:`.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        label = re.match(r" *(\d+\. |(got|expected|remedy|warning): )?", line)
        indent = " " * (label.end() if label else 0)
        whole = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
        lines += [line] if len(line) <= WIDTH else textwrap.wrap(line, WIDTH, subsequent_indent=indent, **whole)
    return "\n".join(lines)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, most: int = 1) -> str:
    """Return a remedy for an unknown name: up to `most` similar known names, else `otherwise`."""
    near = get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(near)}?" if near else otherwise
