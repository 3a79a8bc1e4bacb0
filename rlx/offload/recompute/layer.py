"""The memory that a recomputed layer has from one forward to the next."""

from __future__ import annotations

from rlx.offload.recompute.module_state import TensorSites
from rlx.offload.recompute.saved_slots import TensorSpecs
from rlx.offload.runtime.session import Layer


class RecomputedLayer(Layer):
    """A layer that is recomputed."""

    sites: TensorSites | None = None  # where it keeps parameters and buffers; found at its first forward
    specs: TensorSpecs | None = None  # of the tensors that autograd saved in its last forward
    uses_streams = False  # whether it computes on several streams
    specs_checked: TensorSpecs | None = None  # the specs with which `uses_streams` was last looked for
