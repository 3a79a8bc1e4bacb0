"""A reward model under the engine says what transformers says of each sequence alone."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlx.data.batch import Batch


@pytest.fixture(scope="module")
def reward_folder(model_folder, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("reward")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def alone(folder: str, batch: Batch) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return torch.stack([model(input_ids=ids[mask][None]).logits[0, 0] for ids, mask in rows])


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_scores_are_those_of_each_sequence_alone(strategy, reward_folder, one_rank, two_ranks):
    (batch,) = one_rank("scores", "make_batch")
    want = alone(reward_folder, batch)
    assert want.std() > 1e-3
    for ranks, shares in ((one_rank, (8,)), (two_ranks, (5, 3)), (two_ranks, (0, 8))):
        for found in zip(*ranks("scores", "scores", reward_folder, strategy, shares), strict=True):
            torch.testing.assert_close(torch.cat(found), want, rtol=1e-10, atol=1e-10)
