"""Turns in a mask, and estimates over them against loops and numbers by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms.advantages import ESTIMATORS, gae_over_turns, masked_whiten, turn_index
from rlx.config.schema import AlgorithmConfig

MASK = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 0, 0, 0], [0] * 8]).bool()


def test_turns_are_runs_of_the_mask():
    assert turn_index(MASK).tolist() == [[0, 0, -1, 1, -1, -1, 2, 2], [-1, -1, 0, 0, 0, -1, -1, -1], [-1] * 8]


@given(seed=st.integers(0, 9999), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_an_estimate_over_turns_like_the_loop(seed, gamma, lam):
    source = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 9, generator=source) < 0.6
    rewards, values = (torch.randn(3, 9, generator=source).double().masked_fill(~mask, torch.nan) for _ in range(2))
    advantages, returns = gae_over_turns(rewards, values, mask, gamma, lam)
    for row, index in enumerate(turn_index(mask).tolist()):
        advantage = value = 0.0
        for turn in reversed(range(max(index) + 1)):
            places = [place for place, own in enumerate(index) if own == turn]
            first = values[row, places[0]].item()
            delta = sum(rewards[row, place].item() for place in places) + gamma * value - first
            advantage, value = delta + gamma * lam * advantage, first
            assert advantages[row, places].tolist() == pytest.approx([advantage] * len(places))
            assert returns[row, places].tolist() == pytest.approx([advantage + first] * len(places))
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_a_key_chooses_the_step():
    rewards, values = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0))
    batch = {"token_rewards": rewards * MASK, "values": values, "response_mask": MASK, "group_id": torch.arange(3)}
    over_turns = AlgorithmConfig(gamma=0.5, lam=0.5, time_step="turn")
    found = ESTIMATORS["gae"](batch, over_turns)
    advantages, returns = gae_over_turns(batch["token_rewards"], values, MASK, 0.5, 0.5)
    assert torch.equal(found["advantages"], masked_whiten(advantages, MASK)) and torch.equal(found["returns"], returns)
    to_go = gae_over_turns(batch["token_rewards"], torch.zeros_like(values), MASK, 0.5, 1.0)[0]
    assert torch.equal(ESTIMATORS["reinforce_plus_plus"](batch, over_turns)["advantages"], masked_whiten(to_go, MASK))


def test_trajectories_whose_turns_earn_the_same_in_another_order_have_no_advantage():
    rewards = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.6, 0, 0]])
    batch = {"token_rewards": rewards, "response_mask": rewards >= 0, "group_id": torch.zeros(3)}
    assert not ESTIMATORS["grpo"](batch, AlgorithmConfig())["advantages"].any()
