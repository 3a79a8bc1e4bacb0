"""All estimators together: what the registry hands them, and what their gradients are in expectation."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algorithms.advantages import ESTIMATORS, token_rewards
from rlx.config.schema import ADV_ESTIMATORS, CRITIC, GAMMA, GREEDY, GROUPS, LAM, NORM_BY_STD, AlgorithmConfig

F64 = torch.float64


def columns(rows=6):
    """A batch of pairs, as the driver has it, and the options that estimators read."""
    mask = torch.arange(3) < torch.tensor([3, 2, 1, 3, 2, 1])[:rows, None]
    source = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(rows, 3, generator=source) for name in ("token_rewards", "values")}
    greedy = torch.randn(rows // 2, generator=source).repeat_interleave(2)
    return {**noise, "response_mask": mask, "group_id": torch.arange(rows) // 2, "greedy_scores": greedy}


def test_every_estimator_of_the_configuration_is_there_and_reads_what_it_says():
    assert ESTIMATORS.keys() == ADV_ESTIMATORS.keys()
    columns_of = {CRITIC: "values", GREEDY: "greedy_scores"}
    for name, estimator in ESTIMATORS.items():
        assert estimator.reads == tuple(columns_of[need] for need in ADV_ESTIMATORS[name] if need in columns_of)
    optional = {"values": CRITIC, "group_id": GROUPS, "greedy_scores": GREEDY}
    changed = {GAMMA: 0.5, LAM: 0.5, NORM_BY_STD: False}
    for name, estimate in ESTIMATORS.items():
        batch, needs = columns(), ADV_ESTIMATORS[name]
        for column, need in optional.items():
            if need not in needs:
                del batch[column]
        result = estimate(batch, AlgorithmConfig())
        assert result.keys() == ({"advantages", "returns"} if CRITIC in needs else {"advantages"})
        assert all(x.shape == (6, 3) and not x[~batch["response_mask"]].any() for x in result.values())
        assert result["advantages"].any()
        for key, value in changed.items():
            other = estimate(batch, replace(AlgorithmConfig(), **{key: value}))["advantages"]
            assert torch.equal(other, result["advantages"]) != (key in needs), (name, key)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("gae", "remax")])
@pytest.mark.parametrize("score", [0.0, 0.1, -1e8, 1e30])
def test_equal_rewards_teach_exactly_nothing(name, score):
    """Neither as groups nor, where an estimator knows no groups, as a batch; rows of one token, where all rewards count."""
    batch = columns()
    batch["response_mask"] = torch.tensor([[True, False, False]]).expand(6, 3)
    batch["token_rewards"] = token_rewards(torch.full((6,), score), batch["response_mask"])
    assert not ESTIMATORS[name](batch, AlgorithmConfig())["advantages"].any()


@pytest.mark.parametrize("name", [name for name, needs in ADV_ESTIMATORS.items() if GROUPS in needs])
def test_a_row_whose_environment_failed_at_once_leaves_its_group_as_it_is(name):
    batch = columns()
    batch["response_mask"][3] = False  # beside row 2, whose token rewards stay
    found = ESTIMATORS[name](batch, AlgorithmConfig())["advantages"]
    rest = [0, 1, 2, 4, 5]
    without = {column: x[rest] for column, x in batch.items()}
    assert torch.equal(found[rest], ESTIMATORS[name](without, AlgorithmConfig())["advantages"]) and not found[3].any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_group_of_one_and_rows_without_a_token_are_harmless(name):
    batch = {key: column[:3].clone() for key, column in columns().items()}
    batch["response_mask"][0] = False
    advantages = ESTIMATORS[name](batch, AlgorithmConfig())["advantages"]
    assert advantages.isfinite().all() and not advantages[0].any()
    if GROUPS in ADV_ESTIMATORS[name] and name != "reinforce_plus_plus_baseline":
        assert not advantages[2].any(), "a group of one is compared with nothing"


# -------------------------------------------------------------- what the gradient is in expectation, by enumeration

REWARDS = torch.tensor([0.0, 1.0, 0.3], dtype=F64)


def expected_gradient(name, samples, logits, best_of_all=False, **options):
    """Over all that a softmax policy of one token can draw: the mean of sum A_i grad log p, and the gradient of what is wanted.

    What is wanted is the mean reward of a sample, times `samples`, or the mean of the best one's.
    """
    logits = logits.clone().requires_grad_()
    log_probs = logits.log_softmax(0)
    mask, group = torch.ones(samples, 1, dtype=torch.bool), torch.zeros(samples, dtype=torch.int64)
    surrogate, wanted = 0.0, 0.0
    for drawn in product(range(3), repeat=samples):
        chosen = torch.tensor(drawn)
        rewards = REWARDS[chosen]
        batch = {"token_rewards": rewards[:, None], "response_mask": mask, "group_id": group}
        batch["greedy_scores"] = REWARDS[logits.argmax()].expand(samples)
        advantages = ESTIMATORS[name](batch, AlgorithmConfig(**options))["advantages"][:, 0]
        chance = log_probs[chosen].sum().exp()
        surrogate = surrogate + chance.detach() * (advantages * log_probs[chosen]).sum()
        wanted = wanted + chance * (rewards.max() if best_of_all else rewards.sum())
    return [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (surrogate, wanted)]


@pytest.mark.parametrize(
    ("name", "samples", "factor", "options"),
    [
        ("rloo", 3, 1.0, {}),
        ("remax", 2, 1.0, {}),
        ("remax", 1, 1.0, {}),
        ("grpo", 3, 2 / 3, {"norm_adv_by_std_in_grpo": False}),
        ("opo", 3, 2 / 3, {}),  # with equal lengths the mean, of which the sample itself is a part
    ],
)
@settings(max_examples=25)
@given(logits=st.lists(st.floats(-2, 2), min_size=3, max_size=3))
def test_the_expected_gradient_is_that_of_the_reward(name, samples, factor, options, logits):
    gradient, wanted = expected_gradient(name, samples, torch.tensor(logits, dtype=F64), **options)
    assert torch.allclose(gradient, factor * wanted, rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(logits=st.lists(st.floats(-2, 2), min_size=3, max_size=3), samples=st.integers(2, 4))
def test_the_expected_gradient_of_passk_is_that_of_the_best_reward(logits, samples):
    tensor = torch.tensor(logits, dtype=F64)
    gradient, wanted = expected_gradient("grpo_passk", samples, tensor, True, norm_adv_by_std_in_grpo=False)
    assert torch.allclose(gradient, wanted, rtol=0, atol=1e-12)
