"""What validation reports and keeps."""

import json
import math

import pytest
import torch

from rlx.data.batch import Batch
from rlx.rewards.manager import Scores
from rlx.trainer import validation
from rlx.trainer.draw import join


def part(prompt_width, rows, source, scores, extra):
    mask = torch.ones(rows, 3, dtype=torch.bool)
    tensors = {
        "input_ids": torch.zeros(rows, prompt_width + 3, dtype=torch.int64),
        "attention_mask": torch.ones(rows, prompt_width + 3, dtype=torch.bool),
        "response_mask": mask,
    }
    names = ("prompt_text", "response_text", "ground_truth")
    info = {name: [f"{name}{i}" for i in range(rows)] for name in names} | {"data_source": [source] * rows}
    return Batch.of(tensors, info), Scores(torch.tensor(scores), extra)


def test_chunks_cover_every_row_once():
    assert list(validation.chunks(5, 2)) == [[0, 1], [2, 3], [4]]
    assert list(validation.chunks(3, None)) == [[0, 1, 2]]
    assert list(validation.chunks(0, None)) == []


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
    assert [record["score"] for record in validation.generations(batch, scores)] == [1.0, 0.0]


def test_a_missing_number_is_dumped_as_null(tmp_path):
    batch, scores = part(5, 2, "a", [1.0, 0.0], {"steps": [math.nan, 5.0]})
    validation.dump(validation.generations(batch, scores), tmp_path, 7)
    text = (tmp_path / "7.jsonl").read_text()
    assert "NaN" not in text and [json.loads(line)["steps"] for line in text.splitlines()] == [None, 5.0]


def test_generations_are_dumped_one_a_line(tmp_path):
    batch, scores = part(5, 2, "a", [1.0, 0.0], {"steps": [4.0, 5.0]})
    validation.dump(validation.generations(batch, scores), tmp_path / "new", 7)
    lines = [json.loads(line) for line in (tmp_path / "new/7.jsonl").read_text().splitlines()]
    assert [line["score"] for line in lines] == [1.0, 0.0]
    assert lines[1]["response"] == "response_text1" and lines[1]["steps"] == 5.0
