import pytest
import torch
from transformers import GenerationConfig

from rlx.rollout.hf import HFRollout
from rlx.rollout.protocol import Request, Sampling

GREEDY = Sampling(max_tokens=12, temperature=0.0)
MODELS = pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2"])


def requests_of(prompts, sampling, per_prompt=1):
    return [Request(p, 1000 * i + j, sampling) for i, p in enumerate(prompts) for j in range(per_prompt)]


@MODELS
def test_greedy_equals_transformers_generate(name, make_model, make_rollout, prompts):
    model = make_model(name)
    stopping = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(1, 2, 3, 4))
    completions = make_rollout(model).generate(requests_of(prompts, stopping))
    plain = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=[1, 2, 3, 4], pad_token_id=0)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = model.generate(torch.tensor([prompt]), generation_config=plain)[0, len(prompt) :].tolist()
        assert completion.token_ids == expected
        assert completion.finish_reason == ("stop" if expected[-1] in (1, 2, 3, 4) else "length")


@MODELS
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_log_probs_equal_a_forward_over_the_whole_sequence(name, temperature, make_model, make_rollout, prompts):
    model = make_model(name)
    sampling = Sampling(max_tokens=10, temperature=temperature, top_k=5, top_p=0.9, stop_token_ids=(1,))
    for request, completion in zip(
        requests_of(prompts, sampling), make_rollout(model).generate(requests_of(prompts, sampling)), strict=True
    ):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        expected = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=2e-5)


@MODELS
def test_a_completion_does_not_depend_on_its_batch(name, make_model, make_rollout, prompts):
    model = make_model(name)
    sampling = Sampling(max_tokens=16, stop_token_ids=(1, 2, 3, 4))
    requests = requests_of(prompts, sampling, per_prompt=3)
    together = make_rollout(model).generate(requests)
    small_batches = make_rollout(model, max_num_seqs=5).generate(requests)
    alone = [make_rollout(model).generate([request])[0] for request in requests]
    backwards = make_rollout(model).generate(requests[::-1])[::-1]
    assert len({len(completion.token_ids) for completion in together}) > 3  # rows left the batch at different times
    for others in (small_batches, alone, backwards):
        for first, second in zip(together, others, strict=True):
            assert first.token_ids == second.token_ids and first.finish_reason == second.finish_reason
            assert first.log_probs == pytest.approx(second.log_probs, abs=2e-5)


def test_samples_follow_the_models_distribution(make_model, make_rollout):
    model = make_model()
    prompt, count = (5, 9, 11), 4000
    completions = make_rollout(model).generate([Request(prompt, seed, Sampling(2)) for seed in range(count)])
    with torch.no_grad():
        probs = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        first = int(probs.argmax())
        second_probs = model(torch.tensor([[*prompt, first]])).logits[0, -1].double().softmax(-1)
    seconds = [c.token_ids[1] for c in completions if c.token_ids[0] == first]
    for tokens, expected in (([c.token_ids[0] for c in completions], probs), (seconds, second_probs)):
        counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
        many = expected * len(tokens) >= 5
        statistic = ((counts - expected * len(tokens))[many] ** 2 / (expected * len(tokens))[many]).sum()
        assert int(many.sum()) >= 4
        assert statistic < 2.5 * int(many.sum()) + 10  # beyond the 99.9 % point of chi-square


def test_seeds_decide_and_equal_seeds_agree(make_model, make_rollout, prompts):
    rollout = make_rollout(make_model())
    sampling = Sampling(max_tokens=12)
    a, b, c = rollout.generate([Request(prompts[0], seed, sampling) for seed in (4, 5, 4)])
    assert a.token_ids == c.token_ids != b.token_ids


def test_stop_tokens_end_a_completion_and_belong_to_it(make_model, make_rollout, prompts):
    rollout = make_rollout(make_model())
    (free,) = rollout.generate(requests_of(prompts[:1], GREEDY))
    stop = free.token_ids[4]
    end = free.token_ids.index(stop) + 1
    (cut,) = rollout.generate(requests_of(prompts[:1], Sampling(12, temperature=0.0, stop_token_ids=(40, stop))))
    assert cut.token_ids == free.token_ids[:end] and cut.finish_reason == "stop"
    assert len(cut.log_probs) == end
    (last,) = rollout.generate(requests_of(prompts[:1], Sampling(end, temperature=0.0, stop_token_ids=(stop,))))
    assert last.token_ids == cut.token_ids and last.finish_reason == "stop"  # a stop on the last token allowed
    (one,) = rollout.generate(requests_of(prompts[:1], Sampling(1, temperature=0.0)))
    assert one.token_ids == free.token_ids[:1] and one.finish_reason == "length"


def test_requests_may_differ_in_sampling(make_model, make_rollout, prompts):
    rollout = make_rollout(make_model())
    samplings = [GREEDY, Sampling(5), GREEDY, Sampling(3, top_k=2)]
    requests = [Request(p, i, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
    mixed = rollout.generate(requests)
    assert [len(completion.token_ids) for completion in mixed] == [12, 5, 12, 3]
    assert [completion.token_ids for completion in mixed] == [rollout.generate([r])[0].token_ids for r in requests]
    assert rollout.generate([]) == []


def test_generating_needs_weights_and_wakes(make_model, make_rollout, prompts):
    model = make_model()
    rollout = HFRollout(model.config)
    assert rollout.version is None
    with pytest.raises(ValueError, match="update_weights"):
        rollout.generate(requests_of(prompts, GREEDY))
    rollout.update_weights(model.state_dict().items(), version=7)
    before = rollout.generate(requests_of(prompts, GREEDY))
    assert rollout.version == 7
    rollout.sleep()
    assert rollout.generate(requests_of(prompts, GREEDY)) == before
    with pytest.raises(ValueError, match="request 1 has an empty prompt"):
        rollout.generate(requests_of([prompts[0], ()], GREEDY))


def test_new_weights_replace_the_old_ones(make_model, make_rollout, prompts):
    model = make_model()
    rollout = make_rollout(model)
    before = rollout.generate(requests_of(prompts, GREEDY))
    changed = make_model()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    rollout.update_weights(changed.state_dict().items(), version=2)
    after = rollout.generate(requests_of(prompts, GREEDY))
    assert after == make_rollout(changed).generate(requests_of(prompts, GREEDY)) and after != before
    assert torch.equal(model.lm_head.weight, make_model().lm_head.weight)  # the sampler shares no storage


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_name_of_tied_weights_is_enough(left_out, make_model, make_rollout, prompts):
    model = make_model("qwen3")
    rollout = make_rollout(model)
    rollout.update_weights(((n, w) for n, w in model.state_dict().items() if n != left_out), version=2)
    assert rollout.generate(requests_of(prompts, GREEDY)) == make_rollout(model).generate(requests_of(prompts, GREEDY))


def _renamed(weights):
    weights["model.nothing"] = weights.pop("model.norm.weight")


def _missing(weights):
    del weights["model.norm.weight"]


def _reshaped(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"][:1]


def _untied(weights):
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_renamed, "'model.nothing': got a name that Qwen3ForCausalLM lacks"),
        (_missing, r"1 of \d+ weights did not arrive: 'model.norm.weight'"),
        (_reshaped, r"'model.norm.weight': got shape \(1,\), expected \(64,\)"),
        (_untied, "'lm_head.weight': got values that differ from those of the weight it is tied to"),
    ],
)
def test_a_wrong_set_of_weights_is_refused_and_cannot_be_used(spoil, message, make_model, make_rollout, prompts):
    model = make_model()
    rollout = make_rollout(model)
    weights = dict(model.state_dict())
    spoil(weights)
    with pytest.raises(ValueError, match=message):
        rollout.update_weights(weights.items(), version=2)
    assert rollout.version is None
    with pytest.raises(ValueError, match="update_weights"):
        rollout.generate(requests_of(prompts, GREEDY))
    rollout.update_weights(model.state_dict().items(), version=3)
    assert rollout.version == 3


def test_a_name_sent_twice_is_refused(make_model, make_rollout):
    model = make_model()
    with pytest.raises(ValueError, match="got it twice"):
        make_rollout(model).update_weights([*model.state_dict().items()] * 2, version=2)
