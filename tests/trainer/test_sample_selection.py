"""Which samples a step learns from, against counts made by hand."""

import math

import pytest
import torch
from run_tools import responses

from rlx.rewards.manager import Scores
from rlx.trainer import samples as sample_selection


def part(values, prompts=2, width=3, first=0, lengths=None, **extra):
    """Samples of `prompts` prompts with these scores, and what the reward functions report beside them."""
    rows, scores = len(values), Scores(torch.tensor(values), extra)
    info, group_id = {"response_text": list(map(str, values))}, first + torch.arange(rows) // (rows // prompts)
    return responses(lengths or [2] * rows, width, 4, info, group_id=group_id, scores=scores.scores), scores


def test_prompts_are_kept_whose_samples_differ():
    batch, scores = part([1.0, 1.0, 0.0, 1.0, 0.2, 0.0], prompts=3, steps=[1.0, 2.0, 1.0, 1.0, math.nan, 3.0])
    assert sample_selection.informative(batch, scores, "acc") == [2, 3], "0.2 and 0 are both wrong"
    assert sample_selection.informative(batch, scores, "score") == [2, 3, 4, 5]
    assert sample_selection.informative(batch, scores, "steps") == [0, 1], (
        "a sample that lacks the number differs from none"
    )
    punished = batch.with_(scores=torch.tensor([1.0, 0.9, 0.5, 0.5, 0.0, 0.0]))
    for metric in ("seq_reward", "seq_final_reward"):
        assert sample_selection.informative(punished, scores, metric) == [0, 1]
    mixed = [3, 0, 5, 1, 2, 4]
    assert sample_selection.informative(*sample_selection.take_rows((batch, scores), mixed), "acc") == [0, 4], (
        "rows may stand in any order"
    )


def test_a_sample_without_a_response_makes_no_prompt_informative():
    """Its environment failed before the first turn, so it has no advantage, and the three others have equal scores."""
    batch, scores = part([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0], lengths=[2, 2, 2, 0, 2, 2, 2, 0])
    for metric in ("acc", "score", "seq_reward"):
        assert sample_selection.informative(batch, scores, metric) == [4, 5, 6, 7]


def test_the_reward_functions_own_accuracy_counts():
    batch, scores = part([0.7, 0.8], prompts=1, acc=[0.0, 1.0])
    assert sample_selection.informative(batch, scores, "acc") == [0, 1]


def test_a_number_that_nobody_reports_is_an_error_that_names_those_there_are():
    with pytest.raises(
        sample_selection.SelectionError, match=r"metric: got 'f1', .* acc, score, seq_reward, seq_final_reward, steps"
    ):
        sample_selection.informative(*part([1.0, 0.0], prompts=1, steps=[1.0, 2.0]), "f1")


def test_parts_of_other_widths_are_joined_and_what_one_lacks_is_no_number():
    narrow, wide = part([1.0, 0.0], prompts=1, width=2, acc=[1.0, 0.0]), part([0.5, 0.25], prompts=1, width=5, first=1)
    batch, scores = sample_selection.join([narrow, wide])
    assert batch["input_ids"].shape == (4, 9) and batch["group_id"].tolist() == [0, 0, 1, 1]
    assert batch["attention_mask"].sum(dim=1).tolist() == [4, 4, 7, 7]
    assert not batch["attention_mask"][:2, :3].any() and batch["attention_mask"][2:, :3].all()
    assert scores.scores.tolist() == [1.0, 0.0, 0.5, 0.25] and batch.info["response_text"][2] == "0.5"
    assert scores.extra["acc"][:2] == [1.0, 0.0] and all(math.isnan(value) for value in scores.extra["acc"][2:])


def test_what_was_found_is_counted_and_cut_to_what_is_wanted():
    found = sample_selection.DynamicSampling("acc", wanted=2, samples=2)
    found.add(*part([1.0, 1.0, 0.0, 1.0]))
    assert (found.generations, found.prompts, found.kept) == (1, 2, 1)
    found.add(*part([0.0, 0.0, 0.0, 0.0], first=2))
    found.add(*part([1.0, 0.0, 0.0, 1.0], first=4, width=5))
    assert found.kept == 3
    batch, scores = found.samples()
    assert batch["group_id"].tolist() == [1, 1, 4, 4], "what is too many is dropped"
    assert scores.scores.tolist() == [0.0, 1.0, 1.0, 0.0]
    numbers = {"generations": 3.0, "kept_share": 0.5, "accuracy": 5 / 12}
    assert found.metrics() == {f"filter_groups/{name}": pytest.approx(value) for name, value in numbers.items()}
    message = str(found.error(step=7))
    assert "step 7: algorithm.filter_groups kept 3 of 6 prompts" in message and "after 3 generations. 41.7%" in message


def test_recorded_experts_are_widened_with_the_prompts():
    parts = []
    for width in (2, 5):
        batch, scores = part([1.0, 0.0], prompts=1, width=width)
        experts = torch.arange(2 * (width + 4) * 3 * 2).remainder(200).to(torch.uint8).reshape(2, width + 4, 3, 2)
        parts.append((batch.with_(routed_experts=experts), scores))
    experts = sample_selection.join(parts)[0]["routed_experts"]
    assert not experts[:2, :3].any() and torch.equal(experts[:2, 3:], parts[0][0]["routed_experts"])
    assert torch.equal(experts[2:], parts[1][0]["routed_experts"])
