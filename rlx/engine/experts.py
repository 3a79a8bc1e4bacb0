"""The experts of an engine's model: replay of the sampler's choice, the balance of their load, and how far choices differ.

Shape letters: N tokens of a micro-batch's forward, L decoder layers, E experts of a layer, K experts of a token.

Note [the balance of a mini-batch]: with f_e the tokens of expert e in all layers, over tokens times layers, and P_e the mean
probability of e, the loss is E * sum_e f_e P_e (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6; `load_balancing_loss_func` of
transformers). Both are those of the whole mini-batch, of its tokens without padding, on all processes. f_e has no gradient, so the
loss is a sum over tokens once f_e is known, and does not depend on the cut into micro-batches. The engine knows f_e from the experts
that are replayed, or from a forward without gradients before the others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.data.batch import EXPERTS
from rlx.engine.micro_batches import MicroBatch
from rlx.models.experts import ExpertRouting, Pass, differing_layers, expert_loads


@dataclass(frozen=True)
class ExpertOptions:
    """How an engine treats experts."""

    replays: bool = False  # whether forwards use the experts that rows bring instead of the routers' own choice
    balance: float = 0.0  # weight of the load-balancing loss in updates; 0: there is none


class Experts:
    """Gives experts to the routers of one model, micro-batch by micro-batch, and reads what they record.

    Raises RoutingError if the balance needs logits that a router does not show.
    """

    def __init__(self, routing: ExpertRouting, options: ExpertOptions, device: torch.device):
        self.routing, self.options, self._device = routing, options, device
        self._layers = len(routing.routers)
        self._load_share_E: Tensor | None = None  # f_e, while an update runs
        self._pairs = 1.0  # of token and layer, in the mini-batch
        if options.balance:
            routing.require_logits()

    def begin(self, part: MicroBatch) -> None:
        """Prepare the routers for the forward of a micro-batch, and its backward."""
        given = _given(part)
        weights = None if self._load_share_E is None else _weights(part)
        # An update needs no record, and its backward would keep it.
        records = not torch.is_grad_enabled()
        self.routing.now = Pass(given, given is not None and self.options.replays, weights, records)

    def differing(self) -> dict[str, Tensor]:
        """Return for each token the shares of layers with other experts than the sampler's, (N,); call it after the forward.

        `differing_experts` compares the choice of the routers, `differing_experts_used` the experts that the forward used. Empty
        without the sampler's experts, and in a forward with gradients.
        """
        now = self.routing.now
        assert now is not None
        now.is_open = False
        if now.given_NLK is None or not now.records:
            return {}
        compared = {"differing_experts": now.own, "differing_experts_used": now.used}
        return {name: differing_layers(experts, now.given_NLK) for name, experts in compared.items()}

    def end(self) -> None:
        """Detach from the routers; no backward will follow."""
        self.routing.now, self._load_share_E = None, None

    @torch.no_grad()
    def weigh(self, parts: Iterable[MicroBatch], forward: Callable[[MicroBatch], object]) -> None:
        """Find the load of the experts in a mini-batch, before its first backward; see Note [the balance of a mini-batch]."""
        if not self.options.balance:
            return
        experts = self.routing.experts
        loads = torch.zeros(experts + 1, dtype=torch.float64, device=self._device)  # the last: pairs of token and layer
        for part in parts:
            given, weights = _given(part), _weights(part)
            if given is not None and self.options.replays:
                used = {router.layer: given[:, router.layer] for router in self.routing.routers}
            else:
                forward(part)
                assert self.routing.now is not None
                used = self.routing.now.used
            loads[:-1] += expert_loads(used, weights, experts)
            loads[-1] += weights.sum() * self._layers
        dist.all_reduce(loads)
        self._pairs = max(1.0, float(loads[-1]))
        self._load_share_E = loads[:-1] / self._pairs

    def balance(self) -> Tensor | None:
        """Return the last forward's share of the mini-batch's load-balancing loss, a scalar with its graph; None without it."""
        now = self.routing.now
        if self._load_share_E is None or now is None:
            return None
        sums = torch.stack([now.probabilities[router.layer] for router in self.routing.routers]).sum(dim=0)
        now.probabilities = {}
        return self.routing.experts * (self._load_share_E.to(sums.dtype) * sums).sum() / self._pairs


def _given(part: MicroBatch) -> Tensor | None:
    if part.packed is not None:
        return part.packed.experts
    return part.batch[EXPERTS][:, :-1].flatten(0, 1) if EXPERTS in part.batch else None


def _weights(part: MicroBatch) -> Tensor:
    """Return how many rows hold each token, (N,) int64; rows do not count their last tokens, which predict nothing."""
    if part.packed is not None:
        assert part.packed.copies is not None, "expert balancing does not support processes that share rows"
        weights = part.packed.copies
    else:
        weights = part.batch["attention_mask"][:, 1:].flatten().long()
    return weights if part.rows else torch.zeros_like(weights)
