"""Pieces of AdamW's state in host memory, which the step brings to the device one after another.

Note [a divided state]
The state of a large parameter, such as an embedding, is more than a piece. Its tensors stay in host memory, and the step copies
a slice of each to the device, steps that slice of the parameter, and copies it back. AdamW treats each element separately, so
the result is that of the whole, bit for bit. A new state is made one tensor at a time, which goes to the host before the next.
"""

import weakref
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from rlx.engine.fsdp_units import local
from rlx.engine.host_offload import HandOverError, TensorOffload, copy_on
from rlx.engine.optimizer import stepping_only
from rlx.engine.shard_adamw import ShardAdamW
from rlx.offload import HostArena

SLICE_ALIGNMENT = 64  # elements of a slice; vector instructions then group them as in the whole parameter


class WholeStates:
    """The states of some parameters, which move together. It is their only piece.

    A piece is state that is on the device at once. Its step calls `fetch`, `step`, `leave` and `release`, in this order.

    Args:
        optimizer: steps the parameters.
        parameters: on the device.
        nbytes: of their states.
        arena: host memory.
        name: of the state, for accounts and messages.
    """

    def __init__(self, optimizer: ShardAdamW, parameters: list[Tensor], nbytes: int, arena: HostArena, name: str):
        self.parameters, self.nbytes = parameters, nbytes
        self._optimizer, self._arena, self._name = optimizer, arena, name
        self.forget()

    @property
    def pieces(self) -> list["WholeStates"]:
        """Itself."""
        return [self]

    def forget(self) -> None:
        """Give up the bytes in host memory; the optimizer gets another state."""
        self.offloads = [TensorOffload(self._arena, self._name)]

    def to_host(self) -> None:
        """Offload what is on the device; a state that is missing is none."""
        if not self.offloads[0].is_offloaded:
            self.offloads[0].offload(x for p in self.parameters for x in _tensors(self._optimizer, p).values())

    def to_device(self) -> None:
        """Fetch everything."""
        self.offloads[0].fetch()

    made_bytes = 0  # the step makes the states that are missing

    def make(self) -> None:
        """Do nothing; see `made_bytes`."""

    def fetch(self, stream: torch.Stream | None) -> None:
        """Queue the copies to the device."""
        if not self.offloads[0].is_offloaded:
            return
        if any(p.grad is not None and p not in self._optimizer.state for p in self.parameters):
            self.offloads[0].fetch()  # the state will grow; it is offloaded as a new one
        else:
            self.offloads[0].prefetch(stream)

    def step(self) -> None:
        """Step the piece's parameters after these copies."""
        self.offloads[0].wait_for_copy()
        with stepping_only(self._optimizer, self.parameters):
            self._optimizer.step()

    def leave(self, stream: torch.Stream | None) -> None:
        """Queue the copies to the host."""
        if self.offloads[0].is_offloaded:
            self.offloads[0].begin_offload(stream)
            return
        # A new state. If the host has no room it stays here, and the next offload of this engine raises the error.
        with suppress(HandOverError):
            self.to_host()

    def release(self) -> None:
        """Free the device memory after these copies."""
        self.offloads[0].release()


class DividedState:
    """The state of one large parameter, in `count` slices. See Note [a divided state]; other arguments as for WholeStates."""

    def __init__(self, optimizer: ShardAdamW, parameter: Tensor, count: int, nbytes: int, arena: HostArena, name: str):
        self.parameters, self.nbytes = [parameter], nbytes
        self.optimizer, self._arena, self._name = optimizer, arena, name
        elements = local(parameter).numel()
        length = max(1, -(-elements // count // SLICE_ALIGNMENT)) * SLICE_ALIGNMENT
        starts = range(0, max(1, elements), length)
        ends = [min(start + length, elements) for start in starts]
        sizes = [nbytes * (end - start) // max(1, elements) for start, end in zip(starts, ends, strict=True)]
        self.pieces = [_Slice(self, *of_slice) for of_slice in zip(starts, ends, sizes, strict=True)]
        self.steps: Tensor | None = None  # before the step that is under way
        self.forget()

    def forget(self) -> None:
        """As WholeStates.forget."""
        self._by_name: dict[str, TensorOffload] = {}

    @property
    def offloads(self) -> list[TensorOffload]:
        """Holders of the state's tensors in host memory."""
        return list(self._by_name.values())

    @property
    def tensors(self) -> dict[str, tuple[Tensor, TensorOffload]]:
        """The state's tensors by name, without the count of steps, each with what may hold it in host memory."""
        state = self.optimizer.state.get(self.parameters[0], {})
        return {name: (x, self._offload(name)) for name, x in state.items() if name != "step"}

    def _offload(self, name: str) -> TensorOffload:
        return self._by_name.setdefault(name, TensorOffload(self._arena, self._name))

    def to_host(self) -> None:
        """Offload the tensors that are on the device."""
        for name, tensor in _tensors(self.optimizer, self.parameters[0]).items():
            if not self._offload(name).is_offloaded:
                self._offload(name).offload([tensor])

    def to_device(self) -> None:
        """Fetch everything."""
        for offload in self.offloads:
            offload.fetch()

    @property
    def made_bytes(self) -> int:
        """Bytes of the device that `make` needs."""
        return local(self.parameters[0]).numel() * 4 * (not self.optimizer.state.get(self.parameters[0]))

    def make(self) -> None:
        """Make a state that is missing; what the host has no room for stays on the device until the next `to_host`."""
        (parameter,) = self.parameters
        if parameter.grad is None or parameter in self.optimizer.state:
            return
        for name, tensor in self.optimizer.new_state(parameter):
            self.optimizer.state[parameter][name] = tensor
            if name != "step":
                with suppress(HandOverError):
                    self._offload(name).offload([tensor])


class _Slice:
    """A slice of a divided state; the first one begins a step, the last one ends it."""

    def __init__(self, whole: DividedState, start: int, end: int, nbytes: int):
        self.nbytes = nbytes
        self._whole: DividedState = weakref.proxy(whole)  # a cycle would keep the block until garbage is collected
        self._start, self._end = start, end
        self._parts: dict[str, Tensor] = {}
        self._copied: torch.Event | None = None

    @property
    def _steps_now(self) -> bool:
        return self._whole.parameters[0].grad is not None

    def fetch(self, stream: torch.Stream | None) -> None:
        if not self._steps_now:
            return
        whole, pairs = self._whole, []
        for name, (tensor, offload) in whole.tensors.items():
            if offload.is_offloaded:
                if self is whole.pieces[0]:
                    offload.begin_parts()
                part = torch.empty(self._end - self._start, dtype=tensor.dtype, device=whole.parameters[0].device)
                pairs += offload.read_parts(part, self._first_byte(tensor))
            else:
                part = local(tensor).view(-1)[self._start : self._end]
            self._parts[name] = part
        self._copied = copy_on(stream, pairs)

    def step(self) -> None:
        if not self._steps_now:
            return
        self._wait()
        whole, (parameter,) = self._whole, self._whole.parameters
        own = local(parameter).detach().view(-1)[self._start : self._end]
        own.grad_dtype = None  # any type, as the parameter's
        own.grad = local(parameter.grad).reshape(-1)[self._start : self._end]
        count = whole.optimizer.state[parameter]["step"]
        if self is whole.pieces[0]:
            whole.steps = count.clone()
        assert whole.steps is not None
        whole.optimizer.state[own] = {"step": whole.steps.clone(), **self._parts}
        with stepping_only(whole.optimizer, [parameter], own):
            whole.optimizer.step()
        stepped = whole.optimizer.state.pop(own)["step"]
        if self is whole.pieces[-1]:
            count.copy_(stepped)

    def leave(self, stream: torch.Stream | None) -> None:
        pairs = []
        for name, part in self._parts.items():
            tensor, offload = self._whole.tensors[name]
            if offload.is_offloaded:
                pairs += offload.written_parts(part, self._first_byte(tensor))
        self._copied = copy_on(stream, pairs)

    def release(self) -> None:
        self._wait()
        if self._parts and self is self._whole.pieces[-1]:
            for _, offload in self._whole.tensors.values():
                if offload.is_offloaded:
                    offload.end_parts()
            with suppress(HandOverError):
                self._whole.to_host()  # what the host had no room for
        self._parts.clear()

    def _first_byte(self, tensor: Tensor) -> int:
        return (local(tensor).storage_offset() + self._start) * tensor.itemsize

    def _wait(self) -> None:
        if self._copied is not None:
            torch.accelerator.current_stream(self._whole.parameters[0].device).wait_event(self._copied)
            self._copied = None


StatePiece = WholeStates | _Slice


def _tensors(optimizer: ShardAdamW, parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state on its device by name, without the count of steps, which is a single number."""
    device = local(parameter).device.type
    state = optimizer.state.get(parameter, {}).items()
    found = {name: x for name, x in state if isinstance(x, Tensor) and name != "step"}
    return {name: x for name, x in found.items() if local(x).device.type == device}


def cut(
    optimizer: ShardAdamW, sizes: dict[Tensor, int], piece_bytes: int, arena: HostArena, name: str
) -> Iterator[WholeStates | DividedState]:
    """Yield the states of parameters in order, in groups of at most `piece_bytes`; larger ones by themselves, divided.

    Args:
        sizes: bytes of each parameter's state.
        piece_bytes: most bytes of a piece.
        optimizer, arena, name: as for WholeStates.
    """
    group: list[Tensor] = []
    held = 0
    for parameter, nbytes in [*sizes.items(), (None, piece_bytes + 1)]:
        if group and held + nbytes > piece_bytes:
            yield WholeStates(optimizer, group, held, arena, name)
            group, held = [], 0
        if parameter is not None and nbytes > piece_bytes:
            yield DividedState(optimizer, parameter, -(-nbytes // piece_bytes), nbytes, arena, name)
        elif parameter is not None:
            group.append(parameter)
            held += nbytes
