"""AdamW's state in host memory: it comes to the device piece by piece, for the optimizer's step alone.

Note [a step in pieces]
While one piece is stepped the next one arrives and the one before leaves, on a stream each, so that the device holds three
pieces at most and never the whole state; forward and backward hold none of it. AdamW treats each parameter by itself:
the bits are those of a step over all at once. Device memory of a piece belongs to the compute stream: a copy to the device
begins behind what has used that memory before, and what leaves is given up behind the copy that has read it. The host's
memory of a piece stays its own meanwhile, so that a step needs nothing that could be missing in its middle but device
memory, which is asked for before anything moves.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW

from rlx.engine.optimizer import local, stepping_only
from rlx.engine.residency import HandOverError, Parking
from rlx.offload import HostArena

PIECE_BYTES = 1 << 30
MOMENTS = 2  # each of the size and type of its parameter
ON_DEVICE = 3.5  # pieces: three, and what AdamW makes in between for one of them


class _Piece(NamedTuple):
    parameters: list[Tensor]
    nbytes: int
    parking: Parking


class OptimizerStateOnHost:
    """Takes an optimizer's steps while its state waits in host memory.

    Args:
        optimizer: over parameters that are on the device when it steps.
        arena: where the state waits.
        name: of the state, for accounts and messages.
        device: where the optimizer steps.
        piece_bytes: of the state that comes to the device at a time; a parameter's own is not divided.
    """

    def __init__(
        self, optimizer: AdamW, arena: HostArena, name: str, device: torch.device, piece_bytes: int = PIECE_BYTES
    ):
        self._optimizer, self._name, self._device = optimizer, name, device
        self._arriving = self._leaving = None
        if device.type != "cpu":
            self._arriving, self._leaving = torch.Stream(device), torch.Stream(device)
        cut = _cut((p for group in optimizer.param_groups for p in group["params"]), piece_bytes)
        self._pieces = [_Piece(piece, sum(map(_state_bytes, piece)), Parking(arena, name)) for piece in cut]

    def to_host(self) -> None:
        """Moves to the host what of the state is on the device.

        Raises:
            HandOverError: the host has no room; what has not moved is still on the device.
        """
        for piece in self._pieces:
            if not piece.parking.occupied:
                piece.parking.park(self._on_device(piece))

    def to_device(self) -> None:
        """Brings all of it to the device.

        Raises:
            HandOverError: the device has no room; what has not moved is still on the host.
        """
        for piece in self._pieces:
            piece.parking.unpark()

    def step(self) -> None:
        """The optimizer's step; afterwards the state is on the host. See Note [a step in pieces].

        Raises:
            HandOverError: the device has no room; nothing has changed.
        """
        self._require_room()
        before: _Piece | None = None
        if self._pieces:
            self._begin(self._pieces[0])
        for piece, following in zip(self._pieces, [*self._pieces[1:], None], strict=True):
            if following is not None:
                self._begin(following)
            piece.parking.await_copy()
            with stepping_only(self._optimizer, piece.parameters):
                self._optimizer.step()
            if piece.parking.occupied:
                piece.parking.take_back(self._leaving)
            else:
                # A new state. If the host has no room for it, it stays here, and who moves this engine next is told so.
                with suppress(HandOverError):
                    piece.parking.park(self._on_device(piece))
            if before is not None:
                before.parking.let_go()
            before = piece
        if before is not None:
            before.parking.let_go()

    def _begin(self, piece: _Piece) -> None:
        if not piece.parking.occupied:
            return
        if any(p.grad is not None and p not in self._optimizer.state for p in piece.parameters):
            piece.parking.unpark()  # it will be more, and moves as a new one
        else:
            piece.parking.lend(self._arriving)

    def _require_room(self) -> None:
        at_once = ON_DEVICE * max((piece.nbytes for piece in self._pieces), default=0)
        nbytes = int(min(at_once, 1.5 * sum(piece.nbytes for piece in self._pieces)))
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)  # in one block, which the pieces then share
        except RuntimeError as error:
            raise HandOverError(
                f"{self._name}: the optimizer's step needs {nbytes / 1e9:.2f} GB of device memory for pieces of its state, and "
                f"there is less ({str(error).splitlines()[0]}). Nothing has been stepped. Let parameters be fewer on a device "
                "(more processes in fsdp_config.fsdp_size), or lower the sampler's share (rollout.gpu_memory_utilization)"
            ) from error

    def _on_device(self, piece: _Piece) -> list[Tensor]:
        states = (self._optimizer.state.get(parameter, {}) for parameter in piece.parameters)
        tensors = (value for state in states for value in state.values() if isinstance(value, Tensor))
        return [tensor for tensor in tensors if local(tensor).device.type == self._device.type]


def _state_bytes(parameter: Tensor) -> int:
    return MOMENTS * local(parameter).nbytes


def _cut(parameters: Iterable[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Parameters in order, so many at a time that their states have at most `piece_bytes`, or one."""
    piece: list[Tensor] = []
    for parameter in parameters:
        if piece and sum(map(_state_bytes, piece)) + _state_bytes(parameter) > piece_bytes:
            yield piece
            piece = []
        piece.append(parameter)
    if piece:
        yield piece
