"""One micro-batch through a model, from tokens to what concerns the responses.

Shape letters: B rows, W columns of the window that holds the responses.
"""

import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from rlx.data.batch import Batch
from rlx.models.log_probs import head_replaced, token_log_probs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Head = Literal["lm", "value"]

logger = logging.getLogger(__name__)


class Distribution(NamedTuple):
    """How next-token distributions are read: at which temperature, and whether for their entropy too."""

    temperature: float
    with_entropy: bool


class Forward:
    """A model's forward pass over one micro-batch.

    Args:
        root: what is called: the model, sharded or not.
        plain: the model inside it.
    """

    def __init__(self, root: nn.Module, plain: "PreTrainedModel"):
        self._root, self._plain = root, plain
        self._reads_logits: bool | None = None  # found out by the first call

    def __call__(self, batch: Batch, distribution: Distribution | None) -> dict[str, Tensor]:
        """What the model says at the positions from which the tokens of the window are predicted.

        Args:
            batch: laid out as Note [rows start at column 0] of micro_batch.py says, on the model's device.
            distribution: of a language model; None for a value model.

        Returns:
            log_probs of the window's tokens and, if asked for, entropy; of a value model values. All (B, W), fp32 or wider.
        """
        # Nothing is predicted from the last token, so it need not be read.
        inputs, window = {"input_ids": batch["input_ids"][:, :-1]}, batch.response_length
        if distribution is None:
            values = self._call(inputs)[:, -window:, 0]
            return {"values": values.to(torch.promote_types(values.dtype, torch.float32))}
        return self._log_probs(inputs | {"logits_to_keep": window}, batch.responses(), distribution)

    def _call(self, inputs: dict[str, Any]) -> Tensor:
        output: Tensor = self._root(**inputs, use_cache=False).logits
        return output

    def _log_probs(self, inputs: dict[str, Any], ids: Tensor, distribution: Distribution) -> dict[str, Tensor]:
        if self._reads_logits is None:
            self._reads_logits = self._must_read_logits(inputs["input_ids"].device)
        if self._reads_logits:
            figures = token_log_probs(self._call(inputs), ids, *distribution)
        else:
            with head_replaced(self._plain.get_output_embeddings(), ids, *distribution):
                figures = self._call(inputs).unbind(dim=-1)
        return {name: x for name, x in zip(("log_probs", "entropy"), figures, strict=False) if x is not None}

    def _must_read_logits(self, device: torch.device) -> bool:
        """Whether log-probs have to be taken from logits; no if these are what a linear head gives, as it gives it."""
        head = self._plain.get_output_embeddings()
        reason = None
        if type(head) is not nn.Linear or head.bias is not None:
            reason = f"its head is {head}"
        elif not self._gives_what_its_head_gives(head, device):
            reason = "it goes on computing with what its head gives"
        if reason is not None:
            logger.info("%s: log-probs are taken from logits, since %s", type(self._plain).__name__, reason)
        return reason is not None

    @torch.no_grad()
    def _gives_what_its_head_gives(self, head: nn.Linear, device: torch.device) -> bool:
        tokens, given = torch.zeros(1, 2, dtype=torch.int64, device=device), []
        with (
            torch.compiler.set_stance("force_eager"),
            head_replaced(head, tokens, 1.0, with_entropy=False),
        ):
            hook = head.register_forward_hook(lambda module, inputs, output: given.append(output))
            try:
                output = self._call({"input_ids": tokens})
            finally:
                hook.remove()
        return len(given) == 1 and output is given[0]
