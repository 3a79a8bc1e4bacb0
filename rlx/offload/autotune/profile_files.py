"""Files in which measurements outlast a run: one for each length, in a folder for each description of what was measured.

A file is written beside its place and renamed, so that whoever reads one has a whole one, whoever else writes. It holds the
description in the clear and a checksum. What is damaged, or was written for something else, counts as not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import tempfile
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlx.offload.autotune.pass_profile import PassProfile

logger = logging.getLogger("rlx.offload")

FORMAT = 2  # of the files

T = TypeVar("T")


class ProfileFolder:
    """Measurements by what was measured and how long it was.

    Args:
        root: made when the first file is written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._has_warned: set[str] = set()

    def read(self, about: Mapping[str, Any], length: int) -> PassProfile | None:
        """What was written with the same description and length; None if there is nothing that can be used.

        Args:
            about: what JSON can hold.
            length: of the bucket, as the controller counts it.
        """
        path = self._path(about, length)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn_once("read", f"{path} cannot be read ({_said(error)}): it is measured instead")
            return None
        try:
            written = json.loads(text)
            if not isinstance(written, dict) or written.get("format") != FORMAT:
                raise ValueError(f"it is no measurement in format {FORMAT}")
            if written.get("check") != _digest(written.get("measurement")):
                raise ValueError("its checksum is wrong")
            if written.get("about") != json.loads(json.dumps(about)) or written.get("length") != length:
                raise ValueError("it describes something else")
            return from_json(PassProfile, written["measurement"])
        except (ValueError, RecursionError) as error:
            self._warn_once("read", f"{path} is ignored and measured anew: {_said(error)}")
            return None

    def write(self, about: Mapping[str, Any], length: int, measurement: PassProfile) -> None:
        """Write a measurement in place of what is there. A folder that cannot be written is said once and left alone."""
        path, measured = self._path(about, length), to_json(measurement)
        content = {
            "format": FORMAT,
            "length": length,
            "check": _digest(measured),
            "about": about,
            "measurement": measured,
        }
        unfinished = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
            ) as file:
                unfinished = file.name
                json.dump(content, file, indent=1)
            os.chmod(unfinished, 0o644)  # several users may share a folder
            os.replace(unfinished, path)
        except OSError as error:
            self._warn_once(
                "write",
                f"measurements cannot be kept in {self.root} ({_said(error)}): the next run measures again. Set cache_directory "
                "to a folder that can be written, or to None",
            )
            if unfinished is not None:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)

    def lengths(self, about: Mapping[str, Any]) -> list[int]:
        """The lengths of which there are files with this description, usable or not."""
        try:
            names = os.listdir(self._path(about, 0).parent)
        except OSError:
            return []
        stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal())

    def _path(self, about: Mapping[str, Any], length: int) -> Path:
        return self.root / _digest(about)[:32] / f"{length}.json"

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._has_warned:
            self._has_warned.add(what)
            logger.warning("activation offloading: %s. Said once", text)


def to_json(value: Any) -> Any:
    """Dataclasses, named tuples, tuples, frozensets, numbers, texts and None as what JSON can hold.

    Raises:
        TypeError: for anything else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    names = _field_names(type(value))
    if names is not None:
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, frozenset):
        return sorted((to_json(item) for item in value), key=json.dumps)
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    raise TypeError(f"got a {type(value).__name__}, expected a dataclass, tuple, frozenset, number, text or None")


def from_json(kind: type[T], data: Any) -> T:
    """What `to_json` has made of a value, by the types that the fields of its class are annotated with.

    Args:
        kind: a dataclass or named tuple of these, of tuples and frozensets of them, of numbers, texts and None.
        data: as `json.loads` gives it.

    Raises:
        ValueError: where data and types do not agree, a field is missing or unknown, or a number is not finite.
    """
    made = _made(kind, data, kind.__name__)
    assert isinstance(made, kind)
    return made


def _made(hint: Any, data: Any, where: str) -> Any:
    names = _field_names(hint)
    if names is not None:
        return _made_object(hint, names, data, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for one in arguments:
            with contextlib.suppress(ValueError):
                return _made(one, data, where)
    elif origin is tuple and isinstance(data, list):
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(data)
        if len(arguments) == len(data):
            return tuple(_made(one, item, where) for one, item in zip(arguments, data, strict=True))
    elif origin is frozenset and isinstance(data, list):
        return frozenset(_made(arguments[0], item, where) for item in data)
    elif hint is float and type(data) in (int, float) and math.isfinite(data):
        return float(data)
    elif hint is type(None) and data is None:
        return None
    elif hint in (bool, int, str) and type(data) is hint:
        return data
    raise ValueError(f"{where}: got {str(data)[:40]!r}, expected {getattr(hint, '__name__', hint)}")


def _made_object(kind: Any, names: Sequence[str], data: Any, where: str) -> Any:
    if not isinstance(data, dict) or data.keys() != set(names):
        got = sorted(data) if isinstance(data, dict) else str(data)[:40]
        raise ValueError(f"{where}: got {got}, expected the fields {', '.join(names)}")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _made(hints[name], data[name], f"{where}.{name}") for name in names})


def _field_names(kind: Any) -> tuple[str, ...] | None:
    """Of a dataclass or a named tuple."""
    if not isinstance(kind, type):
        return None
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return getattr(kind, "_fields", None) if issubclass(kind, tuple) else None


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
