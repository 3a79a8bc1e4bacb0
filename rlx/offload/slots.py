"""What autograd holds instead of the tensors that it saves in a recomputed layer, and what is known of these.

Note [the work of hooks]
What is done for each tensor as autograd saves it costs several times what the same costs in a loop, for the kernels of the
layer take turns with it. So the hooks only note tensors, and what there is to look at is looked at when forward, or
recomputation, has ended. Until then a layer's saved tensors stay alive, as without the engine: in forward this is less
than what recomputing the layer needs later. The lists of tensors are emptied at the end in any case, for the graph holds
the hooks, the hooks the lists, and the tensors the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor
from torch.nn import Parameter

from rlx.offload.identity import modified_in_place, without_memory


class Slots:
    """The slots of one forward call: numbers, in the order in which autograd saves tensors."""

    def __init__(self) -> None:
        self.saved: list[Tensor] = []  # while forward runs
        self.versions: list[int | None] = []  # of the tensors when they were saved; None for those that have none
        # Known when forward has ended. What shares the version counter: a parameter itself, else a tensor without memory.
        self.watches: list[Tensor | None] = []
        self.parameters: dict[int, Parameter] = {}  # those that slots look at
        self._shapes: list[torch.Size | None] = []  # None: nested tensors have none
        self._dtypes: list[torch.dtype] = []
        # While forward runs: what watches a tensor and its views, by the id of the one that they are views of.
        self._watch_by_base: dict[int, Tensor] = {}

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

    def note_watch(self, tensor: Tensor, watch: Tensor) -> None:
        """Name what watches a tensor that is alive until forward ends, so that no more is made for it."""
        if type(tensor) is Tensor:
            base = tensor._base
            self._watch_by_base[id(tensor if base is None else base)] = watch

    def end_forward(self) -> None:
        """Keep of the saved tensors all but their memory."""
        saved, versions, by_base = self.saved, self.versions, self._watch_by_base
        watches: list[Tensor | None] = []
        bases = [tensor._base for tensor in saved]
        for index, tensor in enumerate(saved):
            watch: Tensor | None = None
            base = bases[index]
            if base is None:
                base = tensor
            if versions[index] is None:
                pass
            elif type(base) is Parameter:
                self.parameters[index] = watch = base
            elif type(tensor) is Tensor:
                watch = by_base.get(id(base))  # all views of a tensor share its version counter
                if watch is None:
                    watch = _watch(tensor)
                    if watch is not None:
                        by_base[id(base)] = watch
            watches.append(watch)
        self._dtypes = [tensor.dtype for tensor in saved]
        try:
            self._shapes = [tensor.shape for tensor in saved]
        except RuntimeError:
            self._shapes = [_shape(tensor) for tensor in saved]
        self.watches.extend(watches)  # at once, and last: from here on slots may be asked for

    def leave_forward(self) -> None:
        """Let go of the tensors, also when an exception has ended forward."""
        self.saved.clear()
        self._watch_by_base.clear()

    def written(self, index: int) -> RuntimeError:
        """The error for a write to the tensor of a slot after it was saved."""
        version = self.versions[index]
        assert version is not None
        return modified_in_place(
            self._shapes[index] or (), self._dtypes[index], version, "but was written to after that"
        )

    def difference(self, saved: Sequence[Tensor]) -> str | None:
        """How tensors that were saved again differ from those that were saved first; None where they do not."""
        if len(saved) != len(self.versions):
            return f"{len(self.versions)} tensors were saved and {len(saved)} are now"
        try:
            if [t.dtype for t in saved] == self._dtypes and [t.shape for t in saved] == self._shapes:
                return None
        except RuntimeError:  # nested tensors have no shape
            pass
        for index, (tensor, shape, dtype) in enumerate(zip(saved, self._shapes, self._dtypes, strict=True)):
            if dtype != tensor.dtype or (shape is not None and shape != tensor.shape):
                return f"tensor {index} was {dtype} {shape} and is {tensor.dtype} {tensor.shape} now"
        return None

    def changed_parameter(self, saved: Sequence[Tensor], answered: Set[int]) -> str | None:
        """What has been done to a parameter that was saved; None for nothing. Slots in `answered` hold results only."""
        for index, tensor in enumerate(saved):
            base = tensor._base
            if base is None:
                base = tensor
            parameter = self.parameters.get(index)
            if parameter is not None and base is parameter:
                if base._version != self.versions[index]:
                    return f"a parameter of shape {list(base.shape)} has been modified by an inplace operation"
            elif (parameter is not None or type(base) is Parameter) and index not in answered:
                return f"a parameter of shape {list(tensor.shape)} has been replaced"
        return None


def _watch(tensor: Tensor) -> Tensor | None:
    """What shares a tensor's version counter and keeps nothing else of it; None where nothing can."""
    try:
        return without_memory(tensor)
    except RuntimeError:  # sparse and nested layouts
        return None


def _shape(tensor: Tensor) -> torch.Size | None:
    try:
        return tensor.shape
    except RuntimeError:  # nested tensors have none
        return None
