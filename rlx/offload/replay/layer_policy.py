"""What is to become of a layer's inputs and of the operations that it runs, when a plan says so.

Note [places]
Calls of attention and of linear maps are counted from 0 in the order in which a layer makes them. The other operations that
`rlx.offload.replay.dataflow` knows are counted from -1 downwards, in the order in which it runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx.offload.replay.dataflow import DeadOpProof


@dataclass(frozen=True)
class LayerPolicy:
    """For one layer; operations by their places (Note [places]).

    Args:
        keep: run the layer as it is, without recomputation. The rest says nothing then.
        offload_boundary: its inputs leave the device; else they stay.
        on_device: operations whose results stay on the device, so that they do not run again.
        off_device: those whose results leave it.
        unread: those that do not run again because nobody reads their results then.
        others: names of the operations that are no calls, in order; readings: what reads the results of `unread`. Where a
            layer does anything else, all of `unread` runs again.
        proof: whether that is known to be right.
        names: of all its calls, from `call_name`; where a layer calls something else, the calls from there on run again.
            None: whatever it calls.
        fetch_early: what the layer before has sent off is fetched when this one's recomputation begins.
        fetch_call, fetch_below: else when backward comes to this call, which is when it asks for a slot before this one.
            None: when it is through with what follows attention.
        saved_bytes: what autograd saves of it, where that is known [bytes].
        sample: measures the layer, of which nothing but its inputs is kept then.
    """

    keep: bool = False
    offload_boundary: bool = True
    on_device: frozenset[int] = frozenset()
    off_device: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    others: tuple[str, ...] = ()
    readings: tuple[tuple[str, int], ...] = ()
    proof: DeadOpProof | None = None
    names: tuple[str, ...] | None = None
    fetch_early: bool = False
    fetch_call: int | None = None
    fetch_below: int | None = None
    saved_bytes: int = 0
    sample: Any = None  # a `Sample`, whose module builds on this one

    @property
    def has_calls(self) -> bool:
        """Whether the results of operations are wanted."""
        return bool(self.on_device or self.off_device)
