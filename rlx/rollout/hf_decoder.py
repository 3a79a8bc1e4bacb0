"""Decode with a transformers model and a KV cache: all sequences of a batch grow by one token at a time.

Shape letters: B sequences being decoded, D distinct prompts, P prompt tokens (left padded), V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlx.models.experts import ExpertRouting, recorded
from rlx.rollout.kv_cache import growing_cache


class ForwardInputs(NamedTuple):
    """The arguments of a model's forward besides tokens and their mask.

    Args:
        cache: name of the argument for the cache.
        first_position: of a sequence; None: the model takes no positions.
        has_window: whether the model's masks follow its `sliding_window`; Moshi's do not, so its cache must keep all tokens.
    """

    cache: str
    first_position: int | None
    has_window: bool


class BatchDecoder:
    """The model, its KV cache and the next token's logits for a batch of sequences."""

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: ForwardInputs,
        prompts: list[tuple[int, ...]],
        max_tokens: int,
        device: torch.device,
        routing: ExpertRouting | None = None,
    ):
        self._model, self._inputs, self._routing = model, inputs, routing
        self.experts: Tensor | None = None  # of the tokens read last, (B, tokens, L, K)
        distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        width = max(len(prompt) for prompt in distinct)
        ids_DP = torch.zeros(len(distinct), width, dtype=torch.int64)
        mask_DT = torch.ones(len(distinct), width + max_tokens, dtype=torch.int64)
        for prompt, row in distinct.items():
            ids_DP[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_DT[row, : width - len(prompt)] = 0
        self._length = width
        self._mask_BT = mask_DT.to(device)
        self._positions_B1 = torch.tensor([[len(prompt) - 1] for prompt in distinct], device=device)
        self._cache = growing_cache(model.config, max_tokens, inputs.has_window)
        positions_DP = (mask_DT[:, :width].cumsum(dim=-1) - 1).clamp_(min=0)
        self._forward(ids_DP.to(device), positions_DP.to(device))
        self.keep(torch.tensor([distinct[prompt] for prompt in prompts], device=device))

    def _forward(self, ids: Tensor, positions: Tensor) -> None:
        cache, first, _ = self._inputs
        # State-space models that have a state read the mask as that of the new tokens.
        mask_BT = (
            None if cache == "cache_params" and ids.shape[1] == 1 < self._length else self._mask_BT[:, : self._length]
        )
        inputs = {
            "input_ids": ids,
            "attention_mask": mask_BT,
            cache: self._cache,
            **({} if first is None else {"position_ids": positions + first}),
        }

        def run() -> None:
            self.logits_BV = self._model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1]

        if self._routing is None:
            return run()
        layers = self._model.config.get_text_config().num_hidden_layers
        self.experts = recorded(self._routing, layers, run).unflatten(0, ids.shape)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows; a row may be named several times."""
        self._cache.reorder_cache(rows)
        self._mask_BT = self._mask_BT[rows]
        self._positions_B1 = self._positions_B1[rows]
        self.logits_BV = self.logits_BV[rows]
        self.experts = None if self.experts is None else self.experts[rows]

    def feed(self, tokens_B: Tensor) -> None:
        """Append one token to each sequence and compute the logits of the next."""
        self._length += 1
        self._positions_B1 = self._positions_B1 + 1
        self._forward(tokens_B[:, None], self._positions_B1)
