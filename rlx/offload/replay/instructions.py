"""Instructions for one layer call: which results it keeps, and where.

Note [op indices]
A layer's calls of attention and of linear maps are numbered 0, 1, 2, … in order, the other operations that `dataflow.py` knows
-1, -2, … Example: a norm, two linear maps and their sum are -1 (`pow`), -2 (`mean`), -3 (`mul`), 0, 1, -4 (`add`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.offload.replay.dead_ops import DeadOpProof


@dataclass(frozen=True)
class LayerInstructions:
    """A plan's decisions for one layer; operations by their indices (Note [op indices]).

    Args:
        keep: run the layer without recomputation. The other fields have no effect then.
        offload_boundary: offload the layer's inputs; else keep them on the device.
        on_device: cached ops whose results are kept on the device.
        off_device: cached ops whose results are offloaded.
        dead_ops: operations whose results nobody reads if the cached ops are not repeated (Note [dead ops]).
        other_names: names of the operations with a negative index, in order.
        dead_op_reads: the functions that read results of `dead_ops`, in order. If a forward differs from this or from
            `other_names`, its recomputation repeats all of `dead_ops`.
        proof: whether skipping `dead_ops` is known to be right.
        call_names: names of all calls, by `call_name`; None: any. From the first call with another name on, no call is cached.
        prefetch_early: prefetch the layer before this one when this layer's recomputation begins.
        prefetch_call, prefetch_below: else prefetch it when backward reaches this call, or asks for a slot below this one.
            None: when backward has passed the operations after attention.
        saved_bytes: the bytes that autograd saves in the layer, if known.
    """

    keep: bool = False
    offload_boundary: bool = True
    on_device: frozenset[int] = frozenset()
    off_device: frozenset[int] = frozenset()
    dead_ops: frozenset[int] = frozenset()
    other_names: tuple[str, ...] = ()
    dead_op_reads: tuple[tuple[str, int], ...] = ()
    proof: DeadOpProof | None = None
    call_names: tuple[str, ...] | None = None
    prefetch_early: bool = False
    prefetch_call: int | None = None
    prefetch_below: int | None = None
    saved_bytes: int = 0

    @property
    def cached_ops(self) -> frozenset[int]:
        """The operations whose results are kept."""
        return self.on_device | self.off_device
