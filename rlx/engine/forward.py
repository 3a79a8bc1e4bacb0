"""One micro-batch through a model, from tokens to what concerns the responses.

Shape letters: B rows, W columns of the window that holds the responses.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from rlx.data.batch import Batch
from rlx.models.log_probs import token_log_probs

Head = Literal["lm", "value"]


class Distribution(NamedTuple):
    """How next-token distributions are read: at which temperature, and whether for their entropy too."""

    temperature: float
    with_entropy: bool


def response_outputs(model: nn.Module, batch: Batch, distribution: Distribution | None) -> dict[str, Tensor]:
    """What the model says at the positions from which the tokens of the window are predicted.

    Args:
        model: a transformers model, sharded or not.
        batch: laid out as Note [rows start at column 0] of micro_batch.py says, on the model's device.
        distribution: of a language model; None for a value model.

    Returns:
        log_probs of the window's tokens and, if asked for, entropy; of a value model values. All (B, W), fp32 or wider.
    """
    # Nothing is predicted from the last token, so it need not be read.
    input_ids, window = batch["input_ids"][:, :-1], batch.response_length
    if distribution is None:
        values = model(input_ids=input_ids, use_cache=False).logits[:, -window:, 0]
        return {"values": values.to(torch.promote_types(values.dtype, torch.float32))}
    logits = model(input_ids=input_ids, use_cache=False, logits_to_keep=window).logits
    log_probs, entropy = token_log_probs(logits, batch.responses(), *distribution)
    return {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}
