"""Out of device memory in an update with `save=auto`: plans may hold less from then on, and the step is repeated, once.

Note [who can be told]
A process that runs out of memory leaves forward or backward between two of FSDP's collectives. Nothing reaches a process
that waits inside the next one: it is in the communicator that both share, and takes whatever comes for its own. So all
processes meet on a communicator beside it after the passes and before anything else, those that failed at once. Where all
come (a single process; all failed alike, as equal plans make likely; one failed behind the last collective) the step is
repeated by all. Where not all come in time, those that failed end with an error, and the others with the run.
On a device collectives run behind the host: two processes that have both failed may have begun different ones, and the next
would be taken for those that are pending. So each waits until its device has done all that it was given. Once all devices
have, every collective that was begun was begun by all.
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
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW

from rlx.engine.optimizer import local
from rlx.engine.sharding import FSDP2Model, Sharded
from rlx.offload import ActivationOffloading

logger = logging.getLogger(__name__)

LOWERED = 0.8  # of what the plan in force holds at most, and may hold from then on
WAIT_S = 120.0  # for the other processes, which may be half a step behind
ADAM_STATES = 2  # of the size of each parameter

T = TypeVar("T")


class OomRetry:
    """Runs the passes of a step, and once more with less on the device where memory ran out.

    All processes make and call it together.

    Args:
        offload: plans activations.
        sharded: the model.
        optimizer: of its parameters; it has not moved when the passes run.
        device: of this process.
        keeps_state: whether the optimizer's state stays on the device.
    """

    def __init__(
        self,
        offload: ActivationOffloading,
        sharded: Sharded,
        optimizer: AdamW,
        device: torch.device,
        keeps_state: bool = True,
    ):
        self._keeps_state = keeps_state
        self._offload, self._sharded, self._optimizer, self._device = offload, sharded, optimizer, device
        is_able = isinstance(sharded, FSDP2Model) and hasattr(FSDPModule, "reset_iter_state")
        self._recover = sharded.recover if is_able else None
        # Beside FSDP's communicator, and on the host: Note [who can be told].
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None

    def run(self, passes: Callable[[], T]) -> T:
        """What `passes` returns.

        Args:
            passes: all forwards and backwards of a step. Beside gradients and random numbers it changes nothing.

        Raises:
            torch.OutOfMemoryError: memory ran out twice, nothing was planned that could hold less, or not all processes
                could be told.
        """
        random_state = self._random_state()
        done, failure = self._attempt(passes)
        limit = self._limit(failure)
        if limit is None:
            assert done is not None
            return done[0]
        assert self._recover is not None
        if not self._is_drained():
            raise torch.OutOfMemoryError(
                f"out of device memory in an update ({failure or 'on another process'}). The step cannot be repeated: processes "
                "have stopped in different places and wait for each other. Lower activation_offload.max_device_bytes or the "
                "micro-batches"
            )
        self._recover()
        self._sharded.drop_gradients(self._optimizer)
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()
        logger.warning(
            "out of device memory in an update (%s). The optimizer has not moved: the step is repeated, and from now on plans "
            "of save=auto hold at most %.3f GB. Set activation_offload.max_device_bytes to it to begin with that",
            failure or "on another process",
            limit / 1e9,
        )
        self._offload.limit_device_bytes(limit)
        self._set_random_state(random_state)
        done, failure = self._attempt(passes)
        if self._limit(failure) is not None:
            raise torch.OutOfMemoryError(
                f"out of device memory in an update, also when it was repeated with at most {limit / 1e9:.3f} GB planned "
                f"({failure or 'on another process'}); make micro-batches smaller, or use more processes"
            )
        assert done is not None
        return done[0]

    def _attempt(self, passes: Callable[[], T]) -> tuple[tuple[T] | None, str | None]:
        """What the passes return, or what memory ran out in."""
        self._offload.agree(self._group, reserve_bytes=self._missing_state_bytes())
        try:
            return (passes(),), None
        except torch.OutOfMemoryError as error:
            failure = str(error).split(". ")[0]
        gc.collect()  # the traceback, and with it the graph
        return None, failure

    def _limit(self, failure: str | None) -> int | None:
        """What plans may hold from now on, on all processes; None where no process has failed [bytes]."""
        own = inf
        if failure is not None:
            plan = self._offload.plan()
            can_lower = plan is not None and self._recover is not None
            own = LOWERED * plan.prediction.peak_bytes if can_lower else -1.0
        limit = torch.tensor(own, dtype=torch.float64)
        if self._group is not None:
            meeting = dist.all_reduce(limit, dist.ReduceOp.MIN, self._group, async_op=True)
            if failure is None:
                meeting.wait()
            elif not _ends(meeting):
                raise torch.OutOfMemoryError(
                    f"out of device memory in an update ({failure}). The step cannot be repeated: after {WAIT_S:.0f} s another "
                    "process has still not come to its end and most likely waits for this one in a collective. Lower "
                    "activation_offload.max_device_bytes or the micro-batches"
                )
        least = limit.item()
        if least < 0:
            raise torch.OutOfMemoryError(
                f"out of device memory in an update ({failure or 'on another process'}). The step cannot be repeated: "
                + (
                    "nothing of it was planned yet, so that nothing more can leave the device; make micro-batches smaller"
                    if self._recover is not None
                    else "only FSDP2 of torch 2.13 and newer can begin anew; lower activation_offload.max_device_bytes"
                )
            )
        return None if least == inf else int(least)

    def _is_drained(self) -> bool:
        """Whether no process has begun a collective that another has not."""
        if self._group is None or self._device.type == "cpu":
            return True
        waiting = threading.Thread(target=torch.accelerator.synchronize, args=(self._device,), daemon=True)
        waiting.start()
        waiting.join(WAIT_S)
        is_done = torch.tensor(not waiting.is_alive(), dtype=torch.int32)
        dist.all_reduce(is_done, dist.ReduceOp.MIN, self._group)
        return bool(is_done)

    def _missing_state_bytes(self) -> int:
        """What the optimizer's first step will take, where it has not been done."""
        state = self._optimizer.state
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]] if self._keeps_state else []
        missing = (p for p in parameters if not state.get(p))
        return sum(ADAM_STATES * local(p).nbytes for p in missing if local(p).device.type != "cpu")

    def _random_state(self) -> list[Tensor]:
        on_device = (
            [] if self._device.type == "cpu" else [torch.get_device_module(self._device).get_rng_state(self._device)]
        )
        return [torch.get_rng_state(), *on_device]

    def _set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(state[1], self._device)


def _ends(meeting: dist.Work) -> bool:
    """Whether all processes come in time."""
    try:
        meeting.wait(timedelta(seconds=WAIT_S))
    except RuntimeError:
        return False
    return True
