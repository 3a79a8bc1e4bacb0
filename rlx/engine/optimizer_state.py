"""Take the steps of an engine's optimizer, whose state may be split by bytes over device and host.

Note [a step in pieces]
A piece is some parameters, or a slice of a large one, such as an embedding. Their state's tensors stay in host memory; the step
copies it to the device, steps, and copies it back. While one piece is stepped, the next is prefetched and the previous one
offloaded, each on its own stream. The device therefore holds at most three pieces, and none in forward and backward. AdamW treats
each element separately, so the result equals that of one step over everything, bit for bit. The device memory of a piece belongs
to the compute stream: a prefetch starts after the work that used the memory before, and a piece is released after the copy that
offloads it. A step can only lack device memory, which is checked before anything moves.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from rlx.config.schema import OptimConfig
from rlx.engine.fsdp_units import local
from rlx.engine.host_offload import HandOverError, TensorOffload, copy_on
from rlx.engine.optimizer import (
    ShardAdamW,
    build_optimizer,
    clip_gradients,
    configure,
    learning_rate_factor,
    state_bytes,
    step_in_parts,
    stepping_only,
)
from rlx.engine.sharding import Sharded
from rlx.offload import HostArena

SLICE_ALIGNMENT = 64  # elements of a slice; vector instructions then group them as in the whole parameter
PIECE_BYTES = 1 << 30
Pairs = Iterator[tuple[Tensor, Tensor]]
TEMPORARY = 0.5  # of a piece: what AdamW allocates for its step


class ParameterState:
    """The state of one parameter in host memory. What the host has no room for stays on the device until the next `to_host`."""

    def __init__(self, optimizer: ShardAdamW, parameter: Tensor, nbytes: int, arena: HostArena, name: str):
        self.optimizer, self.parameter, self.nbytes, self._place = optimizer, parameter, nbytes, (arena, name)
        self.forget()

    def forget(self) -> None:
        """Give up the bytes in host memory; the optimizer gets another state."""
        self._by_name: dict[str, TensorOffload] = {}

    @property
    def offloads(self) -> list[TensorOffload]:
        return list(self._by_name.values())

    @property
    def tensors(self) -> dict[str, tuple[Tensor, TensorOffload]]:
        """The state's tensors by name, without the count of steps, each with what may hold it in host memory."""
        state = self.optimizer.state.get(self.parameter, {})
        return {name: (x, self._offload(name)) for name, x in state.items() if name != "step"}

    def _offload(self, name: str) -> TensorOffload:
        return self._by_name.setdefault(name, TensorOffload(*self._place))

    def to_host(self) -> None:
        for tensor, offload in self.tensors.values():
            if not offload.is_offloaded:
                offload.offload([tensor])

    def to_device(self) -> None:
        for offload in self.offloads:
            offload.fetch()

    @property
    def made_bytes(self) -> int:
        return local(self.parameter).numel() * 4 * (not self.optimizer.state.get(self.parameter))

    def make(self) -> None:
        """Make a state that is missing, one tensor at a time, which goes to the host before the next."""
        if self.parameter.grad is None or self.parameter in self.optimizer.state:
            return
        for name, tensor in self.optimizer.new_state(self.parameter):
            self.optimizer.state[self.parameter][name] = tensor
            if name != "step":
                with suppress(HandOverError):
                    self._offload(name).offload([tensor])

    def cut(self, most_bytes: int) -> Iterator["_Slice"]:
        """Yield slices of at most about this size."""
        elements, count = local(self.parameter).numel(), -(-self.nbytes // most_bytes)
        length = max(1, -(-elements // max(1, count) // SLICE_ALIGNMENT)) * SLICE_ALIGNMENT
        for start in range(0, max(1, elements), length):
            end = min(start + length, elements)
            yield _Slice(self, start, end, self.nbytes * (end - start) // max(1, elements))


class _Slice:
    """Some neighbouring elements of a parameter and their state."""

    def __init__(self, state: ParameterState, start: int, end: int, nbytes: int):
        self.state, self.start, self.end, self.nbytes = state, start, end, nbytes
        self.is_last = end == local(state.parameter).numel()
        self._parts: dict[str, Tensor] = {}

    def read(self) -> Pairs:
        """Yield the copies that bring the state to the device."""
        for name, (tensor, offload) in self.state.tensors.items():
            if offload.is_offloaded:
                device = local(self.state.parameter).device
                self._parts[name] = torch.empty(self.end - self.start, dtype=tensor.dtype, device=device)
                yield from offload.parts(self._parts[name], self._first_byte(tensor))
            else:
                self._parts[name] = local(tensor).view(-1)[self.start : self.end]

    def begin_step(self) -> Tensor:
        """Return the slice as a parameter with its state, for the optimizer."""
        parameter, optimizer = self.state.parameter, self.state.optimizer
        own = local(parameter).detach().view(-1)[self.start : self.end]
        own.grad_dtype = None  # any type, as the parameter's
        own.grad = local(parameter.grad).reshape(-1)[self.start : self.end]
        optimizer.state[own] = {"step": optimizer.state[parameter]["step"].clone(), **self._parts}
        return own

    def end_step(self, own: Tensor) -> None:
        stepped = self.state.optimizer.state.pop(own)["step"]
        if self.is_last:
            self.state.optimizer.state[self.state.parameter]["step"].copy_(stepped)

    def written(self) -> Pairs:
        for name, part in self._parts.items():
            tensor, offload = self.state.tensors[name]
            if offload.is_offloaded:
                yield from ((there, here) for here, there in offload.parts(part, self._first_byte(tensor)))

    def release(self) -> None:
        if self._parts and self.is_last:
            with suppress(HandOverError):
                self.state.to_host()  # what the host had no room for
        self._parts.clear()

    def _first_byte(self, tensor: Tensor) -> int:
        return (local(tensor).storage_offset() + self.start) * tensor.itemsize


class OptimizerStateOnHost:
    """Steps an optimizer whose state is in host memory, all of it or what exceeds `device_bytes`; `staying` have theirs on the device."""

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
        moving = [ParameterState(optimizer, p, n, arena, name) for p, n in sizes.items() if p not in stays]
        self._groups: list[list[ParameterState]] = []  # neighbours of a piece's size; larger ones by themselves
        for state in moving:
            if self._groups and sum(each.nbytes for each in (*self._groups[-1], state)) <= piece_bytes:
                self._groups[-1].append(state)
            else:
                self._groups.append([state])
        self.pieces: list[list[_Slice]] = []  # slices whose states are on the device at once
        for group in self._groups:
            slices = [piece for state in group for piece in state.cut(piece_bytes)]
            self.pieces += [slices] if len(group) > 1 else [[one] for one in slices]

    @property
    def _moving(self) -> list[ParameterState]:
        return [state for group in self._groups for state in group]

    def to_host(self) -> None:
        """Offload the moving state. Raises HandOverError if the host has no room; the rest is still on the device."""
        for state in self._moving:
            state.to_host()

    def to_device(self) -> None:
        """Fetch all of the state. Raises HandOverError if the device has no room; the rest is still in host memory."""
        for state in self._moving:
            state.to_device()

    def step(self) -> None:
        """Take the optimizer's step and leave the moving state in host memory. See Note [a step in pieces].

        Raises HandOverError if the device has no room; nothing has changed.
        """
        self._require_room()
        for state in self._moving:
            state.make()
        pieces = [[each for each in piece if each.state.parameter.grad is not None] for piece in self.pieces]
        arrived = self._fetch(pieces[0]) if pieces else None
        with stepping_only(self._optimizer, {id(p): p for p in self.staying}):  # while the first piece arrives
            step_in_parts(self._optimizer)
        before: list[_Slice] = []
        left: torch.Event | None = None
        for piece, following in zip(pieces, [*pieces[1:], []], strict=False):
            arriving = self._fetch(following)
            self._wait(arrived)
            own = {id(each.state.parameter): each.begin_step() for each in piece}
            with stepping_only(self._optimizer, own):
                self._optimizer.step()
            for each in piece:
                each.end_step(own[id(each.state.parameter)])
            leaving = copy_on(self._leaving, [pair for each in piece for pair in each.written()])
            self._release(before, left)
            arrived, before, left = arriving, piece, leaving
        self._release(before, left)

    def _fetch(self, piece: list[_Slice]) -> torch.Event | None:
        # The list first: its tensors are the compute stream's.
        return copy_on(self._arriving, [pair for each in piece for pair in each.read()])

    def _release(self, piece: list[_Slice], left: torch.Event | None) -> None:
        self._wait(left)
        for each in piece:
            each.release()

    def _wait(self, copied: torch.Event | None) -> None:
        if copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(copied)

    def replace(self, make: Callable[[], None]) -> None:
        """Replace the whole state, without holding the moving part on the device all at once.

        `make` gives a state to the parameters that the optimizer has while it is called; no parameter has one before. Raises
        HandOverError if the host has no room.
        """
        made = {}
        for parameters, moving in [(self.staying, []), *(([each.parameter for each in g], g) for g in self._groups)]:
            self._optimizer.state.clear()
            with stepping_only(self._optimizer, {id(p): p for p in parameters}):
                if parameters:
                    make()
            made |= self._optimizer.state
            for state in moving:
                state.forget()
                state.to_host()
        self._optimizer.state.update(made)

    @property
    def offloads(self) -> list[TensorOffload]:
        return [offload for state in self._moving for offload in state.offloads]

    def _require_room(self) -> None:
        sizes = [0, *(sum(each.nbytes for each in piece) for piece in self.pieces), 0]
        before_now_after = zip(sizes, sizes[1:], sizes[2:], strict=False)
        at_once = [int(sum(three) + TEMPORARY * three[1]) for three in before_now_after]
        nbytes = max([0, *at_once, *(state.made_bytes for state in self._moving)])
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


class Stepper:
    """An engine's optimizer with its learning-rate schedule.

    `device_bytes` of its state may stay on the device; infinite: all of it. `before_step` is called right before parameters and
    states change.
    """

    def __init__(
        self,
        sharded: Sharded,
        optim: OptimConfig,
        total_steps: int,
        grad_clip: float,
        device_bytes: float,
        arena: HostArena,
        name: str,
        before_step: Callable[[], None],
    ):
        self._sharded, self._optim, self._total_steps, self._grad_clip = sharded, optim, total_steps, grad_clip
        self._before_step = before_step
        self.optimizer = build_optimizer(sharded.root.parameters(), optim)
        self.on_host: OptimizerStateOnHost | None = None  # None if all of the state is on the device
        if device_bytes < math.inf:
            place = arena, f"{name}_optimizer_state", sharded.device
            self.on_host = OptimizerStateOnHost(self.optimizer, *place, device_bytes=device_bytes)
        self.updates = self.steps = 0  # asked for, including skipped ones, which the learning rate follows; and taken

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def missing_bytes(self) -> int:
        """Return the bytes of state that the first step will allocate on the device; 0 after that step."""
        parameters = self.parameters if self.on_host is None else self.on_host.staying
        missing = (p for p in parameters if not self.optimizer.state.get(p))
        return sum(state_bytes(self.optimizer, p) for p in missing if local(p).device.type != "cpu")

    def step(self) -> dict[str, float]:
        """Step, unless the gradients' norm is not finite, and free them. Return grad_norm (before clipping), lr (of this step), skipped (0 or 1)."""
        lr = self._optim.lr * learning_rate_factor(self.updates, self._total_steps, self._optim)
        configure(self.optimizer, self._optim, lr)
        norm = clip_gradients(self.optimizer, self._grad_clip, self._sharded.replicas, self._sharded.device)
        if finite := math.isfinite(norm):
            self._before_step()
            if self.on_host is None:
                step_in_parts(self.optimizer)
            else:
                self.on_host.step()
            self.steps += 1
        self._sharded.drop_gradients(self.optimizer)
        self.updates += 1
        return {"grad_norm": norm, "lr": lr, "skipped": float(not finite)}
