"""What earlier runs have measured, and when a run may plan with it.

Note [figures of another run]
Times follow from layers, length and device, which the description of a measurement names. Bytes follow from more: a layer is
charged with what lies beside it, and what follows the layers (a head, a loss, how that is computed) is no module that could be
described. So a run finds its own bytes first. Its first pass, which warms up, is looked at as a measured one is; of it the
bytes count and not the times. Where layers and calls are those of a file, and bytes as in the file, to `_ALIKE`, the run is of the
kind that wrote it: from then on its files stand for measured passes. The length that was compared takes the times of the file and
the larger bytes of both, other lengths take the file's with their bytes enlarged by as much as the compared ones were
above theirs, and only for inputs that are no longer than those that were measured. So a step holds no more above its plan than
one that was planned from a pass of its own. Where the first pass differs, it may be for what kernels take when they first run, and
a measured pass is compared instead; where that differs, files are not believed in this run, and are written anew.
What the run has to spend (room on the device, the rate of the link, host memory) is never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from rlx.offload.autotune.pass_profile import LayerKind, PassProfile
from rlx.offload.autotune.profile_files import ProfileFolder
from rlx.offload.autotune.profile_key import (
    LayerKey,
    describe_around,
    describe_layer,
    describe_machine,
    describe_packages,
)
from rlx.offload.plan.costs import LayerCost, Operation
from rlx.offload.runtime.options import OffloadOptions
from rlx.offload.runtime.session import Layer

_ALIKE = 1.1  # bytes of two runs of a kind differ by less: in what is still leaving when they are read

T = TypeVar("T")
C = TypeVar("C", LayerCost, Operation)


class ProfileCache:
    """The files of one handle, and whether they are believed.

    Args:
        folder: of the files.
        options: of the handle.
        model: gives the model; None once it is gone.
        layers: gives the names of its layers.
    """

    def __init__(
        self,
        folder: ProfileFolder,
        options: OffloadOptions,
        model: Callable[[], nn.Module | None],
        layers: Callable[[], Sequence[str]],
    ) -> None:
        self.is_believed: bool | None = None  # None: nothing has been compared yet
        self._folder, self._options, self._model, self._names = folder, options, model, layers
        self._layers: dict[int, LayerKey] = {}
        self._around: dict[str, Any] | None = None
        self._ratio = 1.0  # of bytes of this run to those of files

    @property
    def has_any(self) -> bool:
        """Whether anything has ever been written there, of whatever layers: these are not known before they are called."""
        return self._folder.root.is_dir()

    def see(self, layer: Layer, module: nn.Module) -> None:
        """Describe a layer that is called for the first time, and with the first of them the rest of the model."""
        if self._around is None:
            model = self._model()
            self._around = {} if model is None else describe_around(model, self._names())
        self._layers[layer.index] = describe_layer(module)

    def describe(self, call: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """All that figures depend on but the length, as far as layers have been seen; `call` as `describe_call` gives it."""
        described = [self._layers[index] for index in sorted(self._layers)]
        return {
            "layers": _runs([(index, self._layers[index]) for index in sorted(self._layers)]),
            "around": self._around,
            "call": call,
            "machine": describe_machine(device, self._options),
            "packages": describe_packages(described),
        }

    def settle(self, about: Mapping[str, Any], length: int, own: PassProfile, is_first: bool) -> PassProfile | None:
        """What to plan with where a pass of this run has been measured; compares, and writes what is new.

        Args:
            about, length: of the pass.
            own: what it came to.
            is_first: it was the pass that warms up, whose times say nothing; None is returned then unless a file has them.
        """
        written = None if self.is_believed is False else self._folder.read(about, length)
        ratio = None if written is None else compared(own, written)
        if ratio is not None:
            self.is_believed = True
            self.enlarge(ratio)
        if is_first:
            return None if written is None or ratio is None else with_larger_bytes(written, own)
        if written is not None and ratio is None:
            self.is_believed = False
        if written is None or ratio is None or longest_bytes(own) > longest_bytes(written):
            self._folder.write(about, length, own)
        return own

    def enlarge(self, ratio: float) -> None:
        """Count bytes of files as so many times as much, unless they count as more already."""
        self._ratio = max(self._ratio, ratio)

    def may_settle(self, about: Mapping[str, Any], length: int) -> bool:
        """Whether there is a file that the first pass can be compared with."""
        return self.is_believed is not False and self._folder.read(about, length) is not None

    def recall(self, about: Mapping[str, Any], length: int, boundary_bytes: int = 0) -> PassProfile | None:
        """What a file says of a length, for inputs of so many bytes; None where files are not believed or do not say."""
        written = self._folder.read(about, length) if self.is_believed else None
        if written is None or boundary_bytes > longest_bytes(written):
            return None
        return enlarged(written, self._ratio)

    def recall_others(self, about: Mapping[str, Any], known: Container[int]) -> dict[int, PassProfile]:
        """What files say of all lengths but those that are known."""
        lengths = self._folder.lengths(about) if self.is_believed else []
        found = {length: self.recall(about, length) for length in lengths if length not in known}
        return {length: measurement for length, measurement in found.items() if measurement is not None}


def compared(own: PassProfile, written: PassProfile) -> float | None:
    """By how much the bytes of one measurement are above those of another of the same layers, at least 1; None: not alike.

    Bytes may differ by as much as the lengths of the two do, and by `_ALIKE`.
    """
    if list(map(_layers_of, own.kinds)) != list(map(_layers_of, written.kinds)):
        return None
    pairs = [(own.outside_bytes, written.outside_bytes)]
    for kind, other in zip(own.kinds, written.kinds, strict=True):
        pairs += zip(_figures(kind.cost), _figures(other.cost), strict=True)
    length = longest_bytes(own) / max(longest_bytes(written), 1)
    largest = 1.0
    for mine, theirs in pairs:
        if not theirs * min(1.0, length) / _ALIKE <= mine <= theirs * max(1.0, length) * _ALIKE:
            return None
        largest = max(largest, mine / max(theirs * max(1.0, length), 1))
    return largest


def _layers_of(kind: LayerKind) -> tuple[object, ...]:
    """What layers of a kind do. Which operations are worth being planned depends on times, and is not among it."""
    return kind.members, kind.names, kind.flow


def longest_bytes(measurement: PassProfile) -> int:
    """The most bytes that a layer was called with."""
    return max((kind.cost.boundary_bytes for kind in measurement.kinds), default=0)


def _figures(cost: LayerCost) -> list[int]:
    return [value for field in fields(cost) if field.name.endswith("bytes") for value in [getattr(cost, field.name)]]


def with_larger_bytes(measurement: PassProfile, own: PassProfile) -> PassProfile:
    """The times of one, the larger bytes of both where they are of the same layers."""
    if [kind.members for kind in measurement.kinds] != [kind.members for kind in own.kinds]:
        return measurement
    kinds = []
    for kind, other in zip(measurement.kinds, own.kinds, strict=True):
        theirs = dict(zip(other.places, other.cost.operations, strict=True))
        operations = [
            _larger(operation, theirs.get(place, operation))
            for place, operation in zip(kind.places, kind.cost.operations, strict=True)
        ]
        same = {(point.call, point.slots): point for point in other.cost.points}
        points = [
            point._replace(nbytes=max(point.nbytes, found.nbytes))
            for point in kind.cost.points
            if (found := same.get((point.call, point.slots))) is not None
        ]
        cost = replace(_larger(kind.cost, other.cost), operations=tuple(operations), points=tuple(points))
        kinds.append(kind._replace(cost=cost))
    return PassProfile(tuple(kinds), max(measurement.outside_bytes, own.outside_bytes), measurement.turnaround_s)


def _larger(one: C, other: C) -> C:
    changes: dict[str, Any] = {
        field.name: max(getattr(one, field.name), getattr(other, field.name))
        for field in fields(one)
        if field.name.endswith("bytes")
    }
    return replace(one, **changes)


def enlarged(measurement: PassProfile, ratio: float) -> PassProfile:
    """A measurement with its bytes multiplied."""
    return _changed(measurement, lambda name, value: round(value * ratio) if name.endswith("bytes") else value)


def _changed(value: T, change: Callable[[str, Any], Any], name: str = "") -> T:
    """Nested dataclasses and tuples with each field that holds none of them changed."""
    made: Any = value
    if is_dataclass(made) and not isinstance(made, type):
        made = replace(made, **{f.name: _changed(getattr(made, f.name), change, f.name) for f in fields(made)})
    elif isinstance(made, tuple) and hasattr(made, "_fields"):
        made = type(made)(*(_changed(getattr(made, field), change, field) for field in made._fields))
    elif isinstance(made, tuple):
        made = tuple(_changed(item, change, name) for item in made)
    else:
        made = change(name, made)
    return made  # type: ignore[no-any-return]


def _runs(layers: Sequence[tuple[int, LayerKey]]) -> list[list[Any]]:
    """Class, digest, first and last index of layers that follow each other and are alike."""
    runs: list[list[Any]] = []
    for index, layer in layers:
        if runs and runs[-1][:2] == list(layer) and runs[-1][3] == index - 1:
            runs[-1][3] = index
        else:
            runs.append([*layer, index, index])
    return runs
