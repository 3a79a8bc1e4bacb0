import pytest
import torch

from rlx.data.batch import Batch, BatchError, concat
from rlx.rollout.batching import generate_batch
from rlx.rollout.protocol import Request, Sampling

PAD = 0
SAMPLING = Sampling(max_tokens=8, stop_token_ids=(1, 2, 3, 4, 5))


@pytest.fixture
def batch(prompts):
    width = 10
    ids, mask = torch.zeros(len(prompts), width, dtype=torch.int64), torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = True
    tensors = {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "seed": torch.tensor([3, 2**62, 9, 4]),
        "group_id": torch.arange(4),
    }
    return Batch.of(tensors, {"ground_truth": ["a", "b", "c", "d"]})


def test_columns_hold_prompt_response_and_what_the_sampler_said(batch, prompts, make_model, make_rollout):
    rollout = make_rollout(make_model())
    out = generate_batch(rollout, batch, SAMPLING, PAD, response_length=12)
    completions = rollout.generate(
        [Request(p, s, SAMPLING) for p, s in zip(prompts, batch["seed"].tolist(), strict=True)]
    )
    assert out.response_length == 12 and "prompt_ids" not in out and "prompt_mask" not in out
    assert out.info == batch.info and torch.equal(out["group_id"], batch["group_id"])
    assert out["policy_version"].tolist() == [1] * 4
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        length = len(completion.token_ids)
        mask = out["attention_mask"][row]
        assert out["input_ids"][row][mask].tolist() == [*prompt, *completion.token_ids]
        assert out["input_ids"][row][~mask].eq(PAD).all()
        assert out["response_mask"][row].tolist() == [True] * length + [False] * (12 - length)
        assert torch.equal(mask[10:], out["response_mask"][row])
        assert out["rollout_log_probs"][row, :length].tolist() == pytest.approx(completion.log_probs)
        assert out["rollout_log_probs"][row, length:].eq(0).all()


def test_shares_of_a_batch_join_to_the_whole(batch, make_model, make_rollout):
    rollout = make_rollout(make_model())
    whole = generate_batch(rollout, batch, SAMPLING, PAD, 8)
    shares = [generate_batch(rollout, batch.rows(rows), SAMPLING, PAD, 8) for rows in ([0, 1, 2], [3], [])]
    joined = concat(shares)
    assert torch.equal(joined["input_ids"], whole["input_ids"])
    assert len(shares[2]) == 0 and shares[2].response_length == 8


def test_bad_input_is_named(batch, make_model, make_rollout):
    rollout = make_rollout(make_model())
    with pytest.raises(ValueError, match="max_tokens: got 8, expected at most 7"):
        generate_batch(rollout, batch, SAMPLING, PAD, 7)
    with pytest.raises(BatchError, match="seed"):
        generate_batch(rollout, batch.drop("seed"), SAMPLING, PAD, 8)
    hollow = batch.with_(prompt_mask=batch["prompt_mask"] & torch.tensor([[True], [True], [False], [True]]))
    with pytest.raises(BatchError, match="row 2 has an empty prompt"):
        generate_batch(rollout, hollow, SAMPLING, PAD, 8)
