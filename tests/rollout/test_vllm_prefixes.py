"""Hashes of blocks go from turn to turn: with a small hasher, and with vLLM, whose adapters are part of the hashes."""

from types import SimpleNamespace

import pytest

from rlx.rollout.protocol import PrefixMemory, Request, Sampling
from rlx.rollout.vllm_support import ContinuedHashes

SAMPLED = Sampling(20, temperature=0.7)
BLOCK = 3


class Counting:
    """Hashes a block to all tokens up to its end, as vLLM's hasher does in bytes, and counts the blocks."""

    blocks = 0

    def __call__(self, request):
        first = len(request.block_hashes)
        ends = range(BLOCK * (first + 1), len(request.all_token_ids) + 1, BLOCK)
        self.blocks += len(ends)
        return [tuple(request.all_token_ids[:end]) for end in ends]


@pytest.fixture
def core():
    return SimpleNamespace(request_block_hasher=Counting())


@pytest.fixture
def take(core):
    """take(tokens, memory) returns a request that vLLM has taken, and how many blocks were hashed for it."""
    counted = core.request_block_hasher
    hashes = ContinuedHashes.of(core)

    def taken(tokens, memory=None):
        hashes.expect(memory)
        before = counted.blocks
        request = SimpleNamespace(all_token_ids=list(tokens), block_hashes=[], _block_hasher=core.request_block_hasher)
        request.block_hashes.extend(request._block_hasher(request))
        assert request._block_hasher is counted, "decoding calls vLLM's own hasher"
        assert request.block_hashes == Counting()(SimpleNamespace(all_token_ids=tokens, block_hashes=[]))
        return request, counted.blocks - before

    taken.forget = hashes.forget
    return taken


def decode(request, *tokens):
    for token in tokens:
        request.all_token_ids.append(token)
        request.block_hashes.extend(request._block_hasher(request))


def test_only_blocks_behind_the_turn_before_are_hashed(take):
    memory = PrefixMemory()
    request, count = take(range(10), memory)
    assert count == 3
    decode(request, 10, 11, 12)
    request, count = take(range(20), memory)
    assert count == 2, "of 6 blocks 4 are known"
    decode(request, 20)
    assert take(range(21), memory)[1] == 0, "no block is new"
    assert take(range(21))[1] == 7, "without a memory all are"


@pytest.mark.parametrize("tokens", [[0, 1, 2, 9, *range(4, 20)], range(9), range(1, 20), []])
def test_hashes_of_other_tokens_are_not_used(take, tokens):
    memory = PrefixMemory()
    take(range(12), memory)
    assert take(tokens, memory)[1] == len(tokens) // BLOCK
    assert take([*tokens, 7, 7, 7], memory)[1] == 1, "from then on the new tokens are known"


def test_hashes_are_those_of_one_engine_until_it_forgets_them(take):
    memory = PrefixMemory()
    take(range(12), memory)
    take.forget()
    assert take(range(12), memory)[1] == 4
    assert take(range(12), memory)[1] == 0
    ContinuedHashes.of(other := SimpleNamespace(request_block_hasher=Counting())).expect(memory)
    other.request_block_hasher(SimpleNamespace(all_token_ids=list(range(12)), block_hashes=[]))
    assert memory.tokens == list(range(12))
    assert take(range(12), memory)[1] == 4


def test_an_expectation_is_for_one_request(take, core):
    memory = PrefixMemory()
    take(range(6), memory)
    core.request_block_hasher(SimpleNamespace(all_token_ids=[7], block_hashes=[]))
    assert memory.tokens == list(range(6))


@pytest.mark.parametrize("core", [None, SimpleNamespace(), SimpleNamespace(request_block_hasher=None)])
def test_a_core_that_hashes_nothing_stays_as_it_is(core):
    before = core and {**vars(core)}
    hashes = ContinuedHashes.of(core)
    hashes.expect(PrefixMemory())
    hashes.forget()
    assert (core and vars(core)) == before


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


@pytest.mark.slow
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
