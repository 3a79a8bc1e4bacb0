"""Dead ops: operations that a recomputation skips because nobody reads their results.

Note [dead ops]
If a result is kept, the operations that lead to it may lose their only reader. Example: with the rotated queries kept, the
linear map for the queries and the rotation before them are dead; in a norm with its mean of squares kept, the squares are.
A dead op does not run again: its slots are filled from its arguments, and its result is memory without values.
Three things make this safe.

*Observed.* While a layer is profiled, `DataflowRecorder` notes which function reads which result (`dataflow.py`).
*Checked.* Before an operation is skipped for the first time, one layer of its kind is recomputed twice in one backward:
    once with NaN in the results of its dead ops, once completely. All saved tensors must be equal bit for bit. Until the
    device has compared them, the layers of the kind are recomputed completely.
*Repeated.* In each later forward the same functions must read the same results in the same order. A call whose forward
    differs is recomputed completely.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rlx.offload.recompute.policy import Run
from rlx.offload.replay.cached_op import CachedOp
from rlx.offload.replay.replay_mode import DeadOpNeededError, ReplayMode
from rlx.offload.storage.regions import is_plain

logger = logging.getLogger("rlx.offload")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeadOpCheck:
    """The check that the dead ops of one kind of layers may be skipped. One layer makes it (Note [dead ops])."""

    def __init__(self) -> None:
        self._has_passed = False
        self._is_begun = False
        self._verdict: Tensor | None = None  # of the device, until the host has read it
        self._compared: torch.Event | None = None

    @property
    def has_passed(self) -> bool:
        """Whether the comparison has ended and found no difference; waits for nothing."""
        if self._verdict is not None and (self._compared is None or self._compared.query()):
            self._has_passed, self._verdict = bool(self._verdict.item()), None
            if not self._has_passed:
                logger.info(
                    "activation offloading: a layer reads results in a way that profiling did not see; its dead ops "
                    "are recomputed too, which takes longer than planned"
                )
        return self._has_passed

    def begin(self) -> bool:
        """Return whether the caller is to make the check: the first one is."""
        was_begun, self._is_begun = self._is_begun, True
        return not was_begun

    def abandon(self) -> None:
        """The caller could not make it; the next one may."""
        self._is_begun = False

    def compare(self, poisoned: Sequence[Tensor], complete: Sequence[Tensor]) -> None:
        """Compare the fingerprints of the saved tensors of a poisoned and a complete recomputation."""
        if len(poisoned) != len(complete):
            return
        device = next((tensor.device for tensor in complete if tensor.device.type != "cpu"), torch.device("cpu"))
        same = [(one == other).to(device, non_blocking=True) for one, other in zip(poisoned, complete, strict=True)]
        verdict = torch.stack(same).all() if same else torch.ones((), dtype=torch.bool)
        if verdict.device.type != "cpu":
            here = torch.empty((), dtype=torch.bool, pin_memory=True)
            verdict = here.copy_(verdict, non_blocking=True)
            self._compared = torch.accelerator.current_stream(device).record_event()
        self._verdict = verdict


def recompute_without_dead_ops(
    run: Run, cached_ops: Mapping[int, CachedOp | None], calls: int, check: DeadOpCheck
) -> list[Tensor]:
    """Recompute a layer without its dead ops once that has been checked for its kind; make the check if nobody has."""
    complete = partial(ReplayMode, cached_ops, calls)
    without = partial(complete, skips_dead_ops=True)
    if check.has_passed:
        with contextlib.suppress(DeadOpNeededError):
            return run(without)
        return run(complete)
    if not check.begin():
        return run(complete)
    poisoned: list[Tensor] | None = None
    try:
        poisoned = fingerprints(run(partial(without, poisons=True)))
    except DeadOpNeededError:
        check.abandon()
    except Exception:  # a layer may raise anything for NaN: it reads the result of a dead op
        logger.info("activation offloading: a layer reads results of its dead ops, so its dead ops are recomputed too")
    saved = run(complete)
    if poisoned is not None:
        check.compare(poisoned, fingerprints(saved))
    return saved


def fingerprints(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of the bits of each plain tensor that is no parameter, as an exact integer."""
    found = []
    for tensor in tensors:
        if type(tensor) is Tensor and is_plain(tensor):
            numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            bits = numbers.detach().view(_BITS[numbers.element_size()])
            found.append(bits.sum(dtype=torch.int64))
    return found
