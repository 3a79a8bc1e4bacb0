"""Requests in flight with the hf sampler, and the load that is counted; vLLM's are in test_vllm.py."""

import re
from pathlib import Path

import pytest

from rlx.rollout import protocol
from rlx.rollout.hf import HFRollout
from rlx.rollout.protocol import (
    Completion,
    Request,
    Rollout,
    SamplerLoad,
    Sampling,
    aborting,
    joined_loads,
)

SAMPLED = Sampling(12, stop_token_ids=(1, 2, 3, 4))


@pytest.fixture
def asked(prompts):
    return [Request(prompt, 10 * index + copy, SAMPLED) for index, prompt in enumerate(prompts) for copy in range(3)]


def until_none_runs(rollout):
    stopped = []
    while rollout.running:
        stopped += rollout.step()
    return stopped


def test_requests_may_come_between_steps_and_ask_for_other_lengths(asked, make_model, make_rollout):
    """As turns do: the next request of a row comes when another row's has stopped, and has fewer tokens left."""
    rollout = make_rollout(make_model("gpt2"), max_num_seqs=4)
    ways = [
        Sampling(7, stop_token_ids=(1,)),
        Sampling(12, 0.0),
        Sampling(3, stop_token_ids=(1,)),
        Sampling(50, top_k=2),
    ]
    long = Request(tuple(5 + index % 40 for index in range(57)), 3, SAMPLED)  # 7 tokens more take all 64 positions
    mixed = [
        Request(request.prompt_ids, request.seed, ways[index % len(ways)])
        for index, request in enumerate([*asked, long])
    ]
    waiting, found, asked_as = list(enumerate(mixed)), {}, {}
    while waiting or rollout.running:
        for index, request in waiting[:3]:
            asked_as[rollout.add_request(request)] = index
        waiting = waiting[3:]
        found |= {asked_as[number]: completion for number, completion in rollout.step()}
    for index, request in enumerate(mixed):
        (alone,) = rollout.generate([request])
        assert found[index].token_ids == alone.token_ids and found[index].finish_reason == alone.finish_reason
        assert found[index].log_probs == pytest.approx(alone.log_probs, abs=2e-5)


def test_an_aborted_request_gets_no_completion_and_a_foreign_number_is_named(asked, make_model, make_rollout):
    rollout = make_rollout(make_model(), max_num_seqs=3)
    numbers = [rollout.add_request(request) for request in asked]
    first = dict(rollout.step())
    ended = [number for number in numbers if number not in first][:2]
    with pytest.raises(ValueError, match=f"abort: got {next(iter(first))}, expected .* one of 9 requests in flight"):
        rollout.abort([*ended, next(iter(first))])
    assert rollout.running == 9, "nothing is ended where a number is wrong"
    rollout.abort(ended)
    left = dict(until_none_runs(rollout))
    assert set(left) == set(numbers) - set(first) - set(ended)
    later = rollout.add_request(asked[0])
    assert later not in numbers
    rollout.abort()
    assert rollout.running == 0 and rollout.step() == []


def test_a_sampler_with_requests_in_flight_keeps_its_weights_and_stays_awake(asked, make_model, make_rollout):
    model = make_model()
    rollout = make_rollout(model)
    rollout.add_request(asked[0])
    for method, call in (
        ("update_weights", lambda: rollout.update_weights(model.state_dict().items(), version=2)),
        ("sleep", rollout.sleep),
        ("generate", lambda: rollout.generate(asked)),
    ):
        with pytest.raises(ValueError, match=f"{method}: got 1 requests in flight, expected none; .* or abort them"):
            call()
    assert rollout.version == 1
    with pytest.raises(KeyError), aborting(rollout):
        raise KeyError("a mistake of the caller")
    rollout.sleep()
    rollout.update_weights(model.state_dict().items(), version=2)
    assert rollout.version == 2


def test_a_request_that_cannot_be_completed_is_refused_before_it_is_in_flight(asked, make_model, make_rollout):
    rollout = make_rollout(make_model())
    for index in range(2):
        with pytest.raises(ValueError, match=f"generate: request {index} has an empty prompt"):
            rollout.generate([*asked[:index], Request((), 0, SAMPLED)])
    with pytest.raises(ValueError, match="add_request: the request has an empty prompt; expected at least one token"):
        rollout.add_request(Request((), 0, SAMPLED))
    assert rollout.running == 0
    empty = HFRollout(make_model().config)
    with pytest.raises(ValueError, match="add_request: no complete set of weights has arrived; call update_weights"):
        empty.add_request(asked[0])


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(protocol.time, "monotonic", lambda: now[0])
    return now


def test_the_load_is_an_average_over_time_and_shows_the_tail(clock):
    load = SamplerLoad(max_num_seqs=4)
    assert load.figures() == {}
    load.note(0)
    assert load.figures() == {}
    for after, in_flight, has_stopped in [
        (5.0, 6, False),  # 4 run and 2 wait
        (2.0, 3, True),  # 4 places · 2 s
        (1.0, 0, True),  # 3 · 1 s
        (3.0, 1, False),  # nothing runs for 3 s, such as while tools work
        (4.0, 0, True),  # 1 · 4 s
    ]:
        clock[0] += after
        load.note(in_flight, has_stopped)
    clock[0] += 1000
    mean = (4 * 2 + 3 * 1 + 0 * 3 + 1 * 4) / 10
    assert load.figures() == {
        "running_mean": pytest.approx(mean),
        "running_max": 4,
        "busy_share": pytest.approx(mean / 4),
        "tail_s": 8.0,
    }


def test_loads_of_calls_and_processes_are_joined():
    one = {"running_mean": 2.0, "running_max": 4.0, "busy_share": 0.5, "tail_s": 1.0}
    other = {"running_mean": 4.0, "running_max": 3.0, "busy_share": 1.0, "tail_s": 5.0}
    assert joined_loads([one, {}, other]) == {
        "running_mean": 3.0,
        "running_max": 4.0,
        "busy_share": 0.75,
        "tail_s": 5.0,
    }
    assert joined_loads([]) == joined_loads([{}]) == {}


class NewestFirst(Rollout):
    """Completes the newest request first, one a step, with its seed as the token."""

    def _fault(self, request):
        return None

    def _advance(self, requests):
        number = max(requests)
        return [(number, Completion([requests[number].seed], None, "stop"))]

    def update_weights(self, weights, version):
        self.version = version

    def probe(self):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def test_completions_have_the_order_of_requests_and_are_known_by_seed_when_they_are_finished(asked):
    rollout = NewestFirst(max_num_seqs=4)
    rollout.update_weights([], version=1)
    assert [completion.token_ids for completion in rollout.generate(asked)] == [[request.seed] for request in asked]
    assert rollout.finished() == [(request.seed, [request.seed]) for request in reversed(asked)]
    assert rollout.finished() == []


def test_the_page_adds_requests_steps_and_aborts(asked):
    rollout = NewestFirst(max_num_seqs=4)
    rollout.update_weights([], version=1)
    (code,) = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "rollout.md").read_text(), re.DOTALL
    )
    names, (*steps, abort) = {"rollout": rollout, "request": asked[1]}, code.splitlines()
    exec("\n".join(steps), names)
    assert names["completion"].token_ids == [asked[1].seed] and not rollout.running
    names["number"] = rollout.add_request(asked[0])
    exec(abort, names)
    assert not rollout.running


def test_a_text_is_shown_up_to_its_first_stop_string():
    cut, kept = (Sampling(1, stop=("b", "cc"), include_stop_str_in_output=keep) for keep in (False, True))
    assert [cut.shown(text) for text in ("axccbx", "abcc", "a", "")] == ["ax", "a", "a", ""]
    assert [kept.shown(text) for text in ("axccbx", "abcc", "a", "")] == ["axcc", "ab", "a", ""]
    assert Sampling(1).shown("any") == "any"
