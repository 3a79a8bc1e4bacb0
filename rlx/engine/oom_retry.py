"""Repeat an update once with a smaller plan when `save=auto` runs out of device memory.

Note [who can be told]
A process that runs out of memory leaves forward or backward between two of FSDP's collectives. Another process may wait inside
the next collective. No message can reach it: it would take a message on their common communicator for that collective. All
processes therefore meet on a second communicator after the passes; failed processes go there at once. If all come, all repeat
the step. This is so for a single process, for processes that failed alike (likely, because their plans are equal), and for one
that failed after the last collective. If some do not come in time, the failed ones raise an error, which ends the run.

On a device collectives run behind the host. Two failed processes may have begun different collectives, and a new one would
match the pending ones. So each process waits until its device has finished all work. Once every device has, all processes have
begun the same collectives.

Note [why torch 2.13]
An exception in backward leaves FSDP2 in the middle of an iteration. Its modules still count as being in backward, so their next
forward gathers no parameters. The callback that ends a backward still counts as queued, so it never runs again.
`FSDPModule.reset_iter_state` resets both. torch has it from 2.13 on; older versions have no public way.
"""

import gc
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from math import inf
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from rlx.engine.optimizer import state_bytes
from rlx.engine.optimizer_state import OptimizerStateOnHost
from rlx.engine.sharded import Sharded
from rlx.engine.units import local
from rlx.offload import ActivationOffloading

logger = logging.getLogger(__name__)

LOWERED = 0.8  # share of the current plan's largest memory that later plans may hold
PEERS_WAIT_S = 120.0  # for the other processes, which may be half a step behind

T = TypeVar("T")
_LOWER = "Lower activation_offload.max_device_bytes or the micro-batches"


class OomRetry:
    """Runs the passes of a step, and once more with less memory on the device if memory ran out.

    All processes build and call it together.

    Args:
        offload: the offloading of activations, whose plan decides how many bytes stay on the device.
        sharded: the model.
        optimizer: of the model's parameters; it does not step during the passes.
        device: of this process.
        state_on_host: holds the part of the optimizer's state that is not on the device; None: all is.
    """

    def __init__(
        self,
        offload: ActivationOffloading,
        sharded: Sharded,
        optimizer: AdamW,
        device: torch.device,
        state_on_host: OptimizerStateOnHost | None,
    ):
        self._state_on_host = state_on_host
        self._offload, self._sharded, self._optimizer, self._device = offload, sharded, optimizer, device
        # A second communicator, on the host: Note [who can be told].
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None

    def run(self, passes: Callable[[], T]) -> T:
        """Return the result of `passes`.

        Args:
            passes: all forwards and backwards of a step. They change nothing but gradients and random numbers.

        Raises:
            torch.OutOfMemoryError: memory ran out twice, no plan exists that could hold less, or FSDP or another process
                cannot begin again.
        """
        random_state = self._random_state()
        done, failure = self._attempt(passes)
        limit = self._limit(failure)
        if limit is None:
            assert done is not None
            return done[0]
        if not self._is_drained():
            why = f"the processes stopped in different places and wait for each other. {_LOWER}"
            raise _cannot_repeat(failure, why)
        self._sharded.recover()
        self._sharded.drop_gradients(self._optimizer)
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        logger.warning(
            "out of device memory in an update (%s). The optimizer has not stepped. The step is repeated, and plans of save=auto "
            "now hold at most %.3f GB on the device. Set activation_offload.max_device_bytes to this to start with it",
            failure or "on another process",
            limit / 1e9,
        )
        self._offload.limit_device_bytes(limit)
        self._set_random_state(random_state)
        done, failure = self._attempt(passes)
        if self._limit(failure) is not None:
            raise torch.OutOfMemoryError(
                f"out of device memory in an update, also when it was repeated with a plan of at most {limit / 1e9:.3f} GB "
                f"({failure or 'on another process'}). Make micro-batches smaller or use more processes"
            )
        assert done is not None
        return done[0]

    def _attempt(self, passes: Callable[[], T]) -> tuple[tuple[T] | None, str | None]:
        """Return the passes' result in a tuple, or the message of the failure."""
        self._offload.agree(self._group, reserve_bytes=self._missing_state_bytes())
        try:
            return (passes(),), None
        except torch.OutOfMemoryError as error:
            failure = str(error).split(". ")[0]
        gc.collect()  # frees the traceback and with it the graph
        return None, failure

    def _limit(self, failure: str | None) -> int | None:
        """Return the bytes that later plans may hold on all processes; None if no process failed."""
        own = inf
        if failure is not None:
            plan = self._offload.plan()
            can_lower = plan is not None and self._sharded.can_recover
            own = LOWERED * plan.prediction.peak_bytes if can_lower else -1.0
        limit = torch.tensor(own, dtype=torch.float64)
        if self._group is not None:
            meeting = dist.all_reduce(limit, dist.ReduceOp.MIN, self._group, async_op=True)
            if failure is None:
                meeting.wait()
            elif not _ends(meeting):
                why = f"another process has not finished its passes after {PEERS_WAIT_S:.0f} s"
                raise _cannot_repeat(failure, f"{why} and probably waits for this one in a collective. {_LOWER}")
        least = limit.item()
        if least < 0:
            why = "it has no plan yet, so no more activations can be offloaded. Make micro-batches smaller"
            if not self._sharded.can_recover:
                can = "only a single process or FSDP2 of torch 2.13 or newer can begin again after an error"
                why = f"got torch {torch.__version__}, and {can}. {_LOWER}"
            raise _cannot_repeat(failure, why)
        return None if least == inf else int(least)

    def _is_drained(self) -> bool:
        """Whether every collective that a process has begun was begun by all; see Note [who can be told]."""
        if self._group is None or self._device.type == "cpu":
            return True
        waiting = threading.Thread(target=torch.accelerator.synchronize, args=(self._device,), daemon=True)
        waiting.start()
        waiting.join(PEERS_WAIT_S)
        is_done = torch.tensor(not waiting.is_alive(), dtype=torch.int32)
        dist.all_reduce(is_done, dist.ReduceOp.MIN, self._group)
        return bool(is_done)

    def _missing_state_bytes(self) -> int:
        """Return the bytes of state that the optimizer's first step will allocate; 0 after that step."""
        state = self._optimizer.state
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if self._state_on_host is not None:
            parameters = self._state_on_host.staying
        missing = (p for p in parameters if not state.get(p))
        return sum(state_bytes(self._optimizer, p) for p in missing if local(p).device.type != "cpu")

    def _random_state(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type != "cpu":
            states.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return states

    def _set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(state[1], self._device)


def _cannot_repeat(failure: str | None, why: str) -> torch.OutOfMemoryError:
    where = failure or "on another process"
    return torch.OutOfMemoryError(f"out of device memory in an update ({where}). The step cannot be repeated: {why}")


def _ends(meeting: dist.Work) -> bool:
    """Whether all processes come in time."""
    try:
        meeting.wait(timedelta(seconds=PEERS_WAIT_S))
    except RuntimeError:
        return False
    return True
