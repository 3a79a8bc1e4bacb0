"""What a worker does with its sampler: build it, complete a batch, notice weights that did not arrive."""

from dataclasses import replace

import pytest
import torch

from rlx.config.schema import LoraConfig, ModelConfig, RolloutConfig
from rlx.data.batch import Batch, BatchError, concat
from rlx.models.loading import load_model
from rlx.models.lora import adapter_weights, add_lora
from rlx.rollout.protocol import SAMPLED_PER_TENSOR, Kept, Request, Sampling, evenly_spaced, on_cpu
from rlx.rollout.sampler import (
    ChangeCheck,
    StaleSamplerError,
    build_rollout,
    continue_batch,
    generate_batch,
    samples_of,
)

PAD = 0
SAMPLING = Sampling(max_tokens=8, stop_token_ids=(1, 2, 3, 4, 5))


@pytest.fixture
def folder(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("lora", "dtype"), [(LoraConfig(), "fp32"), (LoraConfig(use_dora=True), "bf16")], ids=["LoRA", "DoRA"]
)
def test_hf_keeps_the_base_and_takes_adapters(folder, lora, dtype):
    model = ModelConfig(path=folder, lora_rank=2, lora=lora)
    rollout = build_rollout(RolloutConfig(name="hf", dtype=dtype), model, torch.device("cpu"), 64)
    assert rollout.version is None
    own = load_model(model, "lm", torch.float32)
    add_lora(own, model)
    for parameter in (p for name, p in own.named_parameters() if "lora_B" in name):
        torch.nn.init.normal_(parameter, std=0.3)
    sent = dict(adapter_weights(dict(own.named_parameters())))
    rollout.update_weights(sent.items(), version=3)
    request = Request((3, 4, 5), 0, Sampling(8, temperature=0.0))
    (completion,) = rollout.generate([request])
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        log_probs = own(input_ids=ids).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
    assert completion.log_probs == pytest.approx(log_probs.tolist(), abs=1e-4 if dtype == "fp32" else 0.2)
    first = next(iter(sent))
    with pytest.raises(ValueError, match=r"1 of .* weights did not arrive"):
        rollout.update_weights([pair for pair in sent.items() if pair[0] != first], version=4)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*got a name that"):
        rollout.update_weights([("model.norm.weight", torch.zeros(64))], version=4)


def test_override_config_reaches_the_sampler(folder, make_model):
    model = ModelConfig(path=folder, override_config={"num_hidden_layers": 1})
    rollout = build_rollout(RolloutConfig(name="hf"), model, torch.device("cpu"), 64)
    with pytest.raises(ValueError, match=r"layers\.1.*got a name that"):
        rollout.update_weights(make_model().state_dict().items(), version=0)
    wrong = ModelConfig(path=folder, override_config={"hidden_sizes": 1})
    with pytest.raises(ValueError, match=r"override_config\.hidden_sizes"):
        build_rollout(RolloutConfig(name="hf"), wrong, torch.device("cpu"), 64)


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
    assert torch.equal(out["policy_versions"], out["response_mask"].int())
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        length = len(completion.token_ids)
        mask = out["attention_mask"][row]
        assert out["input_ids"][row][mask].tolist() == [*prompt, *completion.token_ids]
        assert out["input_ids"][row][~mask].eq(PAD).all()
        assert out["response_mask"][row].tolist() == [True] * length + [False] * (12 - length)
        assert torch.equal(mask[10:], out["response_mask"][row])
        assert out["rollout_log_probs"][row, :length].tolist() == pytest.approx(completion.log_probs)
        assert out["rollout_log_probs"][row, length:].eq(0).all()


@pytest.mark.parametrize("sampled", [SAMPLING, replace(SAMPLING, temperature=0.0)], ids=["sampled", "greedy"])
def test_rounds_of_a_budget_give_the_unbroken_responses(sampled, batch, make_model, make_rollout):
    model = make_model()
    rollout = make_rollout(model, max_num_seqs=3)
    whole = generate_batch(rollout, batch, sampled, PAD, 12)
    rows, versions = batch.with_({"kept": [Kept()] * len(batch)}, budget=torch.tensor([3, 3, 2, 0])), []
    while open_rows := [row for row, kept in enumerate(rows.info["kept"]) if not kept.is_finished]:
        rollout.update_weights(model.state_dict().items(), version=7 + len(versions))
        answered = continue_batch(rollout, rows.rows(open_rows), sampled)
        for row, kept in zip(open_rows, answered.info["kept"], strict=True):
            rows.info["kept"][row] = kept
        versions += [7 + len(versions)]
    kept = rows.info["kept"]
    assert len(versions) > 1 and set(kept[3].versions) == {7}, "a row without a budget ends in its first round"
    for row in kept[:3]:
        most = 2 if row is kept[2] else 3
        assert row.versions == [7 + token // most for token in range(len(row.token_ids))]
    joined = samples_of(rows.drop("budget"), kept, PAD, 12, True)
    assert torch.equal(joined["input_ids"], whole["input_ids"])
    torch.testing.assert_close(joined["rollout_log_probs"], whole["rollout_log_probs"], atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match=r"request 0 has 8 of 8 tokens and a budget of 3; expected room for one"):
        continue_batch(rollout, rows.rows([0]).with_({"kept": [Kept([5] * 8)]}), sampled)


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


def weights(shift=0.0, changed=1.0):
    """Two weights, of which a share is moved by `shift`."""
    tensors = {"a": torch.linspace(1, 2, 4096).view(64, 64), "b": torch.linspace(1, 2, 100)}
    for tensor in tensors.values():
        flat = tensor.view(-1)
        flat[: int(changed * len(flat))] += shift
    return tensors


def sync(check, sent, found, version=1):
    arrived = dict(check.watched(sent.items()))
    assert all(torch.equal(arrived[name], sent[name]) for name in sent)
    check.require_change(on_cpu([evenly_spaced(each) for each in found.values()]), version)


def test_a_sample_has_the_same_elements_each_time():
    sample = evenly_spaced(torch.arange(4 * SAMPLED_PER_TENSOR).view(4, -1))
    assert torch.equal(sample, torch.arange(0, 4 * SAMPLED_PER_TENSOR, 4).float())
    assert on_cpu([evenly_spaced(torch.empty(0)), sample[:2]]).tolist() == [0, 4] and not len(on_cpu([]))


def test_a_sampler_that_keeps_its_weights_is_told():
    check = ChangeCheck(torch.float32)
    sync(check, weights(), weights())
    with pytest.raises(
        StaleSamplerError, match=r"version 7: 100\.0% of the policy's .* none of 1,124 .*rollout\.name=hf"
    ):
        sync(check, weights(0.1), weights(), version=7)


@pytest.mark.parametrize(
    ("dtype", "sent", "found"),
    [
        pytest.param(torch.float32, weights(0.1), weights(0.1, changed=0.02), id="the sampler has any new weight"),
        pytest.param(torch.bfloat16, weights(), weights(), id="the policy stayed"),
        # Half of the distance between two bf16 numbers is 4e-3.
        pytest.param(torch.bfloat16, weights(1e-5, changed=0.5), weights(), id="the change is lost in rounding"),
        pytest.param(torch.float32, weights(0.1, changed=0.02), weights(), id="few changes prove nothing"),
        pytest.param(torch.float32, {"a": torch.zeros(5000)}, weights(), id="other weights"),
    ],
)
def test_a_sampler_passes_if(dtype, sent, found):
    check = ChangeCheck(dtype)
    sync(check, weights(), weights())
    sync(check, sent, found)
