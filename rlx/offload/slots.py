"""What autograd holds instead of the tensors that it saves in a recomputed layer, and what is known of these.

Note [the work of hooks]
What is done for each tensor as autograd saves it costs several times what the same costs in a loop, for the kernels of the
layer take turns with it. So the hooks only note tensors, and what there is to look at is looked at when forward, or
recomputation, has ended. Until then a layer's saved tensors stay alive, as without the engine: in forward this is less
than what recomputing the layer needs later. The lists of tensors are emptied at the end in any case, for the graph holds
the hooks, the hooks the lists, and the tensors the graph.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor
from torch.nn import Parameter

from rlx.offload.identity import modified_in_place, without_memory

_VERSION = operator.attrgetter("_version")
_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
_UNWATCHED = torch.empty(0, device="cpu")  # stands for what has no version counter; nobody writes to it


class Kinds:
    """What the tensors are that autograd has saved, but for their values.

    Args:
        saved: the tensors.
        owners: see `_owners`.
    """

    def __init__(self, saved: Sequence[Tensor], owners: Sequence[Tensor]) -> None:
        self.types = list(map(type, owners))
        self.is_parameter = [kind is Parameter for kind in self.types]
        self.is_other = [kind is not Parameter for kind in self.types]
        others = list(itertools.compress(saved, self.is_other))  # parameters are known by themselves
        self.dtypes = list(map(_DTYPE, others))
        self.shapes = list(map(_shape, others))

    def are_of(self, saved: Sequence[Tensor], owners: Sequence[Tensor]) -> bool:
        """Whether they are those of some tensors; False where one of these is nested."""
        if list(map(type, owners)) != self.types:
            return False
        others = list(itertools.compress(saved, self.is_other))
        try:
            return list(map(_DTYPE, others)) == self.dtypes and list(map(_SHAPE, others)) == self.shapes
        except RuntimeError:
            return False


class Slots:
    """The slots of one forward call: numbers, in the order in which autograd saves tensors."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []  # while forward runs
        self.versions: list[int | None] = []  # of the tensors when they were saved; None for those that have none
        # Known when forward has ended. What shares the version counter: a parameter itself, else a tensor without memory;
        # for what has no counter, one to which nobody writes.
        self.watches: list[Tensor] = []
        self.parameters: list[Tensor] = []  # of the slots that look at one
        self._kinds: Kinds | None = None
        # While forward runs: what watches a tensor and its views, by the id of the one that they are views of. Those in it
        # before it ends are alive as long.
        self.watch_by_base: dict[int, Tensor] = {}

    def packer(self) -> Callable[[Tensor], int]:
        """The pack hook of forward."""
        saved, versions = self.saved, self.versions

        def pack(tensor: Tensor) -> int:
            saved.append(tensor)
            try:
                versions.append(tensor._version)
            except RuntimeError:  # of an inference tensor
                versions.append(None)
            return len(versions) - 1

        return pack

    def end_forward(self, expected: Kinds | None) -> Kinds:
        """Keep of the saved tensors all but their memory.

        Args:
            expected: what this returned for the layer's last forward. As a rule it is the same: one object for all steps.
        """
        saved, versions, by_base = self.saved, self.versions, self.watch_by_base
        owners = _owners(saved)
        self._kinds = kinds = (
            expected if expected is not None and expected.are_of(saved, owners) else Kinds(saved, owners)
        )
        self.parameters = list(itertools.compress(owners, kinds.is_parameter))
        watches: list[Tensor] = []
        for tensor, owner in zip(saved, owners, strict=True):
            watch = by_base.get(id(owner))
            if watch is None:
                index = len(watches)
                watch = _UNWATCHED if versions[index] is None else _watch(tensor, owner)
                if watch is _UNWATCHED:
                    versions[index] = watch._version
                else:
                    by_base[id(owner)] = watch
            watches.append(watch)
        self.watches.extend(watches)  # at once, and last: from here on slots may be asked for
        return kinds

    def leave_forward(self) -> None:
        """Let go of the tensors, also when an exception has ended forward."""
        self.saved.clear()
        self.watch_by_base.clear()

    def written(self, index: int) -> RuntimeError:
        """The error for a write to the tensor of a slot after it was saved."""
        version, kinds = self.versions[index], self._kinds
        assert version is not None and kinds is not None
        place = kinds.is_parameter[:index].count(kinds.is_parameter[index])  # among those of its sort
        if kinds.is_parameter[index]:
            shape, dtype = self.parameters[place].shape, self.parameters[place].dtype
        else:
            shape, dtype = kinds.shapes[place] or torch.Size(), kinds.dtypes[place]
        return modified_in_place(shape, dtype, version, "but was written to after that")

    def are_repeated(self, saved: Sequence[Tensor]) -> bool:
        """Whether tensors that were saved again are surely as those that were saved first, parameters unchanged.

        Where this is False `changed_parameter` and `difference` tell why, or that they are all the same.
        """
        owners, kinds = _owners(saved), self._kinds
        if kinds is None or not kinds.are_of(saved, owners):
            return False
        if not all(map(operator.is_, itertools.compress(owners, kinds.is_parameter), self.parameters)):
            return False
        return list(itertools.compress(self.versions, kinds.is_parameter)) == list(map(_VERSION, self.parameters))

    def changed_parameter(self, saved: Sequence[Tensor], answered: Set[int]) -> str | None:
        """What has been done to a parameter that was saved; None for nothing. Slots in `answered` hold results only."""
        assert self._kinds is not None
        parameters = iter(self.parameters)
        firsts = [next(parameters) if is_parameter else None for is_parameter in self._kinds.is_parameter]
        for index, (owner, first) in enumerate(zip(_owners(saved), firsts, strict=False)):
            if owner is first:
                if owner._version != self.versions[index]:
                    return f"a parameter of shape {list(owner.shape)} has been modified by an inplace operation"
            elif type(owner) is Parameter or (first is not None and index not in answered):
                return f"a parameter of shape {list(saved[index].shape)} has been replaced"
        return None

    def difference(self, saved: Sequence[Tensor]) -> str | None:
        """How tensors that were saved again differ from those that were saved first; None where they do not.

        What looks at parameters is left to `changed_parameter`.
        """
        if len(saved) != len(self.versions):
            return f"{len(self.versions)} tensors were saved and {len(saved)} are now"
        kinds = self._kinds
        assert kinds is not None
        others = itertools.compress(enumerate(saved), kinds.is_other)
        for (index, tensor), dtype, shape in zip(others, kinds.dtypes, kinds.shapes, strict=True):
            if dtype != tensor.dtype or (shape is not None and shape != tensor.shape):
                return f"tensor {index} was {dtype} {shape} and is {tensor.dtype} {tensor.shape} now"
        return None


def _owners(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What each tensor is a view of, or itself: all views of a tensor share its version counter."""
    return [tensor if (base := tensor._base) is None else base for tensor in tensors]


def _watch(tensor: Tensor, owner: Tensor) -> Tensor:
    """What shares the version counter of a tensor and keeps nothing else of it that would not stay anyway."""
    if type(owner) is Parameter:
        return owner
    if type(tensor) is not Tensor:
        return _UNWATCHED
    try:
        return without_memory(tensor)
    except RuntimeError:  # sparse and nested layouts
        return _UNWATCHED


def _shape(tensor: Tensor) -> torch.Size | None:
    try:
        return tensor.shape
    except RuntimeError:  # nested tensors have none
        return None
