"""vLLM on two processes, beside the trainer's engine: data parallel and tensor parallel, with real weights that change."""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from transformers import CTRLConfig, HrmTextConfig, Mamba2Config, MambaConfig, Qwen3MoeConfig

from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.config.vllm_range import CPU_HEAD_WIDTHS
from rlx.rollout.protocol import FirstRank, Sampling
from rlx.rollout.sampler import build_rollout

RESPONSE = 12
GREEDY = Sampling(RESPONSE, temperature=0.0, with_log_probs=False)

# name -> model folder, strategy of the trainer's engine, keys of the model, keys of the rollout
SETUPS = {
    "data parallel": ("tied", "fsdp2", {}, {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "stop": ("?",)}),
    "tensor parallel": (
        "untied",
        "fsdp",
        {"override_config": {"rms_norm_eps": 0.5}},
        {"tensor_model_parallel_size": 2, "top_p": 0.8, "top_k": 20},
    ),
    "LoRA, few at once": (
        "tied",
        "fsdp2",
        {"lora_rank": 4},
        {"tensor_model_parallel_size": 2, "seed_requests": False, "max_num_seqs": 2, "max_num_batched_tokens": 16},
    ),
}

FIRST = pytest.mark.parametrize("started", ["data parallel"], indirect=True)  # for what one configuration says as well


class Started(NamedTuple):
    """A configuration that runs: its name, the processes before and after vLLM was built, what it said without weights."""

    name: str
    processes: list[tuple[dict[str, str], dict[str, str]]]
    without_weights: list[tuple[str, str]]

    @property
    def rollout(self) -> RolloutConfig:
        return RolloutConfig(**SETUPS[self.name][3])

    @property
    def sampling(self) -> Sampling:
        return Sampling(RESPONSE, self.rollout.temperature, self.rollout.top_p, self.rollout.top_k)


@pytest.fixture(
    scope="module",
    params=["data parallel", pytest.param("tensor parallel", marks=pytest.mark.slow)],
)
def started(request, vllm_ranks, folders):
    folder, *rest = SETUPS[request.param]
    processes = vllm_ranks("vllm", "start", folders[folder], *rest)
    without_weights = vllm_ranks("vllm", "refusal", "generate", GREEDY)
    vllm_ranks("vllm", "sync", 0)
    yield Started(request.param, processes, without_weights)
    vllm_ranks("vllm", "stop")


@pytest.fixture
def ranks(started, vllm_ranks):
    return vllm_ranks


def assert_greedy_as_hf(ranks):
    pairs = list(zip(ranks("vllm", "generate", GREEDY, "hf"), ranks("vllm", "generate", GREEDY), strict=True))
    for hf, vllm in pairs:
        for expected, found in zip(hf, vllm, strict=True):
            assert found.token_ids == expected.token_ids and found.finish_reason == "length"
    return [vllm for _, vllm in pairs]


def assert_log_probs_are_the_trainers(ranks, sampling):
    for said, own in ranks("vllm", "log_probs", sampling):
        assert said.min() < -0.5, "some tokens are unlikely: equal numbers say something"
        torch.testing.assert_close(said, own, atol=1e-4, rtol=0)


def test_tokens_and_log_probs_are_those_of_hf_and_trainer_before_and_after_an_optimizer_step(started, ranks):
    before = assert_greedy_as_hf(ranks)
    assert_log_probs_are_the_trainers(ranks, started.sampling)
    assert all(metrics["grad_norm"] > 0 for metrics in ranks("vllm", "learn"))
    assert ranks("vllm", "generate", GREEDY) == before, "the sampler keeps its weights"
    assert ranks("vllm", "sync", 1) == [1, 1]
    after = assert_greedy_as_hf(ranks)
    assert all(new != old for new, old in zip(after, before, strict=True)), "also where the prompt was in the cache"
    assert_log_probs_are_the_trainers(ranks, started.sampling)


def tokens(completions):
    return [completion.token_ids for completion in completions]


def test_samples_come_from_seeds_alone(started, ranks):
    sampling = started.sampling
    together = twice(ranks, sampling)
    if started.rollout.tensor_model_parallel_size > 1:
        assert together[0] == together[1]
    others = ranks("vllm", "generate", sampling, "vllm", 1000)
    for samples, other in zip(together, others, strict=True):
        assert all(a != b for a, b in zip(tokens(samples), tokens(other), strict=True))
        assert samples[0].token_ids != samples[2].token_ids, "equal prompts, other seeds"
    for order in ([7, 2, 5], [1], list(range(8))[::-1]):
        some = ranks("vllm", "generate", sampling, "vllm", 0, order)
        for samples, own in zip(together, some, strict=True):
            assert tokens(own) == [samples[index].token_ids for index in order]


def test_draws_by_position_do_not_depend_on_breaks_and_are_those_of_hf(started, ranks):
    sampling = replace(started.sampling, by_position=True, stop_token_ids=(3, 9))
    whole = ranks("vllm", "generate", sampling)
    for budget in (1, 5):
        for found, expected in zip(ranks("vllm", "in_rounds_of", budget, sampling), whole, strict=True):
            assert_close(found, expected)
    for found, expected in zip(ranks("vllm", "late", sampling), whole, strict=True):
        assert_close(found, expected)
    assert len({completion.finish_reason for samples in whole for completion in samples}) == 2
    penalties = {"presence_penalty": 1.5, "repetition_penalty": 1.3}
    for other in (
        started.sampling,
        Sampling(RESPONSE, started.rollout.temperature),
        Sampling(RESPONSE, 2.5, top_p=0.6, min_p=0.05, with_log_probs=False, **penalties),
        GREEDY,
    ):
        placed = replace(other, by_position=True)
        plain, found, hf = (
            [*map(tokens, ranks("vllm", "generate", *asked))] for asked in ((other,), (placed,), (other, "hf"))
        )
        assert found == hf and (found == plain) == (other is GREEDY)
    assert ranks("vllm", "cached_tokens", (5, 5, 6, 6, 5)) == [[0, 32, 0, 32, 32]] * 2, "of the same version alone"


def assert_close(found, expected):
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def twice(ranks, sampling):
    """Samples that do not depend on the random states of the process."""
    # With prefixes in the cache prompts are read in fewer steps, and requests without seeds draw otherwise.
    ranks("vllm", "forget_prefixes")
    together = ranks("vllm", "generate_from_other_random_states", sampling)
    ranks("vllm", "forget_prefixes")
    assert together == ranks("vllm", "generate", sampling)
    return together


def test_requests_may_come_while_others_are_in_flight_in_one_order_for_a_group(started, ranks):
    together = ranks("vllm", "generate", started.sampling)
    late = ranks("vllm", "late", started.sampling)
    if started.rollout.tensor_model_parallel_size > 1:
        assert late[0] == late[1]
    for found, expected in zip(late, together, strict=True):
        assert_close(found, expected)


def test_an_aborted_request_frees_its_blocks_and_the_others_go_on(started, ranks):
    together, ended = ranks("vllm", "generate", GREEDY), [1, 4, 7]
    for (free, refused, left, load), whole in zip(ranks("vllm", "aborted", GREEDY, ended), together, strict=True):
        before, in_flight, without, after = free
        assert in_flight < without < before == after
        assert [index for index in range(8) if index not in left] == ended
        assert all(left[index].token_ids == whole[index].token_ids for index in left)
        for (kind, text), method in zip(refused, ("update_weights", "sleep", "generate"), strict=True):
            assert kind == "ValueError" and f"{method}: got 8 requests in flight, expected none" in text
        assert load["running_max"] == min(8, started.rollout.max_num_seqs) and 0 < load["busy_share"] < 1


def test_a_stop_token_ends_a_response_and_is_part_of_it(started, ranks):
    unstopped = ranks("vllm", "generate", GREEDY)
    stops = tuple({samples[0].token_ids[5] for samples in unstopped})
    for length in (6, RESPONSE):
        answers = ranks("vllm", "generate", replace(GREEDY, max_tokens=length, stop_token_ids=stops))
        for samples, whole in zip(answers, unstopped, strict=True):
            for completion, free in zip(samples, whole, strict=True):
                ends = [at + 1 for at, token in enumerate(free.token_ids[:length]) if token in stops]
                expected = (free.token_ids[: ends[0]], "stop") if ends else (free.token_ids[:length], "length")
                assert (completion.token_ids, completion.finish_reason) == expected
    for samples in ranks("vllm", "generate", replace(started.sampling, stop_token_ids=tuple(range(20)))):
        assert all(len(completion.log_probs) == len(completion.token_ids) for completion in samples)
        assert any(len(completion.token_ids) < RESPONSE for completion in samples)
    assert any(samples[0].finish_reason == "stop" for samples in answers)


@FIRST
def test_stop_strings_end_responses_on_tokens_as_those_of_hf(ranks, tokenizer):
    def texts(samples):
        return [tokenizer.decode(completion.token_ids) for completion in samples]

    for logged, sampler in ((False, "hf"), (False, "vllm"), (True, "vllm")):
        sampling = Sampling(RESPONSE, 0.7, with_log_probs=True) if logged else GREEDY
        whole = [samples for samples in ranks("vllm", "generate", sampling, sampler)]
        stops = tuple(sorted({text[3:5] for samples in whole for text in texts(samples)[:2]}))
        found = ranks("vllm", "generate", replace(sampling, stop=stops), sampler)
        assert any(len(completion.token_ids) < RESPONSE for completion in found[0])
        for samples, free in zip(found, whole, strict=True):
            for completion, other in zip(samples, free, strict=True):
                ends = [at for at in range(1, RESPONSE + 1) if stopped(tokenizer.decode(other.token_ids[:at]), stops)]
                count = (ends or [RESPONSE])[0]
                assert completion.token_ids == other.token_ids[:count]
                text = tokenizer.decode(completion.token_ids)
                assert completion.finish_reason == ("stop" if ends else "length")
                assert completion.stop_string == next(iter(stopped(text, stops)), None)
                assert not logged or completion.log_probs == pytest.approx(other.log_probs[:count], abs=1e-4)


def stopped(text, stops):
    return [stop for stop in stops if stop in text]


@FIRST
def test_penalties_biases_bad_words_and_min_p_of_validation_are_those_of_hf(ranks, tokenizer):
    plain = ranks("vllm", "generate", GREEDY)
    for changes in (
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": -0.5},
        {"logit_bias": ((7, 90.0), (20, -100.0))},
        {"presence_penalty": 2.0, "frequency_penalty": 1.9, "repetition_penalty": 0.8, "logit_bias": ((9, 2.0),)},
        {"bad_words": tuple(tokenizer.decode(samples[0].token_ids[2:4]) for samples in plain)},
    ):
        changed = replace(GREEDY, **changes)
        hf, found = ranks("vllm", "generate", changed, "hf"), ranks("vllm", "generate", changed)
        assert [*map(tokens, found)] == [*map(tokens, hf)] != [*map(tokens, plain)]
    for sampler in ("hf", "vllm"):
        one = ranks("vllm", "generate", Sampling(RESPONSE, 0.7, with_log_probs=False, min_p=1.0), sampler)
        assert [*map(tokens, one)] == [*map(tokens, plain)]


def test_one_token_no_log_probs_and_no_requests_at_all(started, ranks):
    for samples, whole in zip(
        ranks("vllm", "generate", replace(GREEDY, max_tokens=1)), ranks("vllm", "generate", GREEDY), strict=True
    ):
        assert tokens(samples) == [completion.token_ids[:1] for completion in whole]
    assert all(completion.log_probs is None for samples in ranks("vllm", "generate", GREEDY) for completion in samples)
    assert ranks("vllm", "generate", GREEDY, "vllm", 0, []) == [[], []]
    if started.rollout.tensor_model_parallel_size == 1:
        first, second = ranks("vllm", "generate", GREEDY, "vllm", 0, {0: [1, 2], 1: []})
        assert len(first) == 2 and second == []


@FIRST
def test_the_widths_of_heads_on_the_cpu_are_those_that_vllm_names(ranks):
    assert all(set(CPU_HEAD_WIDTHS) <= widths for widths in ranks("vllm", "head_widths"))


def test_a_process_that_is_killed_leaves_no_files(started, ranks):
    assert ranks("vllm", "left_names") == [([], [])] * 2


def test_nothing_else_in_the_process_is_changed(started, ranks):
    for before, after in [*started.processes, *ranks("vllm", "disturbed")]:
        assert before == after


@FIRST
def test_training_beside_vllm_gives_the_same_bits(ranks, two_ranks, folders):
    for (metrics, weights), (plain_metrics, plain) in zip(
        ranks("vllm", "trained", folders["tied"]), two_ranks("vllm", "trained", folders["tied"]), strict=True
    ):
        assert metrics == plain_metrics and metrics[0]["grad_norm"] > 0
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_requests_that_cannot_be_completed_are_named(started, ranks):
    assert all("no complete set of weights" in text for _, text in started.without_weights)
    for kind, text in ranks("vllm", "refusal", "too_long", 45, 8):
        assert kind == "ValueError" and "request 1 has a prompt of 45 tokens and asks for 8 more" in text
        assert "max_model_len is 52" in text and "data.max_prompt_length" in text
    for kind, text in ranks("vllm", "refusal", "generate", Sampling(2, 0.5)):
        assert kind == "ValueError" and "log-probs at temperature 0.5" in text and "rollout.temperature=" in text


@FIRST
@pytest.mark.parametrize(
    ("action", "name", "said"),
    [
        ("without", "model.norm.weight", "1 weights of vLLM's Qwen3ForCausalLM did not arrive, among them model.norm"),
        ("with_more", "model.layers.9.mlp.gate_proj.weight", "layers.9"),
    ],
)
def test_weights_of_another_model_are_refused(ranks, action, name, said):
    before = ranks("vllm", "generate", GREEDY)
    for kind, text in ranks("vllm", "refusal", action, name):
        assert kind == "ValueError" and said in text and "rollout.name=hf" in text
    assert all("no complete set of weights" in text for _, text in ranks("vllm", "refusal", "generate", GREEDY))
    assert ranks("vllm", "sync", 2) == [2, 2]
    assert ranks("vllm", "generate", GREEDY) == before


@FIRST
def test_an_error_of_the_trainer_while_weights_are_gathered_stays_what_it_is(ranks):
    before = ranks("vllm", "generate", GREEDY)
    assert ranks("vllm", "refusal", "while_gathering_fails") == [("RuntimeError", "another process is gone")] * 2
    ranks("vllm", "sync", 2)
    assert ranks("vllm", "generate", GREEDY) == before


@FIRST
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block_sizes": 32}, ["engine_kwargs.vllm: block_sizes is not an option of vLLM", "did you mean block_size"]),
        ({"kv_cache_dtype": "fp7"}, ["could not start", "kv_cache_dtype", "fp7", "'max_num_seqs': 1024"]),
    ],
)
def test_options_that_vllm_does_not_take_are_named(ranks, folders, options, said):
    for kind, text in ranks("vllm", "refusal", "build", folders["tied"], options):
        assert kind == "ValueError" and all(part in text for part in said), text


@FIRST
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CTRLConfig(architectures=["CTRLLMHeadModel"]), "has no model CTRLLMHeadModel; set .*rollout.name=hf"),
        (
            Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=1),
            "on CPU .* experts.*rollout.name=hf",
        ),
        (
            Mamba2Config(architectures=["Mamba2ForCausalLM"], n_groups=2),
            "n_groups: got 2 groups, .*expected 1; set .*name=hf",
        ),
        (
            Mamba2Config(architectures=["Mamba2ForCausalLM"], n_groups=1, time_step_limit=(0.0, 0.1)),
            r"time_step_limit: got \(0\.0, 0\.1\), .*expected \(0\.0, inf\); set .*name=hf",
        ),
        (
            MambaConfig(architectures=["MambaForCausalLM"]),
            "on CPU vLLM has no kernel for its selective scan; set .*name=hf",
        ),
        (
            HrmTextConfig(architectures=["HrmTextForCausalLM"]),
            "the checkpoints' fused weights, .*; set .*name=hf",
        ),
    ],
    ids=["lacking", "experts", "norms of groups", "limited steps", "no kernel", "joined weights"],
)
def test_a_model_that_vllm_cannot_sample_is_named(ranks, config, said, tmp_path):
    config.save_pretrained(tmp_path)
    for kind, text in ranks("vllm", "refusal", "build", str(tmp_path), {}):
        assert kind == "ValueError" and re.search(said, text) and str(tmp_path) in text


def test_the_first_rank_decides_for_its_group(vllm_ranks):
    assert FirstRank().is_this and FirstRank().decide(lambda: 3) == 3
    alone = "ValueError: not this one"
    assert vllm_ranks("vllm", "decided", 1) == [(True, "of rank 0", alone), (True, "of rank 1", alone)]
    assert vllm_ranks("vllm", "decided", 2) == [
        (True, "of rank 0", alone),
        (False, "of rank 0", f"RuntimeError: on the first rank of the group: {alone}"),
    ]


def test_a_version_that_rlx_does_not_know_is_refused_before_it_is_imported(folders, monkeypatch, tmp_path):
    (tmp_path / "vllm-0.99.1.dist-info").mkdir()
    (tmp_path / "vllm-0.99.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"found version 0\.99\.1, expected >=0\.26,<0\.33 .*rollout\.name=hf"):
        build_rollout(RolloutConfig(name="vllm"), ModelConfig(path=folders["tied"]), torch.device("cpu"), 32)


@pytest.mark.parametrize("started", [pytest.param("LoRA, few at once", marks=pytest.mark.slow)], indirect=True)
def test_one_stream_of_requests_without_seeds_few_at_once_with_adapters(started, ranks):
    first, second = twice(ranks, started.sampling)
    assert first == second and first[0].token_ids != first[2].token_ids, "equal prompts"
    ranks("vllm", "learn")
    ranks("vllm", "sync", 1)
    assert_greedy_as_hf(ranks)
