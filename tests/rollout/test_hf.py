import pytest
import torch

from rlx.heartbeat import at_beat
from rlx.rollout.protocol import Request, Sampling

GREEDY = Sampling(max_tokens=12, temperature=0.0)
MODELS = pytest.mark.parametrize("name", ["qwen3", "gpt2"])


def requests_of(prompts, sampling, per_prompt=1):
    return [Request(p, 1000 * i + j, sampling) for i, p in enumerate(prompts) for j in range(per_prompt)]


@MODELS
def test_a_completion_does_not_depend_on_its_batch(name, make_model, make_rollout, prompts):
    model = make_model(name)
    sampling = Sampling(max_tokens=16, stop_token_ids=(1, 2, 3, 4))
    requests = requests_of(prompts, sampling, per_prompt=3)
    together = make_rollout(model).generate(requests)
    in_waves, loads = make_rollout(model, max_num_seqs=5), []
    at_beat(lambda: loads.extend(in_waves.engine_loads()))
    small_batches = in_waves.generate(requests)
    at_beat(lambda: None)
    assert loads[0] == (5, len(requests) - 5) and max(load.running for load in loads) == 5 and loads[-1].waiting == 0
    assert in_waves.tokens == sum(len(completion.token_ids) for completion in small_batches)
    assert in_waves.engine_loads() == [(0, 0)]
    alone = [make_rollout(model).generate([request])[0] for request in requests]
    backwards = make_rollout(model).generate(requests[::-1])[::-1]
    assert len({len(completion.token_ids) for completion in together}) > 3  # rows left the batch at different times
    for others in (small_batches, alone, backwards):
        for first, second in zip(together, others, strict=True):
            assert first.token_ids == second.token_ids and first.finish_reason == second.finish_reason
            assert first.log_probs == pytest.approx(second.log_probs, abs=2e-5)


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


def test_new_weights_replace_the_old_ones(make_model, make_rollout, prompts):
    model = make_model()
    rollout = make_rollout(model)
    before = rollout.generate(requests_of(prompts, GREEDY))
    rollout.sleep()
    assert rollout.generate(requests_of(prompts, GREEDY)) == before
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


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda w: w.update({"model.nothing": w.pop("model.norm.weight")}),
            "'model.nothing': got a name that Qwen3ForCausalLM lacks",
        ),
        (lambda w: w.__delitem__("model.norm.weight"), r"1 of \d+ weights did not arrive: 'model.norm.weight'"),
        (
            lambda w: w.update({"model.norm.weight": w["model.norm.weight"][:1]}),
            r"'model.norm.weight': got shape \(1,\), expected \(64,\)",
        ),
        (
            lambda w: w.update({"lm_head.weight": w["lm_head.weight"] + 1}),
            "'lm_head.weight': got values that differ from those of the weight it is tied to",
        ),
        (lambda w: [*w.items()] * 2, "got it twice"),
    ],
)
def test_a_wrong_set_of_weights_is_refused_and_cannot_be_used(spoil, message, make_model, make_rollout, prompts):
    model = make_model()
    rollout = make_rollout(model)
    weights = dict(model.state_dict())
    with pytest.raises(ValueError, match=message):
        rollout.update_weights(spoil(weights) or weights.items(), version=2)
    assert rollout.version is None
    with pytest.raises(ValueError, match="update_weights"):
        rollout.generate(requests_of(prompts, GREEDY))
    rollout.update_weights(model.state_dict().items(), version=3)
    assert rollout.version == 3
