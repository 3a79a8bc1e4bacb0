"""What autograd holds instead of the tensors that it saves in a recomputed layer, and what is known of these.

Note [the work of hooks]
What is done for each tensor as autograd saves it costs several times what the same costs in a loop, for the kernels of the
layer take turns with it. So the hooks only note tensors, and what there is to look at is looked at when forward, or
recomputation, has ended. Until then a layer's saved tensors stay alive, as without the engine: in forward this is less
than what recomputing the layer needs later. The lists of tensors are emptied at the end in any case, for the graph holds
the hooks, the hooks the lists, and the tensors the graph.

Note [who may write to a saved tensor]
What an operation in the layer gave is computed anew before backward reads it, so that writes to what is left of the first
one spoil nothing. They are errors in plain autograd, and are here: while forward runs the version tells, after that a weak
reference, for a tensor of which neither it nor a view is left can be written to by nobody, but through an alias without
a graph (`detach`). What was there before the layer (a constant, a mask) is read again by the recomputation. It may be
written to through any alias; so one is kept, without memory, that shares its version counter.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from rlx.offload.storage.regions import modified_in_place, without_memory

_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")
# On the CPU a product with which a layer ends is left out if it has as many operations: fewer take less time than an exception
# through the operator's frames.
WORTH_ENDING_FLOPS = 1e6
_NOBODYS = torch.empty(0, device="cpu")
_UNWATCHED = weakref.ref(_NOBODYS)  # stands for what has no version counter; nobody writes to it


class TensorSpecs(NamedTuple):
    """Dtypes and shapes of tensors; None for a shape: nested tensors have none."""

    dtypes: list[torch.dtype]
    shapes: list[torch.Size | None]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> TensorSpecs:
        """Those of some tensors."""
        return cls([tensor.dtype for tensor in tensors], [_shape(tensor) for tensor in tensors])

    def are_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether they are those of some tensors; False where one of these is nested."""
        try:
            return list(map(_DTYPE, tensors)) == self.dtypes and list(map(_SHAPE, tensors)) == self.shapes
        except RuntimeError:
            return False


class SavedSlots:
    """The slots of one forward call: numbers, in the order in which autograd saves tensors."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []  # while forward runs
        self.versions: list[int | None] = []  # of the tensors when they were saved; None for those that have none
        # Known when forward has ended. What shares the version counter, for as long as there is somebody who may write to it
        # (Note [who may write to a saved tensor]); for what has no counter, a tensor to which nobody writes.
        self.watches: list[weakref.ref[Tensor]] = []
        self._aliases: list[Tensor] = []  # of those that must be watched for as long as this lives
        self.parameters: dict[int, Parameter] = {}  # those that slots look at
        self._others: list[int] = []  # the slots that look at none
        self._views: list[int] = []  # those of them that look at something else
        self.kinds = TensorSpecs([], [])  # of what these look at
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

    def end_forward(self, expected: TensorSpecs | None) -> TensorSpecs:
        """Keep of the saved tensors all but their memory.

        Args:
            expected: what this returned for the layer's last forward. As a rule it is the same: one object for all steps.
        """
        versions, by_base = self.versions, self.watch_by_base
        watches: list[weakref.ref[Tensor]] = []
        others: list[Tensor] = []
        for index, tensor in enumerate(self.saved):
            base = tensor._base  # all views of a tensor share its version counter
            if base is None:
                base = tensor
            version = versions[index]
            if type(base) is Parameter and version is not None:
                self.parameters[index] = base
                watches.append(weakref.ref(base))
                continue
            self._others.append(index)
            others.append(tensor)
            if base is not tensor:
                self._views.append(index)
            if type(tensor) is not Tensor or version is None:
                watch = None
            elif base.is_leaf:
                alias = by_base.get(id(base))
                if alias is None:
                    alias = by_base[id(base)] = _alias(tensor)
                    self._aliases.append(alias)
                watch = None if alias is _NOBODYS else weakref.ref(alias)
            elif base._version == version:
                watch = weakref.ref(base)
            else:
                watch, versions[index] = _UNWATCHED, ~version  # known to have been written to, also when it is gone
            if watch is None:
                watch = _UNWATCHED
                versions[index] = _NOBODYS._version
            watches.append(watch)
        self.kinds = expected if expected is not None and expected.are_of(others) else TensorSpecs.of(others)
        self.watches.extend(watches)  # at once, and last: from here on slots may be asked for
        return self.kinds

    def are_worth_ending_at(self) -> bool:
        """Whether, on the CPU, what follows the last slot takes longer than leaving it out; known for a product with a parameter.

        Always where other processes take part: sizes differ between them, and what follows may be a collective operation.
        """
        last, shapes = len(self.versions) - 1, self.kinds.shapes
        other = self._others[-1] if shapes else 0
        weight = self.parameters.get(last - 1 if other == last else last)  # autograd saves the two in either order
        factor = shapes[-1] if shapes and other >= last - 1 else None
        if weight is None or weight.dim() != 2 or not factor or not factor[-1]:
            return True
        if 2 * factor.numel() * weight.numel() // factor[-1] >= WORTH_ENDING_FLOPS:
            return True
        return dist.is_available() and dist.is_initialized()

    def leave_forward(self) -> None:
        """Let go of the tensors, also when an exception has ended forward."""
        self.saved.clear()
        self.watch_by_base.clear()

    def is_written(self, index: int) -> bool:
        """Whether the tensor of a slot has been written to after it was saved, by anyone who may."""
        watched = self.watches[index]()
        return watched is not None and watched._version != self.versions[index]

    def written(self, index: int) -> RuntimeError:
        """The error for a write to the tensor of a slot after it was saved."""
        version = self.versions[index]
        assert version is not None
        if version < 0:
            version = ~version
        parameter = self.parameters.get(index)
        if parameter is not None:
            shape, dtype = parameter.shape, parameter.dtype
        else:
            other = self._others.index(index)
            shape, dtype = self.kinds.shapes[other] or torch.Size(), self.kinds.dtypes[other]
        return modified_in_place(shape, dtype, version, "but was written to after that")

    def difference(self, saved: Sequence[Tensor]) -> str | None:
        """How tensors that were saved again differ from those that were saved first; None where they do not.

        What looks at parameters is left to `changed_parameter`.
        """
        if len(saved) != len(self.versions):
            return f"{len(self.versions)} tensors were saved and {len(saved)} are now"
        others = [saved[index] for index in self._others]
        if self.kinds.are_of(others):
            return None
        for index, tensor, dtype, shape in zip(self._others, others, *self.kinds, strict=True):
            if dtype != tensor.dtype or (shape is not None and shape != tensor.shape):
                return f"tensor {index} was {dtype} {shape} and is {tensor.dtype} {tensor.shape} now"
        return None

    def changed_parameter(self, saved: Sequence[Tensor], answered: Set[int]) -> str | None:
        """What has been done to a parameter that was saved; None for nothing. Slots in `answered` hold results only."""
        versions, parameters = self.versions, self.parameters
        others = list(map(type, saved)).count(Parameter)
        for index, parameter in parameters.items():
            if index >= len(saved):
                break
            tensor = saved[index]
            if tensor is parameter:
                others -= 1
            elif tensor._base is not parameter:
                if index in answered:
                    continue
                return f"a parameter of shape {list(tensor.shape)} has been replaced"
            if parameter._version != versions[index]:
                return f"a parameter of shape {list(parameter.shape)} has been modified by an inplace operation"
        if others:
            index = next(
                i for i, tensor in enumerate(saved) if type(tensor) is Parameter and tensor is not parameters.get(i)
            )
            return f"a parameter of shape {list(saved[index].shape)} has been replaced"
        for index in self._views:  # of a tensor in whose place there is a parameter now
            if index < len(saved) and type(saved[index]._base) is Parameter:
                return f"a parameter of shape {list(saved[index].shape)} has been replaced"
        return None


def _alias(tensor: Tensor) -> Tensor:
    """`without_memory`, where that can be had."""
    try:
        return without_memory(tensor)
    except RuntimeError:  # sparse and nested layouts
        return _NOBODYS


def _shape(tensor: Tensor) -> torch.Size | None:
    try:
        return tensor.shape
    except RuntimeError:  # nested tensors have none
        return None
