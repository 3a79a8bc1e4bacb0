"""What a layer costs, what there is to spend, and what becomes of a layer: what plans are made of. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Operation:
    """An operation of a layer whose result can be saved, so that recomputation need not run it.

    Args:
        name: of it, for people.
        at: where in the layer's forward it ends, as a share of the time of that, in [0, 1].
        seconds: to run it again.
        nbytes: of its result and of what its backward reads beside its arguments.
        offload_at: where in the layer's forward these may leave, as a share; None: at once. A result that the layer might yet
            write to waits for a later operation.
        small_bytes: of these what is too small to leave.
        extra_bytes: of these what autograd does not save.
    """

    name: str
    at: float
    seconds: float
    nbytes: int
    offload_at: float | None = None
    small_bytes: int = 0
    extra_bytes: int = 0


class Point(NamedTuple):
    """A moment in a layer's backward, at which what the layer before has sent may be asked for.

    Args:
        at: after which share of backward, recomputation aside, in [0, 1].
        nbytes: that backward holds at most from there on, where the layer was recomputed.
        name: the operation whose backward begins there, for people.
        call, slots: which call of the layer that is, and how many tensors autograd has saved up to it; of measured layers.
        forward_at: where in the layer's forward that operation ends, as a share of the time of that, in [0, 1]. `nbytes` holds
            nothing of the results of operations that end there or later: backward is through with what reads them. None: that
            is not known.
    """

    at: float
    nbytes: int
    name: str = ""
    call: int = -1
    slots: int = -1
    forward_at: float | None = None


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs. Layers with equal costs are planned as one kind, so that a model should have few of them.

    Args:
        forward_s, backward_s: time of either, without recomputation [s].
        recompute_s: time of recomputing all that backward needs, the operations among it [s].
        boundary_bytes: of its inputs, which leave, or stay where `offload_boundary` is False.
        saved_bytes: all that plain autograd keeps of it.
        working_bytes: that its backward holds at most where it was recomputed, what it recomputes included.
        late_bytes: the same once its widest part has been given back.
        operations: in the order in which they run.
        late_at: after which share of backward that is, in [0, 1].
        forward_bytes: that its forward holds at most, its inputs included and its operations' `extra_bytes` not; less than
            what it saves counts as that.
        points: of backward, from the first to the last, `late_at` and `late_bytes` not among them; where there are any these two
            say nothing.
        extra_bytes: of its inputs what autograd does not save, and `working_bytes` and the like do not count therefore: where
            the inputs stay they are there until backward is through with the layer.
        kept_bytes: that its backward holds at most where all was kept; never less than `working_bytes`, which 0 stands for.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    boundary_bytes: int
    saved_bytes: int
    working_bytes: int
    late_bytes: int
    operations: tuple[Operation, ...] = ()
    late_at: float = 0.5
    forward_bytes: int = 0
    points: tuple[Point, ...] = ()
    extra_bytes: int = 0
    kept_bytes: int = 0

    @property
    def fetch_points(self) -> tuple[Point, ...]:
        """Where what the layer before has sent may be asked for: when recomputation begins, or later."""
        return (Point(0.0, self.working_bytes), *(self.points or (Point(self.late_at, self.late_bytes),)))


@dataclass(frozen=True)
class Budget:
    """What there is to spend.

    Args:
        out_bytes_per_s, in_bytes_per_s: of the link from the device and to it, while training computes; 0: there is none.
        device_bytes: that may be held for backward at once, above weights, gradients and optimizer states.
        host_bytes: of host memory; None: no limit.
        disk_bytes_per_s: of a disk for what the host has no room for, one way at a time; 0: there is none.
        turnaround_s: for which the device computes between forward and backward of the layers, while the link may go on.
        turnaround_bytes: that this holds at most; what the last two layers sent is on its way then.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    device_bytes: int
    host_bytes: int | None = None
    disk_bytes_per_s: float = 0.0
    turnaround_s: float = 0.0
    turnaround_bytes: int = 0

    @property
    def has_link(self) -> bool:
        """Whether what leaves can come back."""
        return bool(self.out_bytes_per_s and self.in_bytes_per_s)

    @property
    def has_disk(self) -> bool:
        """Whether anything may go to disk."""
        return self.has_link and self.disk_bytes_per_s > 0 and self.host_bytes is not None


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer.

    Args:
        keep: all that autograd saves stays on the device, and nothing is recomputed. The rest says nothing then.
        offload_boundary: its inputs leave the device; else they stay.
        on_device: which operations' results stay on the device.
        off_device: which operations' results leave it.
    """

    keep: bool = False
    offload_boundary: bool = True
    on_device: frozenset[int] = frozenset()
    off_device: frozenset[int] = frozenset()
