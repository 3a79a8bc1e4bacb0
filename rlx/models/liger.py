"""Replace norms, gated MLPs and rotary embeddings of transformers by liger-kernel's fused ones."""

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from rlx.models.loading import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Not needed here, because log-probs are computed from hidden states in chunks.
LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


def apply_liger(model: "PreTrainedModel") -> None:
    """Replace modules of a model, which may be on the meta device, by liger-kernel's fused kernels; weights and names stay.

    liger-kernel replaces the rotary embedding and the classes of the architecture for the whole process. Raises ModelError if
    it is missing or does not know the architecture.
    """
    try:
        found, package = version("liger-kernel"), importlib.import_module("liger_kernel.transformers")
    except (ImportError, PackageNotFoundError) as error:
        raise ModelError(
            f"use_liger: liger-kernel cannot be imported ({error}); `pip install liger-kernel`, or set model.use_liger=False"
        ) from error
    kind = model.config.model_type
    apply = getattr(package, f"apply_liger_kernel_to_{kind}", None)
    if apply is None:
        raise ModelError(
            f"use_liger: liger-kernel {found} has no kernels for models of type {kind}; set model.use_liger=False"
        )
    known = inspect.signature(apply).parameters
    apply(model=model, **{name: False for name in LIGER_LOSSES if name in known})
