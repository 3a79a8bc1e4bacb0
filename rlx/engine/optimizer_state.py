"""Split AdamW's state by bytes over device and host, and step the part on the host piece by piece.

Note [a step in pieces]
While one piece is stepped, the next is prefetched and the previous one offloaded, each on its own stream. The device therefore
holds at most three pieces, and none in forward and backward. AdamW treats each parameter separately, so the result equals that
of one step over everything, bit for bit. The device memory of a piece belongs to the compute stream: a prefetch starts after the
work that used the memory before, and a piece is released after the copy that offloads it. The host memory of a piece stays
allocated meanwhile. A step can therefore only lack device memory, which is checked before anything moves.

Note [which parameters, in which order]
The state of one parameter is never divided. Parameters with large states stay on the device as far as it has room, because an
embedding's state alone can be several pieces. Among the pieces the largest are in the middle of the step. There the fetch of
one large piece overlaps with the offload of another; at an end one direction of the link would be idle.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW

from rlx.engine.optimizer import state_bytes, step_in_parts, stepping_only
from rlx.engine.residency import HandOverError, TensorOffload
from rlx.engine.units import local
from rlx.offload import HostArena

PIECE_BYTES = 1 << 30
TEMPORARY = 0.5  # of a piece: what AdamW allocates for its step


class _Piece(NamedTuple):
    parameters: list[Tensor]
    nbytes: int
    moments: TensorOffload


class OptimizerStateOnHost:
    """Steps an optimizer whose state is in host memory, all of it or what exceeds a number of bytes.

    Args:
        optimizer: over parameters that are on the device when it steps.
        arena: host memory for the state.
        name: of the state, for accounts and messages.
        device: where the optimizer steps.
        piece_bytes: state to fetch at a time; the state of one parameter is never divided.
        device_bytes: state that may stay on the device.

    Attributes:
        staying: the parameters whose state stays there.
    """

    def __init__(
        self,
        optimizer: AdamW,
        arena: HostArena,
        name: str,
        device: torch.device,
        piece_bytes: int = PIECE_BYTES,
        device_bytes: float = 0,
    ):
        self._optimizer, self._arena, self._name, self._device = optimizer, arena, name, device
        self._arriving = self._leaving = None
        if device.type != "cpu":
            self._arriving, self._leaving = torch.Stream(device), torch.Stream(device)
        sizes = {p: state_bytes(optimizer, p) for group in optimizer.param_groups for p in group["params"]}
        self.staying = _largest_within(sizes, device_bytes)
        stays = set(self.staying)
        moving = {p: nbytes for p, nbytes in sizes.items() if p not in stays}
        cut = _largest_inside(_cut(moving, piece_bytes), key=lambda piece: piece[1])
        self._pieces = [_Piece(piece, nbytes, TensorOffload(arena, name)) for piece, nbytes in cut]

    def to_host(self) -> None:
        """Offload the part of the moving state that is on the device.

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
        """Take the optimizer's step and leave the moving state in host memory. See Note [a step in pieces].

        Raises:
            HandOverError: the device has no room; nothing has changed.
        """
        self._require_room()
        before: _Piece | None = None
        if self._pieces:
            self._begin(self._pieces[0])
        with stepping_only(self._optimizer, self.staying):  # while the first piece arrives
            step_in_parts(self._optimizer)
        for piece, following in zip(self._pieces, [*self._pieces, None][1:], strict=True):
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

    def replace(self, make: Callable[[], None]) -> None:
        """Replace the whole state, without holding the moving part on the device all at once.

        Args:
            make: gives a state to the parameters that the optimizer has while it is called; no parameter has one before.

        Raises:
            HandOverError: the host has no room.
        """
        self._pieces = [piece._replace(moments=TensorOffload(self._arena, self._name)) for piece in self._pieces]
        made = {}
        for parameters, piece in [(self.staying, None), *((piece.parameters, piece) for piece in self._pieces)]:
            self._optimizer.state.clear()
            with stepping_only(self._optimizer, parameters):
                if parameters:
                    make()
            made |= self._optimizer.state
            if piece is not None:
                piece.moments.offload(self._on_device(piece))
        self._optimizer.state.update(made)

    @property
    def offloads(self) -> list[TensorOffload]:
        """The pieces of the state in the order of the step, for a checkpoint that reads them in host memory."""
        return [piece.moments for piece in self._pieces]

    def _begin(self, piece: _Piece) -> None:
        if not piece.moments.is_offloaded:
            return
        if any(p.grad is not None and p not in self._optimizer.state for p in piece.parameters):
            piece.moments.fetch()  # its state will grow; it is offloaded as a new piece
        else:
            piece.moments.prefetch(self._arriving)

    def _require_room(self) -> None:
        sizes = [0, *(piece.nbytes for piece in self._pieces), 0]
        before_now_after = zip(sizes, sizes[1:], sizes[2:], strict=False)
        nbytes = max((int(sum(three) + TEMPORARY * three[1]) for three in before_now_after), default=0)
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)  # one block, which the pieces then share
        except RuntimeError as error:
            raise HandOverError(
                f"{self._name}: the optimizer's step needs {nbytes / 1e9:.2f} GB of device memory for pieces of its state, got "
                f"less ({str(error).splitlines()[0]}). The optimizer has not stepped. Shard over more processes "
                "(fsdp_config.fsdp_size), lower the sampler's share (rollout.gpu_memory_utilization), or keep less of the state on "
                "the device (fsdp_config.optimizer_state)"
            ) from error

    def _on_device(self, piece: _Piece) -> list[Tensor]:
        """Return the tensors of a piece's state that are on the device, without counts of steps, which are single numbers."""
        states = (self._optimizer.state.get(parameter, {}) for parameter in piece.parameters)
        tensors = (x for state in states for name, x in state.items() if isinstance(x, Tensor) and name != "step")
        return [tensor for tensor in tensors if local(tensor).device.type == self._device.type]


def _largest_within(sizes: dict[Tensor, int], nbytes: float) -> list[Tensor]:
    """Return parameters, those with large states first, whose states have at most `nbytes` together."""
    chosen = []
    for parameter in sorted(sizes, key=lambda p: -sizes[p]):
        if sizes[parameter] <= nbytes:
            nbytes -= sizes[parameter]
            chosen.append(parameter)
    return chosen


def _cut(sizes: dict[Tensor, int], piece_bytes: int) -> Iterator[tuple[list[Tensor], int]]:
    """Yield parameters in order, in groups of at least one whose states have at most `piece_bytes` together, and these bytes."""
    piece: list[Tensor] = []
    held = 0
    for parameter, nbytes in sizes.items():
        if piece and held + nbytes > piece_bytes:
            yield piece, held
            piece, held = [], 0
        piece.append(parameter)
        held += nbytes
    if piece:
        yield piece, held


def _largest_inside(pieces: Iterable[Any], key: Callable[[Any], int]) -> list[Any]:
    """Return the pieces with the smallest at both ends and the largest in the middle."""
    ascending = sorted(pieces, key=key)
    return ascending[::2] + ascending[1::2][::-1]
