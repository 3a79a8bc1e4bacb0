"""Draw tokens by seed and position in vLLM's first model runner, as the hf sampler does. This file imports no vLLM.

That runner has a generator for each request with a seed, so one that goes on from kept tokens would draw the first numbers again. The
second runner hashes seed and position by itself.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlx.rollout.hf_decoder import choose_tokens, request_uniforms
from rlx.rollout.protocol import Request, Sampling

REQUEST = "rlx_request"  # the key of `SamplingParams.extra_args`
ROWS = 64  # worked on at once: with 152,000 tokens each array in fp64 takes 78 MB


class _Row(NamedTuple):
    uniforms: np.ndarray  # a number in [0, 1) for each token
    cuts: Sampling
    said: list[int]  # vLLM appends each token, or a placeholder for one that is still on the device


class DrawsByPosition:
    """A `LogitsProcessor` of vLLM that chooses the tokens of requests with `Sampling.by_position`, so that vLLM has one choice left.

    It runs after penalties, temperature and min_p, and applies top_k and top_p itself. `hand_over` takes these two from vLLM.

    Args:
        follow: vLLM's `process_dict_updates`, which moves the entries of a dict as the rows of a batch move.
    """

    def __init__(self, follow: Callable[..., Any]) -> None:
        self._follow, self._rows = follow, dict[int, _Row]()

    def update_state(self, batch_update: Any) -> None:
        """See vLLM: rows of the batch come, go and move."""
        self._follow(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """Leave the chosen token of each row a logit of 0 and all others -inf."""
        kinds: dict[Sampling, list[int]] = {}
        for index, row in self._rows.items():
            kinds.setdefault(row.cuts, []).append(index)
        for cuts, rows in kinds.items():
            for some in (rows[start : start + ROWS] for start in range(0, len(rows), ROWS)):
                uniforms = [self._rows[at].uniforms[len(self._rows[at].said)] for at in some]
                index = torch.tensor(some, device=logits.device)
                place = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
                tokens, _ = choose_tokens(logits[index], place, cuts)
                logits[index] = -torch.inf
                logits[index, tokens] = 0
        return logits


def hand_over(params: Any, request: Request) -> None:
    """Let `DrawsByPosition` draw for a request in place of vLLM."""
    params.extra_args = {REQUEST: request}
    params.seed, params.top_k, params.top_p = None, 0, 1.0


def _row(params: Any, prompt: list[int] | None, said: list[int]) -> _Row | None:
    request = (params.extra_args or {}).get(REQUEST)
    if request is None or not request.sampling.temperature:
        return None
    uniforms = request_uniforms([request.seed], request.room, [request.kept])[0].numpy()
    return _Row(uniforms, _cuts(request.sampling), said)


@lru_cache(maxsize=256)
def _cuts(sampling: Sampling) -> Sampling:
    """Return top_k and top_p alone."""
    return Sampling(1, top_p=sampling.top_p, top_k=sampling.top_k)
