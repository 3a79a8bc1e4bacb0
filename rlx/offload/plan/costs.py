"""The types that plans are made of: cost of a layer, budget, plan of a layer. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Operation:
    """An operation of a layer whose result can be saved, so that recomputation does not run it."""

    name: str  # for people
    at: float  # when in the layer's forward it ends, as a share of forward's time, in [0, 1]
    seconds: float  # time to run it again
    nbytes: int  # size of its result and of the other tensors that its backward reads, without its arguments
    offload_at: float | None = (
        None  # when these bytes may be offloaded, if later: the layer may still write to the result
    )
    small_bytes: int = 0  # of `nbytes`, tensors that are too small to be offloaded
    extra_bytes: int = 0  # of `nbytes`, tensors that autograd does not save
    op: int = 0  # for profiled layers: the number of its call in the layer


class Point(NamedTuple):
    """A fetch point: a moment in a layer's backward at which the bytes of the layer before may be fetched."""

    at: float  # time since backward began, without recomputation, as a share of backward's time, in [0, 1]
    nbytes: int  # peak memory of backward from then on, if the layer was recomputed
    name: str = ""  # the operation whose backward begins at that moment, for people
    call: int = -1  # for profiled layers: index of that operation's call
    slots: int = -1  # likewise: number of tensors that autograd has saved up to it
    # When in the layer's forward that operation ends, as a share, in [0, 1]; None: not known. By then backward has used the
    # results of operations that end then or later, so `nbytes` does not count them.
    forward_at: float | None = None


@dataclass(frozen=True)
class LayerCost:
    """Times and sizes of one layer. Layers with equal costs are planned as one kind; a plan is fast to find for few kinds."""

    forward_s: float
    backward_s: float  # without recomputation
    recompute_s: float  # to recompute everything that backward needs, with all operations
    boundary_bytes: int  # size of the inputs, which are offloaded, or kept if `LayerPlan.offload_boundary` is False
    saved_bytes: int  # size of everything that plain autograd saves
    working_bytes: int  # peak memory of backward if the layer was recomputed, with the recomputed tensors
    late_bytes: int  # the same after backward has freed the layer's widest part
    operations: tuple[Operation, ...] = ()  # in the order in which they run
    late_at: float = 0.5  # when backward has freed the widest part, as a share of backward's time, in [0, 1]
    # Peak memory of forward, with the inputs and without the operations' `extra_bytes`; counts as at least `saved_bytes`.
    forward_bytes: int = 0
    points: tuple[Point, ...] = ()  # in backward, from the first to the last; they replace `late_at` and `late_bytes`
    # Of the inputs, tensors that autograd does not save; not in `working_bytes`, `late_bytes` and `points`. If the inputs are
    # kept, they exist until the layer's backward ends.
    extra_bytes: int = 0
    kept_bytes: int = 0  # peak memory of backward if the whole layer was kept; counts as at least `working_bytes`

    @property
    def fetch_points(self) -> tuple[Point, ...]:
        """The moments at which the bytes of the layer before may be fetched. The first is the begin of recomputation."""
        return (Point(0.0, self.working_bytes), *(self.points or (Point(self.late_at, self.late_bytes),)))


@dataclass(frozen=True)
class Budget:
    """The resources that a plan may use. Rates are those that copies reach while training computes; 0: there is no such thing."""

    out_bytes_per_s: float  # of the link from the device
    in_bytes_per_s: float  # of the link to the device
    device_bytes: int  # device memory for backward, above weights, gradients and optimizer states
    host_bytes: int | None = None  # None: no limit
    disk_bytes_per_s: float = 0.0  # of a disk for layers that the host has no room for, one direction at a time
    loss_s: float = 0.0  # compute time of head and loss, in which the link keeps copying
    loss_bytes: int = 0  # peak memory in that time, without the bytes of the last two layers, still being copied

    @property
    def has_link(self) -> bool:
        return bool(self.out_bytes_per_s and self.in_bytes_per_s)

    @property
    def has_disk(self) -> bool:
        return self.has_link and self.disk_bytes_per_s > 0 and self.host_bytes is not None


@dataclass(frozen=True)
class LayerPlan:
    """The plan for one layer. Operations that are in neither set are recomputed."""

    keep: bool = False  # keep everything that autograd saves on the device and recompute nothing, whatever follows
    offload_boundary: bool = True  # offload the layer's inputs; else keep them on the device
    on_device: frozenset[int] = frozenset()  # indices of operations whose results are kept on the device
    off_device: frozenset[int] = frozenset()  # indices of operations whose results are offloaded
