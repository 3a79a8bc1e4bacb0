"""Compare an engine that replays experts with transformers alone, whose routers take the same experts, row by row."""

import torch
from torch import Tensor

from benchmarks.sweep.reference import TOLERANCE, Expected, expected, logits_of, policy_objective
from benchmarks.sweep.trainer import TinyModel, compared, engine, refusals
from rlx.engine.experts import ExpertOptions
from rlx.models.experts import ExpertRouting, Pass, recorded


def replay_error(made: TinyModel) -> tuple[float | None, str]:
    """Return the error of log-probs, entropies and an update with experts of other tokens; None for a model without experts.

    Raises:
        AssertionError: the reference's log-probs are those of the routers' own choice, so that its experts were not replaced.
    """
    plain = made.model("lm")
    if not any(name.endswith(".experts") for name, _ in plain.named_modules()):
        return None, "no experts"
    with refusals():
        routing = ExpertRouting(plain, lambda: logits_of(plain, torch.arange(5)), tokens=5)
    layers = plain.config.get_text_config().num_hidden_layers
    batch, given = made.batch, []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        own = ids[mask]
        with torch.no_grad():
            chosen = recorded(routing, layers, lambda own=own: logits_of(plain, own))
        given.append(chosen.roll(1, dims=0))  # a choice that the router may make, but not for this token
    experts = torch.zeros(*batch["input_ids"].shape, *given[0].shape[1:], dtype=given[0].dtype)
    experts[batch["attention_mask"]] = torch.cat(given)
    batch, objective = batch.with_(routed_experts=experts), policy_objective("R3")
    waiting = iter(given)

    def replay(*_: object) -> None:
        routing.now = Pass(next(waiting), replays=True)

    plain.register_forward_pre_hook(replay)
    wanted = expected(plain, batch, objective)
    effect = float((wanted.figures["log_probs"] - made.policy.figures["log_probs"]).abs().max())
    # The engine has the reference's hooks, so agreement alone would not show that either replaces anything.
    assert effect > TOLERANCE or routing.chosen == routing.experts, (
        f"other experts change log-probs by {effect:.0e} only"
    )
    used: dict[str, Tensor] = {"differing_experts_used": torch.zeros_like(wanted.figures["log_probs"])}
    trained = engine(made, experts=ExpertOptions(replays=True))
    return compared(trained, batch, Expected(wanted.figures | used, wanted.gradients), objective)
