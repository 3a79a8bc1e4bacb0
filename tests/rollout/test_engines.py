"""Several engines, each a process: the same samples as one gives, and no engine is lost in silence."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from rlx.config.schema import EngineKwargsConfig, ModelConfig, RolloutConfig
from rlx.rollout.engines import EngineProcess, EngineRollout, start_engines
from rlx.rollout.protocol import EngineError, PrefixMemory, Request, Sampling
from tests.rollout.rounds import in_rounds

pytestmark = pytest.mark.slow  # three processes that import vLLM

CPU, CONTEXT = torch.device("cpu"), 64
SETTINGS = RolloutConfig(
    name="vllm",
    max_num_seqs=12,
    stop=("?",),
    engine_kwargs=EngineKwargsConfig(
        vllm={"block_size": 32, "kv_cache_memory_bytes": 1 << 22, "logits_processors": ["engine_plugin:Plugin"]}
    ),
)
SAMPLED = Sampling(12, top_k=20, stop_token_ids=(1, 2, 3), stop=("e",))
PLACED = replace(SAMPLED, stop=(), by_position=True)


def children():
    return {
        each.pid for each in psutil.Process().children() if "rlx.rollout.engine_process" in " ".join(each.cmdline())
    }


@pytest.fixture(scope="module")
def start(cpu_vllm, folders, tokenizer, tmp_path_factory):
    """start(count, silence) returns a sampler on so many engines with weights."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        patch.setenv("RLX_ENGINE_PLUGIN", str(tmp_path_factory.mktemp("plugin") / "what"))
        patch.setenv("RANK", "7")  # of a worker; an engine has a group of its own
        tokenizer.name_or_path = folders["tied"]

        def build(engines, assign_late=False, **options):
            arguments = (
                replace(SETTINGS, assign_late=assign_late),
                ModelConfig(path=folders["tied"]),
                CPU,
                CONTEXT,
                3,
                tokenizer,
            )
            made.append(EngineRollout(engines, *arguments, **options))
            return made[-1]

        yield build
        for each in made:
            each.close()
    assert not children()


@pytest.fixture(scope="module")
def samplers(start):
    """A sampler on one engine, and one on two."""
    processes = [EngineProcess("the only engine"), *start_engines(RolloutConfig(engines_per_gpu=2))]
    return start(processes[:1]), start(processes[1:])


@pytest.fixture
def one_and_two(samplers, make_model):
    for sampler in samplers:
        sampler.update_weights(make_model().state_dict().items(), version=1)
    return samplers


def requests(sampling=SAMPLED, groups=5, each=4):
    return [
        Request(tuple(range(4, 9 + 3 * group)), 100 * group + index, sampling)
        for group in range(groups)
        for index in range(each)
    ]


def assert_equal(found, expected):
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.finish_reason == other.finish_reason and one.stop_string == other.stop_string
        assert one.log_probs == (other.log_probs and pytest.approx(other.log_probs, abs=1e-6))


@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, Sampling(12), Sampling(9, 0.0, with_log_probs=False, bad_words=("a",), repetition_penalty=1.5)],
)
def test_samples_are_those_of_one_engine(one_and_two, sampling):
    one, two = (each.generate(requests(sampling)) for each in one_and_two)
    assert_equal(two, one)
    assert len({each.finish_reason for each in one}) == (2 if sampling.stop else 1)
    assert_equal(one_and_two[1].generate(requests(sampling)[::-1])[::-1], one)
    load = one_and_two[1].take_load()
    assert load["running_max"] == 12
    with pytest.raises(ValueError, match=r"request 0 has a prompt of 50 tokens and asks for 15 more, .* is 64"):
        one_and_two[1].generate([Request((5,) * 50, 0, Sampling(15))])


def test_rounds_of_a_budget_give_the_unbroken_completions(one_and_two):
    asked = requests(PLACED, groups=3)
    whole = one_and_two[0].generate(asked)
    for sampler in one_and_two:
        for found, expected in zip(in_rounds(sampler, asked, 4), whole, strict=True):
            assert list(found.token_ids) == expected.token_ids
            assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-6)


def test_requests_come_while_others_are_in_flight_and_conversations_stay_with_their_engine(one_and_two):
    def turns(sampler):
        found, waiting = {}, [(row, PrefixMemory(), (4 + row, *range(3, 30))) for row in range(6)]
        for turn in range(2):
            asked = {}
            for row, memory, prompt in waiting:
                asked[sampler.add_request(Request(prompt, 10 * row + turn, SAMPLED, memory))] = row, memory, prompt
                for number, each in sampler.step():
                    found[asked[number][0], turn] = each
            while sampler.running:
                for number, each in sampler.step():
                    found[asked[number][0], turn] = each
            waiting = [(row, memory, (*prompt, *found[row, turn].token_ids)) for row, memory, prompt in waiting]
        return [found[row, turn] for row in range(6) for turn in range(2)]

    one, two = map(turns, one_and_two)
    assert_equal(two, one)


def test_an_aborted_request_gets_no_completion_and_the_others_go_on(one_and_two):
    one, two = one_and_two
    whole, numbers = one.generate(requests()), [two.add_request(each) for each in requests()]
    two.abort(numbers[:2])
    assert two.engine_loads() == [(0, two.running // 2)] * 2, "none is with an engine yet"
    two.step()
    loads = two.engine_loads()
    assert sum(map(sum, loads)) == two.running and all(load.running for load in loads)
    running = [number for number in numbers[2:] if number in two._requests]
    two.abort(running[:3])
    for refused in (two.sleep, lambda: two.update_weights([], 2), lambda: two.generate(requests())):
        with pytest.raises(ValueError, match="requests in flight, expected none"):
            refused()
    left = {}
    while two.running:
        left |= dict(two.step())
    assert set(left) <= set(numbers[2:]) - set(running[:3])
    assert_equal([left[number] for number in sorted(left)], [whole[numbers.index(number)] for number in sorted(left)])
    assert_equal(two.generate(requests()), whole)


def test_new_weights_reach_every_engine(one_and_two, make_model):
    before, weights = one_and_two[1].generate(requests()), make_model().state_dict()
    for sampler in one_and_two:
        sampler.update_weights(((name, each * 1.1) for name, each in weights.items()), version=3)
        sampler.sleep()
        sampler.wake()
        assert sampler.version == 3
    one, two = (each.generate(requests()) for each in one_and_two)
    assert_equal(two, one)
    assert [each.token_ids for each in two] != [each.token_ids for each in before]


def test_what_goes_on_after_a_sync_reads_its_kept_tokens_with_the_new_weights(one_and_two, make_model, make_rollout):
    begun = [replace(each, budget=5) for each in requests(replace(PLACED, stop_token_ids=()))]
    kept = [each.token_ids for each in one_and_two[0].generate(begun)]
    model = make_model()
    for parameter in model.parameters():
        parameter.data *= 1.1
    rest = [
        replace(each, prompt_ids=(*each.prompt_ids, *ids), kept=5, budget=None)
        for each, ids in zip(begun, kept, strict=True)
    ]
    expected = make_rollout(model).generate(rest)
    for sampler in one_and_two:
        assert [each.token_ids for each in sampler.generate(begun)] == kept, "now it is in the cache of each engine"
        sampler.update_weights(model.state_dict().items(), version=2)
        for found, own in zip(sampler.generate(rest), expected, strict=True):
            assert found.token_ids == own.token_ids
            assert found.log_probs == pytest.approx(own.log_probs, abs=1e-4)


def until_it_fails(sampler, said, sampling=SAMPLED):
    for each in requests(sampling):
        sampler.add_request(each)
    with pytest.raises(EngineError, match=said):
        while sampler.running:
            sampler.step()
    assert sampler.running == 0


def test_an_engine_that_fails_or_hangs_is_named_with_its_stack(start, one_and_two, make_model):
    before, told = children(), Path(os.environ["RLX_ENGINE_PLUGIN"])
    sampler = start([EngineProcess("engine 1 of 1")], assign_late=True, silence_s=4.0)
    (process,) = children() - before
    sampler.update_weights(make_model().state_dict().items(), version=1)
    assert_equal(sampler.generate(requests()), one_and_two[0].generate(requests()))  # of which some waited for a place
    told.write_text("fail")
    until_it_fails(sampler, r"engine 1 of 1 .*EngineError: vLLM failed .*injected[\s\S]*engine_plugin\.py")
    told.write_text("hang")
    silent = (
        rf"engine 1 of 1 \(process {process}\) sent nothing for 4 s and was killed\. Its stack:[\s\S]*engine_plugin"
    )
    until_it_fails(sampler, silent)
    told.unlink()
    sampler.close()
    assert children() == before
    assert sampler.engine_loads() == [(0, 0)], "a worker looks while it starts the next one"


def test_an_engine_that_is_killed_is_named_and_a_sync_goes_on_with_the_others(one_and_two, make_model):
    """Last of these two engines: a sync takes all ranks, so it ends as always, and the next request says what happened."""
    sampler, name = one_and_two[1], "engine 2 of 2"
    (killed,) = (pid for pid in children() if name in psutil.Process(pid).cmdline()[-1])
    long = Sampling(36)
    for each in requests(long):
        sampler.add_request(each)
    sampler.step()  # both begin
    os.kill(killed, signal.SIGKILL)
    until_it_fails(sampler, rf"{name} \(process {killed}\) ended \(SIGKILL\)", long)
    sampler.update_weights(make_model().state_dict().items(), version=2)
    sampler.sleep()
    with pytest.raises(EngineError, match=name):
        sampler.generate(requests())


def test_an_update_that_fails_ends_all_engines(samplers, make_model):
    """After all other tests of these engines."""
    weights = make_model().state_dict()

    def failing():
        yield from list(weights.items())[:3]
        raise RuntimeError("another process is gone")

    lacking = [pair for pair in weights.items() if pair[0] != "model.norm.weight"]
    for sampler, given, kind, said in zip(
        samplers,
        (failing(), lacking),
        (RuntimeError, ValueError),
        ("another process is gone", "1 weights .* did not arrive"),
        strict=True,
    ):
        with pytest.raises(kind, match=said):
            sampler.update_weights(given, version=2)
        with pytest.raises(ValueError, match="no complete set of weights"):
            sampler.add_request(requests()[0])
    assert not children()


def test_a_worker_that_is_killed_leaves_no_engine(cpu_vllm):
    code = """
        from rlx.config.schema import RolloutConfig
        from rlx.rollout.engines import start_engines
        engines = start_engines(RolloutConfig(engines_per_gpu=2))
        print(all(each.connection.poll(120) for each in engines), flush=True)  # they show signs of life
        input()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout.readline() == "True\n"
        engines = psutil.Process(worker.pid).children()
        assert len(engines) == 2
        worker.kill()
    until = time.monotonic() + 60
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in engines):
        assert time.monotonic() < until, "an engine outlives its worker"
        time.sleep(0.1)
