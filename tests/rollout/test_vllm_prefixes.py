"""Hashes of blocks go from turn to turn with vLLM, whose adapters are part of the hashes."""

import pytest

from rlx.rollout.protocol import PrefixMemory, Request, Sampling

SAMPLED = Sampling(20, temperature=0.7)


def test_requests_are_equal_whatever_a_sampler_knows():
    one, other = Request((1,), 0, SAMPLED, PrefixMemory()), Request((1,), 0, SAMPLED)
    assert one == other and hash(one) == hash(other)


@pytest.fixture(scope="module")
def ranks(vllm_ranks, folders):
    vllm_ranks("vllm", "start", folders["tied"], "fsdp2", {"lora_rank": 4}, {"temperature": 0.7}, 256)
    vllm_ranks("vllm", "sync", 0)
    yield vllm_ranks
    vllm_ranks("vllm", "stop")


def both_ways(ranks, before_last=None):
    """The turns of each rank with a memory, after they were compared with those without one."""
    ranks("vllm", "forget_prefixes")
    plain = ranks("vllm", "conversation", SAMPLED, False, before_last)
    ranks("vllm", "forget_prefixes")
    found = ranks("vllm", "conversation", SAMPLED, True, before_last)
    for with_memory, without in zip(found, plain, strict=True):
        assert [turn[0] for turn in with_memory] == [turn[0] for turn in without], "the same tokens and log-probs"
        assert [turn[3] for turn in with_memory] == [turn[3] for turn in without], "from the same cache"
        assert all(turn[2] for turn in with_memory), "the same hashes"
        assert not any(turn[1] for turn in without)
    return found


def test_vllm_takes_over_hashes_and_samples_the_same(ranks):
    for turns in both_ways(ranks):
        assert [taken for _, taken, *_ in turns] == [0, 2, 4, 5]  # prompts of 75, 120, 164, 207 tokens, blocks of 32
        assert [cached for *_, cached in turns] == [0, 64, 128, 160]


@pytest.mark.slow
def test_vllm_hashes_anew_with_other_adapters_or_another_history(ranks):
    for before_last in ("sync", "rewrite"):
        for turns in both_ways(ranks, before_last):
            assert [taken for _, taken, *_ in turns] == [0, 2, 4, 0]
            assert turns[-1][-1] == 0
