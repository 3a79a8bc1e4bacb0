"""Requests that are broken again and again, and go on from the tokens that they have."""

from dataclasses import replace

from rlx.rollout.protocol import Kept, Request, Rollout


def in_rounds(rollout: Rollout, requests: list[Request], budget: int) -> list[Kept]:
    """Completes requests by `budget` tokens a round, in another order and batch each time."""
    kept = [Kept()] * len(requests)
    while left := [index for index, own in enumerate(kept) if not own.is_finished][::-1]:
        asked = [
            replace(
                requests[index],
                prompt_ids=(*requests[index].prompt_ids, *kept[index].token_ids),
                kept=len(kept[index].token_ids),
                budget=budget + index % 2,
            )
            for index in left
        ]
        for index, more in zip(left, rollout.generate(asked), strict=True):
            kept[index] = kept[index].continued(more, 0)
    return kept
