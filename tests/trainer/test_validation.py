"""What validation reports and keeps."""

import json
import math
from itertools import combinations
from statistics import mean, stdev

import pytest
import torch
from run_tools import responses

from rlx.rewards.manager import Scores
from rlx.trainer import samples, validation
from rlx.trainer.samples import join


def part(prompt_width, rows, source, scores, extra):
    names = ("prompt_text", "response_text", "ground_truth")
    info = {name: [f"{name}{i}" for i in range(rows)] for name in names} | {"data_source": [source] * rows}
    return responses([3] * rows, prompt_width, 3, info), Scores(torch.tensor(scores), extra)


def test_parts_of_different_width_and_numbers_are_joined_and_summarised_by_source():
    parts = [part(5, 2, "a", [1.0, 0.0], {}), part(7, 1, "b", [1.0], {"steps": [4.0]})]
    batch, scores = join(parts)
    metrics = validation.summarise(batch, scores)
    assert metrics["val/accuracy"] == pytest.approx(2 / 3)
    assert metrics["val/accuracy/a"] == 0.5 and metrics["val/accuracy/b"] == 1.0
    assert metrics["val/extra/steps"] == 4.0 and math.isnan(scores.extra["steps"][0])
    assert metrics["val/response_length"] == 3.0


def test_a_number_of_the_reward_functions_hides_none_of_ours():
    batch, scores = part(5, 2, "a", [1.0, 0.0], {"accuracy": [7.0, 7.0], "reward": [8.0, 8.0], "score": [9.0, 9.0]})
    metrics = validation.summarise(batch, scores)
    assert metrics["val/accuracy"] == metrics["val/reward"] == 0.5
    assert metrics["val/extra/accuracy"] == 7.0 and metrics["val/extra/reward"] == 8.0
    assert [record["score"] for record in samples.generations(batch, scores)] == [1.0, 0.0]


def test_generations_are_dumped_one_a_line_and_a_missing_number_as_null(tmp_path):
    batch, scores = part(5, 2, "a", [1.0, 0.0], {"steps": [math.nan, 5.0]})
    samples.dump(samples.generations(batch, scores), tmp_path / "new", "7")
    lines = [json.loads(line) for line in (tmp_path / "new/7.jsonl").read_text().splitlines()]
    assert [(line["score"], line["steps"]) for line in lines] == [(1.0, None), (0.0, 5.0)]
    assert lines[1]["response"] == "response_text1" and "NaN" not in (tmp_path / "new/7.jsonl").read_text()


def test_several_samples_by_hand():
    """Source a: prompts with scores 0 0 1 3 and 1 1 1 1; source b, whose function reports acc: 0 2 0 0 with acc 1 0 0 0."""
    parts = [
        part(5, 8, "a", [0.0, 0.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0], {}),
        part(5, 4, "b", [0.0, 2.0, 0.0, 0.0], {"acc": [1.0, 0.0, 0.0, 0.0]}),
    ]
    expected = {
        # Of the six pairs of 0 0 1 3 the best are 0 1 3 1 3 3: 11/6. Deviations: (0 0 1 3) of mean 1 has variance 6/4.
        "val-core/a/reward/mean@4": 1.0,
        "val-core/a/reward/best@4/mean": (3 + 1) / 2,
        "val-aux/a/reward/best@2/mean": (11 / 6 + 1) / 2,
        "val-aux/a/reward/std@4": math.sqrt(1.5) / 2,
        # Right are the scores of 1 or more: 0 0 1 1, of whose six pairs five hold a right one.
        "val-aux/a/acc/mean@4": 0.75,
        "val-aux/a/acc/best@4/mean": 1.0,
        "val-aux/a/acc/best@2/mean": (5 / 6 + 1) / 2,
        "val-aux/a/acc/std@4": 0.25,
        "val-core/b/acc/mean@4": 0.25,
        "val-core/b/acc/best@4/mean": 1.0,
        "val-aux/b/acc/best@2/mean": 0.5,
        "val-aux/b/acc/std@4": math.sqrt(3) / 4,
        "val-aux/b/reward/mean@4": 0.5,
        "val-aux/b/reward/best@4/mean": 2.0,
        "val-aux/b/reward/best@2/mean": 1.0,
        "val-aux/b/reward/std@4": math.sqrt(3) / 2,
    }
    assert validation.over_samples(*join(parts), 4) == pytest.approx(expected)
    assert validation.over_samples(*join(parts), 1) == {}, "one sample of each prompt"


def test_estimates_by_hand():
    """Right of 4 samples: 0 0 1 1 and 1 1 1 1 of source a; 1 0 0 0 of b. pass@2 of c right ones is 1 - C(4 - c, 2) / C(4, 2)."""
    parts = [part(5, 8, "a", [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], {}), part(5, 4, "b", [1.0, 0.0, 0.0, 0.0], {})]
    found = {(row.data_source, row.name): row for row in validation.estimates(*join(parts), 4)}
    expected = {("a", "avg@4"): (0.5, 1.0), ("a", "pass@2"): (5 / 6, 1.0), ("a", "pass@4"): (1.0, 1.0)}
    expected |= {("all", "avg@4"): (0.5, 1.0, 0.25), ("all", "pass@2"): (5 / 6, 1.0, 0.5)}
    for key, values in expected.items():
        half = 1.96 * stdev(values) / math.sqrt(len(values))
        assert found[key][2:] == pytest.approx((mean(values), mean(values) - half, mean(values) + half, len(values)))
    assert found["b", "avg@4"].value == 0.25 and math.isnan(found["b", "avg@4"].low), "one prompt shows no spread"
    (best,) = [
        row for row in validation.estimates(*part(5, 2, "a", [0.0] * 2, {"acc": [0.5, 0.25]}), 2) if "best" in row.name
    ]
    assert (best.name, best.value) == ("best@2", 0.5), "an accuracy between 0 and 1 is not passed or failed"


def test_finished_parts_of_an_evaluation_are_kept_even_if_a_kill_tore_the_last_line(tmp_path):
    parts = [part(5, 2, "a", [0.1, 0.0], {}), part(7, 1, "b", [1.0], {"steps": [4.0]})]
    file = validation.PartsFile(tmp_path / "parts")
    for first, each in zip((2, 0), parts, strict=True):
        file.add(first, *each)
    batch, scores = file.joined()
    with (tmp_path / "parts").open("a") as opened:
        opened.write('[4, {"lengths": [3')
    again, scores_again = validation.PartsFile(tmp_path / "parts").joined()
    validation.PartsFile(tmp_path / "parts").add(6, *parts[0])
    assert [*validation.PartsFile(tmp_path / "parts").found] == [2, 0, 6], "the torn line takes no other one with it"
    expected = samples.generations(*join(parts[::-1]))
    assert samples.generations(batch, scores) == samples.generations(again, scores_again) == expected
    assert validation.summarise(again, scores_again) == validation.summarise(*join(parts[::-1]))


@pytest.mark.parametrize(("samples", "sizes"), [(2, {2}), (3, {2, 3}), (8, {2, 4, 8}), (12, {2, 4, 8, 12})])
def test_the_best_is_of_powers_of_two_and_of_all(samples, sizes):
    metrics = validation.over_samples(*part(5, samples, "a", [1.0] * samples, {}), samples)
    assert {name for name in metrics if "/reward/best" in name} == {
        f"val-{'core' if k == samples else 'aux'}/a/reward/best@{k}/mean" for k in sizes
    }
    assert f"val-core/a/reward/mean@{samples}" in metrics and f"val-aux/a/acc/std@{samples}" in metrics


@pytest.mark.parametrize("k", range(1, 6))
def test_the_best_of_k_is_the_mean_over_all_choices(k):
    values_PN = torch.tensor([[0.5, -2.0, 0.5, 3.0, 1.0], [0.0, 1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    expected = [sum(best) / len(best) for row in values_PN.tolist() for best in [[*map(max, combinations(row, k))]]]
    assert validation.best_of(values_PN, k).tolist() == pytest.approx(expected, abs=1e-15)
    right, of, among = 2, 5, math.comb
    assert validation.best_of(values_PN, k)[1].item() == pytest.approx(1 - among(of - right, k) / among(of, k))
