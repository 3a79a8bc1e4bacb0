"""The profiles of earlier runs, as one JSON file for each cache key.

A file holds the key as plain text, the profiles of all lengths and a checksum. A run writes it under another name and renames it,
so that readers always find a whole file, even if several runs write. A damaged file counts as absent. `consensus.py` decides
whether a run may plan with the profiles.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import nn

from rlx.offload.autotune.length_bucket import Key
from rlx.offload.autotune.pass_profile import PassProfile
from rlx.offload.autotune.profile_key import cache_key, describe_around, describe_layer, digest
from rlx.offload.runtime.options import OffloadOptions
from rlx.offload.runtime.session import Layer

logger = logging.getLogger("rlx.offload")


class ProfileCache:
    """The cached profiles of one handle, in the files of a folder; `layers` returns the names of the model's layers."""

    def __init__(
        self,
        folder: Path,
        options: OffloadOptions,
        model: Callable[[], nn.Module | None],
        layers: Callable[[], Sequence[str]],
    ) -> None:
        self._folder, self._options, self._model, self._names = folder, options, model, layers
        self._layers: dict[int, str] = {}
        self._around: str | None = None
        self._written: dict[Key, PassProfile] = {}
        self._warned: set[str] = set()

    @property
    def has_folder(self) -> bool:
        """Whether the folder exists. Its profiles may be of other layers: a run describes its layers when they are called."""
        return os.path.isdir(self._folder)  # raises no error for a folder without permission to search

    def see(self, layer: Layer, module: nn.Module) -> None:
        """Describe a layer that is called for the first time; with the first layer, also describe the rest of the model."""
        model = self._model()
        if not self._layers and model is not None:
            self._around = describe_around(model, self._names())
        self._layers[layer.index] = describe_layer(module)

    def key(self, call: Mapping[str, Any], devices: Sequence[torch.device]) -> dict[str, Any]:
        """Return the cache key of the layers seen so far; see `cache_key`."""
        return cache_key(self._layers, self._around, call, devices, self._options)

    def read(self, key: Mapping[str, Any]) -> dict[Key, PassProfile]:
        """Return the profiles in the file of a key; none if the file is absent or damaged."""
        path, found = self._path(key), {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["check"] != digest(content["profiles"]) or content["key"] != json.loads(json.dumps(key)):
                raise ValueError("its checksum or its key is wrong")
            for name, data in content["profiles"].items():
                device, length = map(int, name.split("."))
                found[device, length] = from_json(data)
        except FileNotFoundError:
            return {}
        except Exception as error:  # a damaged file may cause any error, and must not end a run
            self._warn_once("read", f"{path} is ignored and measured anew: {_reason(error)}")
            return {}
        return found

    def write(self, key: Mapping[str, Any], profiles: Mapping[Key, PassProfile], keep_others: bool) -> None:
        """Add profiles to the file of a key, or replace those of other runs. A folder that cannot be written causes one warning."""
        self._written |= profiles
        merged = {**(self.read(key) if keep_others else {}), **self._written}
        data = {f"{device}.{length}": to_json(profile) for (device, length), profile in merged.items()}
        path = self._path(key)
        unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"check": digest(data), "key": key, "profiles": data}, indent=1)
            unfinished.write_text(text, encoding="utf-8")
            unfinished.chmod(0o644)  # several users may share a folder
            unfinished.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            self._warn_once(
                "write",
                f"profiles cannot be kept in {self._folder} ({_reason(error)}): the next run measures again. Set "
                "cache_directory to a folder that can be written, or to None",
            )

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self._folder / f"{digest(key)}.json"

    def _warn_once(self, action: str, text: str) -> None:
        if action not in self._warned:
            self._warned.add(action)
            logger.warning("activation offloading: %s. This warning is given once", text)


def to_json(value: Any) -> Any:
    """Return dataclasses and named tuples as dicts, other tuples as lists, and anything else as it is."""
    value = vars(value) if is_dataclass(value) else value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {name: to_json(item) for name, item in value.items()}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def from_json(data: Any, kind: Any = PassProfile) -> Any:
    """Return the value of a type that `to_json` was given. Raises any exception if `data` is something else."""
    arguments = get_args(kind)
    if type(None) in arguments:
        return None if data is None else from_json(data, arguments[0])
    if get_origin(kind) is tuple:
        kinds = arguments[:1] * len(data) if arguments[-1] is Ellipsis else arguments
        return tuple(map(from_json, data, kinds))
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        return kind(**{name: from_json(item, hints[name]) for name, item in data.items()})
    return data


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
