"""Fused norms, gated MLPs and rotary embeddings of liger-kernel in place of transformers' own."""

import importlib
import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from rlx.models.loading import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What is computed here otherwise: log-probs come from the hidden states, in chunks.
LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


def apply_liger(model: "PreTrainedModel") -> None:
    """Replaces, in place, what liger-kernel has fused kernels for; weights and their names stay.

    The rotary embedding and classes of the architecture are replaced for the whole process: that is how liger-kernel works.

    Args:
        model: of transformers, with its weights or on the meta device.

    Raises:
        ModelError: liger-kernel is not there, or knows no such architecture.
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
