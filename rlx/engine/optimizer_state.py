"""Keep AdamW's state in host memory and fetch it piece by piece for the optimizer's step.

Note [a step in pieces]
While one piece is stepped, the next is prefetched and the previous one offloaded, each on its own stream. The device therefore
holds at most three pieces, and none in forward and backward. AdamW treats each parameter separately, so the result equals that
of one step over everything, bit for bit. The device memory of a piece belongs to the compute stream: a prefetch starts after the
work that used the memory before, and a piece is released after the copy that offloads it. The host memory of a piece stays
allocated meanwhile. A step can therefore only lack device memory, which is checked before anything moves.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW

from rlx.engine.optimizer import state_bytes, stepping_only
from rlx.engine.residency import HandOverError, TensorOffload
from rlx.engine.units import local
from rlx.offload import HostArena

PIECE_BYTES = 1 << 30
ON_DEVICE = 3.5  # pieces: three, and the temporaries of AdamW for one of them


class _Piece(NamedTuple):
    parameters: list[Tensor]
    nbytes: int
    moments: TensorOffload


class OptimizerStateOnHost:
    """Steps an optimizer whose state is in host memory.

    Args:
        optimizer: over parameters that are on the device when it steps.
        arena: host memory for the state.
        name: of the state, for accounts and messages.
        device: where the optimizer steps.
        piece_bytes: state to fetch at a time; the state of one parameter is never divided.
    """

    def __init__(
        self, optimizer: AdamW, arena: HostArena, name: str, device: torch.device, piece_bytes: int = PIECE_BYTES
    ):
        self._optimizer, self._name, self._device = optimizer, name, device
        self._arriving = self._leaving = None
        if device.type != "cpu":
            self._arriving, self._leaving = torch.Stream(device), torch.Stream(device)
        cut = _cut(optimizer, piece_bytes)
        self._pieces = [_Piece(piece, nbytes, TensorOffload(arena, name)) for piece, nbytes in cut]

    def to_host(self) -> None:
        """Offload the part of the state that is on the device.

        Raises:
            HandOverError: the host has no room; the rest is still on the device.
        """
        for piece in self._pieces:
            if not piece.moments.is_offloaded:
                piece.moments.offload(self._on_device(piece))

    def to_device(self) -> None:
        """Fetch all of the state.

        Raises:
            HandOverError: the device has no room; the rest is still in host memory.
        """
        for piece in self._pieces:
            piece.moments.fetch()

    def step(self) -> None:
        """Take the optimizer's step and leave the state in host memory. See Note [a step in pieces].

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
            piece.moments.wait_for_copy()
            with stepping_only(self._optimizer, piece.parameters):
                self._optimizer.step()
            if piece.moments.is_offloaded:
                piece.moments.begin_offload(self._leaving)
            else:
                # A new state. If the host has no room it stays here, and the next offload of this engine raises the error.
                with suppress(HandOverError):
                    piece.moments.offload(self._on_device(piece))
            if before is not None:
                before.moments.release()
            before = piece
        if before is not None:
            before.moments.release()

    @property
    def offloads(self) -> list[TensorOffload]:
        """The pieces of the state, for a checkpoint that reads them in host memory."""
        return [piece.moments for piece in self._pieces]

    def _begin(self, piece: _Piece) -> None:
        if not piece.moments.is_offloaded:
            return
        if any(p.grad is not None and p not in self._optimizer.state for p in piece.parameters):
            piece.moments.fetch()  # its state will grow; it is offloaded as a new piece
        else:
            piece.moments.prefetch(self._arriving)

    def _require_room(self) -> None:
        at_once = ON_DEVICE * max((piece.nbytes for piece in self._pieces), default=0)
        nbytes = int(min(at_once, 1.5 * sum(piece.nbytes for piece in self._pieces)))
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)  # one block, which the pieces then share
        except RuntimeError as error:
            raise HandOverError(
                f"{self._name}: the optimizer's step needs {nbytes / 1e9:.2f} GB of device memory for pieces of its state, got "
                f"less ({str(error).splitlines()[0]}). The optimizer has not stepped. Shard over more processes "
                "(fsdp_config.fsdp_size), or lower the sampler's share (rollout.gpu_memory_utilization)"
            ) from error

    def _on_device(self, piece: _Piece) -> list[Tensor]:
        states = (self._optimizer.state.get(parameter, {}) for parameter in piece.parameters)
        tensors = (value for state in states for value in state.values() if isinstance(value, Tensor))
        return [tensor for tensor in tensors if local(tensor).device.type == self._device.type]


def _cut(optimizer: AdamW, piece_bytes: int) -> Iterator[tuple[list[Tensor], int]]:
    """Yield parameters in order, in groups of at least one whose states have at most `piece_bytes` together, and these bytes."""
    piece: list[Tensor] = []
    held = 0
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        nbytes = state_bytes(optimizer, parameter)
        if piece and held + nbytes > piece_bytes:
            yield piece, held
            piece, held = [], 0
        piece.append(parameter)
        held += nbytes
    if piece:
        yield piece, held
