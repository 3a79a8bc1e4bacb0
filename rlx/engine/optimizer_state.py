"""Split AdamW's state by bytes over device and host, and step the part on the host piece by piece.

Note [a step in pieces]
While one piece is stepped, the next is prefetched and the previous one offloaded, each on its own stream. The device therefore
holds at most three pieces, and none in forward and backward. AdamW treats each parameter separately, so the result equals that
of one step over everything, bit for bit. The device memory of a piece belongs to the compute stream: a prefetch starts after the
work that used the memory before, and a piece is released after the copy that offloads it. The host memory of a piece stays
allocated meanwhile. A step can therefore only lack device memory, which is checked before anything moves.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlx.engine.host_offload import HandOverError, TensorOffload
from rlx.engine.optimizer import state_bytes, step_in_parts, stepping_only
from rlx.engine.shard_adamw import ShardAdamW
from rlx.engine.state_pieces import StatePiece, cut
from rlx.offload import HostArena

PIECE_BYTES = 1 << 30
TEMPORARY = 0.5  # of a piece: what AdamW allocates for its step


class OptimizerStateOnHost:
    """Steps an optimizer whose state is in host memory, all of it or what exceeds a number of bytes.

    Args:
        optimizer: over parameters that are on the device when it steps.
        arena: host memory for the state.
        name: of the state, for accounts and messages.
        device: where the optimizer steps.
        piece_bytes: state to fetch at a time; the state of a larger parameter is divided.
        device_bytes: state that may stay on the device.

    Attributes:
        staying: the parameters whose state stays there.
    """

    def __init__(
        self,
        optimizer: ShardAdamW,
        arena: HostArena,
        name: str,
        device: torch.device,
        piece_bytes: int = PIECE_BYTES,
        device_bytes: float = 0,
    ):
        self._optimizer, self._name, self._device = optimizer, name, device
        self._arriving = self._leaving = None
        if device.type != "cpu":
            self._arriving, self._leaving = torch.Stream(device), torch.Stream(device)
        sizes = {p: state_bytes(optimizer, p) for group in optimizer.param_groups for p in group["params"]}
        self.staying = _largest_within(sizes, device_bytes)
        stays = set(self.staying)
        moving = {p: nbytes for p, nbytes in sizes.items() if p not in stays}
        self._moving = list(cut(optimizer, moving, piece_bytes, arena, name))

    @property
    def pieces(self) -> list[StatePiece]:
        """The pieces of the moving state in the order of the step."""
        return [piece for states in self._moving for piece in states.pieces]

    def to_host(self) -> None:
        """Offload the part of the moving state that is on the device.

        Raises:
            HandOverError: the host has no room; the rest is still on the device.
        """
        for states in self._moving:
            states.to_host()

    def to_device(self) -> None:
        """Fetch all of the state.

        Raises:
            HandOverError: the device has no room; the rest is still in host memory.
        """
        for states in self._moving:
            states.to_device()

    def step(self) -> None:
        """Take the optimizer's step and leave the moving state in host memory. See Note [a step in pieces].

        Raises:
            HandOverError: the device has no room; nothing has changed.
        """
        self._require_room()
        for states in self._moving:
            states.make()
        pieces = self.pieces
        before: StatePiece | None = None
        for piece in pieces[:1]:
            piece.fetch(self._arriving)
        with stepping_only(self._optimizer, self.staying):  # while the first piece arrives
            step_in_parts(self._optimizer)
        for piece, following in zip(pieces, [*pieces, None][1:], strict=True):
            if following is not None:
                following.fetch(self._arriving)
            piece.step()
            piece.leave(self._leaving)
            if before is not None:
                before.release()
            before = piece
        if before is not None:
            before.release()

    def replace(self, make: Callable[[], None]) -> None:
        """Replace the whole state, without holding the moving part on the device all at once.

        Args:
            make: gives a state to the parameters that the optimizer has while it is called; no parameter has one before.

        Raises:
            HandOverError: the host has no room.
        """
        for states in self._moving:
            states.forget()
        made = {}
        for parameters, moving in [(self.staying, None), *((states.parameters, states) for states in self._moving)]:
            self._optimizer.state.clear()
            with stepping_only(self._optimizer, parameters):
                if parameters:
                    make()
            made |= self._optimizer.state
            if moving is not None:
                moving.to_host()
        self._optimizer.state.update(made)

    @property
    def offloads(self) -> list[TensorOffload]:
        """Holders of the moving state in the order of the step; a checkpoint reads their host memory."""
        return [offload for states in self._moving for offload in states.offloads]

    def _require_room(self) -> None:
        sizes = [0, *(piece.nbytes for piece in self.pieces), 0]
        before_now_after = zip(sizes, sizes[1:], sizes[2:], strict=False)
        at_once = [int(sum(three) + TEMPORARY * three[1]) for three in before_now_after]
        nbytes = max([0, *at_once, *(states.made_bytes for states in self._moving)])
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)  # one block, which the pieces then share
        except RuntimeError as error:
            raise HandOverError(
                f"{self._name}: the optimizer's step needs {nbytes / 1e9:.2f} GB of device memory for pieces of its state, got "
                f"less ({str(error).splitlines()[0]}). The optimizer has not stepped. Shard over more processes "
                "(fsdp_config.fsdp_size), lower the sampler's share (rollout.gpu_memory_utilization), or keep less of the state on "
                "the device (fsdp_config.optimizer_state)"
            ) from error


def _largest_within(sizes: dict[Tensor, int], nbytes: float) -> list[Tensor]:
    """Return parameters, those with large states first, whose states have at most `nbytes` together."""
    chosen = []
    for parameter in sorted(sizes, key=lambda p: -sizes[p]):
        if sizes[parameter] <= nbytes:
            nbytes -= sizes[parameter]
            chosen.append(parameter)
    return chosen
