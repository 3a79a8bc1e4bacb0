"""One micro-batch through a model, from tokens to what concerns the responses.

Shape letters: B rows, W columns of the window that holds the responses, V vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from rlx.data.batch import Batch

Head = Literal["lm", "value"]


def response_outputs(model: nn.Module, batch: Batch, head: Head) -> Tensor:
    """What the model says at the positions from which the tokens of the window are predicted.

    Args:
        model: a transformers model, sharded or not.
        batch: laid out as Note [rows start at column 0] of micro_batch.py says, on the model's device.
        head: what the model ends in.

    Returns:
        lm: logits (B, W, V) in the model's type. value: values (B, W), fp32 or wider.
    """
    # Nothing is predicted from the last token, so it need not be read.
    input_ids, window = batch["input_ids"][:, :-1], batch.response_length
    only_window = {"logits_to_keep": window} if head == "lm" else {}
    output = model(input_ids=input_ids, use_cache=False, **only_window).logits
    if head == "lm":
        return output
    values = output[:, -window:, 0]
    return values.to(torch.promote_types(values.dtype, torch.float32))
