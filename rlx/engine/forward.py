"""One micro-batch through a model: from left-padded prompts and right-padded responses to what concerns the responses.

Shape letters: B rows, T = P + R tokens of prompt and response, V vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from rlx.data.batch import Batch

Head = Literal["lm", "value"]


def response_outputs(model: nn.Module, batch: Batch, head: Head) -> Tensor:
    """What the model says at the positions from which the response tokens are predicted.

    Args:
        model: a transformers model, sharded or not.
        batch: input_ids, attention_mask, response_mask on the model's device.
        head: what the model ends in.

    Returns:
        lm: logits (B, R, V) in the model's type. value: values (B, R), fp32 or wider.
    """
    # Nothing is predicted from the last token, so it need not be read.
    input_ids, mask = batch["input_ids"][:, :-1], batch["attention_mask"][:, :-1].long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    length = batch.response_length
    only_responses = {"logits_to_keep": length} if head == "lm" else {}
    output = model(
        input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False, **only_responses
    ).logits
    if head == "lm":
        return output
    values = output[:, -length:, 0]
    return values.to(torch.promote_types(values.dtype, torch.float32))
