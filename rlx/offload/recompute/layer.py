"""The memory that a recomputed layer has from one forward to the next."""

from __future__ import annotations

from rlx.offload.recompute.module_state import TensorSites
from rlx.offload.recompute.saved_slots import TensorSpecs
from rlx.offload.runtime.session import Layer


class RecomputedLayer(Layer):
    """A layer that is recomputed.

    Attributes:
        sites: where the layer keeps parameters and buffers; found at its first forward.
        specs: of the tensors that autograd saved in its last forward.
        uses_streams: whether it computes on several streams.
        specs_checked: the specs with which `uses_streams` was last looked for.
    """

    def __init__(self, index: int, name: str) -> None:
        super().__init__(index, name)
        self.sites: TensorSites | None = None
        self.specs: TensorSpecs | None = None
        self.uses_streams = False
        self.specs_checked: TensorSpecs | None = None
