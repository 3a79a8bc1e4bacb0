"""The frozen weights of one layer: one block of host memory or of a file, and a copy on the device while the layer is at work.

Note [where a frozen weight is]
The parameter stays the same object with the same version counter; only `parameter.data` changes: a view of the host memory or of the
mapped file while the layer waits, of the fetched buffer while it is at work. So a state dict reads the right values at any time. A
write while the layer is at work is copied to the host when the layer leaves the device. The file is read past the page cache; the
system writes changed pages of the mapping to it before such a read.

Note [who keeps a fetched buffer]
A layer that leaves the device drops its reference to the buffer, nothing more. Tensors that autograd has saved are views of the buffer
and keep it. So backward reads right values in any order, and a recomputed layer's backward needs no second fetch. Tensors saved in
forward would keep every layer's buffer until backward: recomputed layers keep none of them, and for others the pack hook replaces a
weight by a `SavedWeight`, which fetches it again.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from rlx.offload.storage.arena import Block, Pages
from rlx.offload.storage.disk import DiskAllocation
from rlx.offload.storage.offloader import CopyStreams, FetchBuffer
from rlx.offload.storage.tensor_bytes import TENSOR_ALIGN_BYTES, modified_in_place, moving_weights
from rlx.offload.streaming.shared_file import WeightFile, shared_memory

logger = logging.getLogger("rlx.offload")

_STREAMED: dict[int, weakref.ref[FrozenWeights]] = {}  # by the id of a parameter


class FrozenWeights:
    """The frozen weights of one layer, contiguous; their data moves to host memory now.

    `begin` makes this layer the one at work; other arguments are those of `enable_layer_offloading`.
    """

    def __init__(
        self,
        index: int,
        name: str,
        parameters: Mapping[str, Parameter],
        dtype: torch.dtype | None,
        copy_streams: CopyStreams,
        begin: Callable[[], Callable[[FrozenWeights], None] | None],  # a weak reference
        group: dist.ProcessGroup | None = None,
        file: WeightFile | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.calls = 0  # forwards that are running
        self._names, self.parameters = list(parameters), list(parameters.values())
        self._copy_streams = copy_streams
        self._begin = begin
        self._buffer: FetchBuffer | None = None
        self._is_attached = False
        types = [dtype if dtype is not None and p.is_floating_point() else p.dtype for p in self.parameters]
        lengths = [p.numel() * kind.itemsize for p, kind in zip(self.parameters, types, strict=True)]
        padded = [-(-length // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES for length in lengths]
        *starts, self.nbytes = accumulate(padded, initial=0)
        self._layout = list(zip(starts, lengths, types, [p.shape for p in self.parameters], strict=True))
        self._source: Block | DiskAllocation
        if file is not None:
            self._pages, self._source = file.allocate(self.nbytes)
        else:
            self._pages = _pages(self.nbytes, is_locked=copy_streams.device.type != "cpu", group=group)
            self._source = Block(self.nbytes, [], [self._pages.bytes])
        self._on_host = self._views(self._pages.bytes)
        for parameter, host in zip(self.parameters, self._on_host, strict=True):
            if group is None or dist.get_rank(group) == 0:
                with torch.no_grad():
                    host.copy_(parameter)
            parameter.data = host
        self._versions = self._current_versions()  # of the bytes on the host; of those fetched too, if there are any
        here = weakref.ref(self)
        _STREAMED.update((id(parameter), here) for parameter in self.parameters)
        if _MOVER not in moving_weights:
            moving_weights.append(_MOVER)
        self._forget = weakref.finalize(self, _forget, list(map(id, self.parameters)), here)

    @property
    def is_fetched(self) -> bool:
        return self._buffer is not None

    def fetch(self) -> None:
        versions = self._current_versions()
        if self._buffer is not None and (self._is_attached or versions == self._versions):
            return
        self._check_in_place(self._on_host)
        home = self._copy_streams.compute_stream()
        buffer = FetchBuffer(torch.Size([self.nbytes]), torch.uint8, self._copy_streams.device, home)
        if isinstance(self._source, DiskAllocation):
            self._source.read(self._copy_streams, buffer)
        else:
            buffer.allocate()
            self._copy_streams.copy_into(buffer.tensor, self._source, buffer)
        self._buffer, self._versions = buffer, versions

    def attach(self) -> None:
        """Give the parameters the fetched data; the current stream waits for it."""
        assert self._buffer is not None
        if not self._is_attached:
            self._check_in_place(self._on_host)
            try:
                self._copy_streams.wait_for(self._buffer)
            except OSError:  # the disk failed; the next fetch reads again
                self._buffer = None
                raise
            for parameter, view in zip(self.parameters, self._views(self._buffer.tensor), strict=True):
                parameter.data = view
            self._is_attached = True
        elif self._buffer.home != self._copy_streams.compute_stream():
            self._copy_streams.wait_for(self._buffer)

    def drop(self) -> None:
        """Give the parameters the host's data, and let the fetched buffer go. See Note [who keeps a fetched buffer]."""
        if self._is_attached:
            assert self._buffer is not None
            self._check_in_place(self._views(self._buffer.tensor))
            versions = self._current_versions()
            for index, (parameter, host) in enumerate(zip(self.parameters, self._on_host, strict=True)):
                if versions[index] != self._versions[index]:
                    host.copy_(parameter.detach())
                parameter.data = host
            self._versions, self._is_attached = versions, False
        self._buffer = None

    def restore(self) -> None:
        self.drop()
        self._check_in_place(self._on_host)
        for parameter, host in zip(self.parameters, self._on_host, strict=True):
            parameter.data = host.to(self._copy_streams.device, copy=True)
        self._forget()

    def on_device(self, parameter: Tensor) -> Tensor:
        """Return an alias of a parameter on the fetched buffer, ready for the current stream."""
        if (
            id(parameter) in _STREAMED and (begin := self._begin()) is not None
        ):  # else the weights do not stream any more
            begin(self)
        return parameter.detach()

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[start : start + length].view(kind).view(shape) for start, length, kind, shape in self._layout]

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def _check_in_place(self, expected: list[Tensor]) -> None:
        for name, parameter, view in zip(self._names, self.parameters, expected, strict=True):
            if parameter.data_ptr() != view.data_ptr() or parameter.dtype != view.dtype or parameter.requires_grad:
                raise RuntimeError(
                    f"layer offloading: the frozen weight {name!r} of layer {self.name} was moved, cast or unfrozen; got "
                    f"{parameter.dtype} on {parameter.device}, requires_grad={parameter.requires_grad}, expected "
                    f"{view.dtype} where layer offloading put it. Call disable() first and enable it again afterwards"
                )


class SavedWeight:
    """A frozen weight, or a view of it, that autograd has saved; it holds no memory of the device."""

    __slots__ = ("_parameter", "_shape", "_start", "_stride", "_version", "_weights")

    def __init__(self, weights: FrozenWeights, parameter: Parameter, tensor: Tensor) -> None:
        self._weights, self._parameter = weights, parameter
        self._shape, self._stride, self._start = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._start -= parameter.storage_offset()
        self._version = tensor._version

    def restore(self) -> Tensor:
        now = self._parameter._version
        if now != self._version:
            found = f"but is at version {now}"
            raise modified_in_place(self._shape, self._parameter.dtype, self._version, found)
        whole = self._weights.on_device(self._parameter)
        return whole.as_strided(self._shape, self._stride, whole.storage_offset() + self._start)


class _Streamed:
    """Tells the engine where weights that stream are (`MovingWeights`)."""

    def pack(self, tensor: Tensor) -> SavedWeight | None:
        parameter = tensor if isinstance(tensor, Parameter) else tensor._base
        if not isinstance(parameter, Parameter) or parameter.dtype != tensor.dtype:
            return None
        weights = _weights_of(parameter)
        return None if weights is None else SavedWeight(weights, parameter, tensor)

    def present(self, parameter: Tensor) -> Tensor:
        weights = _weights_of(parameter)
        return parameter if weights is None else weights.on_device(parameter)


_MOVER = _Streamed()


def _weights_of(parameter: Tensor) -> FrozenWeights | None:
    reference = _STREAMED.get(id(parameter))
    return None if reference is None else reference()


def _forget(ids: list[int], owner: weakref.ref[FrozenWeights]) -> None:
    for number in ids:
        if _STREAMED.get(number) is owner:  # else another layer has the parameter by now, or the number
            del _STREAMED[number]
    if not _STREAMED and _MOVER in moving_weights:
        moving_weights.remove(_MOVER)


def _pages(nbytes: int, is_locked: bool, group: dist.ProcessGroup | None) -> Pages:
    with contextlib.nullcontext() if group is None else shared_memory(nbytes, group) as file:
        with contextlib.suppress(RuntimeError):
            return Pages(nbytes, is_locked, file)
        logger.warning(
            f"layer offloading: the system refused to page-lock {nbytes} bytes of host memory; pageable memory is used, whose "
            "copies do not overlap compute. Raise the limit of locked memory (ulimit -l)"
        )
        return Pages(nbytes, False, file)
