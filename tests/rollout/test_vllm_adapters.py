"""vLLM on two processes beside the trainer's engine: adapters on its own base, hashes of prefixes, experts."""

from dataclasses import replace

import pytest
import torch

from rlx.config.schema import LoraConfig, TinyModelConfig
from rlx.models.tiny import make_tiny
from rlx.rollout.protocol import Sampling

RESPONSE = 12
GREEDY = Sampling(RESPONSE, temperature=0.0, with_log_probs=False)
SAMPLED = Sampling(RESPONSE, temperature=0.7)
TURN = replace(SAMPLED, max_tokens=20)
LORA = {"lora_rank": 4, "lora": LoraConfig(use_rslora=True)}
MERGED = {"lora_rank": 4, "lora": LoraConfig(use_rslora=True, merge=True)}


@pytest.fixture(scope="module")
def ranks(vllm_ranks, folders):
    vllm_ranks("vllm", "start", folders["tied"], "fsdp2", LORA, {"temperature": 0.7}, 256)
    vllm_ranks("vllm", "sync", 0)
    yield vllm_ranks
    vllm_ranks("vllm", "stop")


def as_hf(ranks):
    """What vLLM samples greedily, after a comparison with the hf sampler."""
    found = ranks("vllm", "generate", GREEDY)
    for hf, vllm in zip(ranks("vllm", "generate", GREEDY, "hf"), found, strict=True):
        assert [one.token_ids for one in vllm] == [one.token_ids for one in hf]
    return found


@pytest.mark.slow
def test_new_adapters_reach_both_samplers_and_old_prefixes_are_forgotten(ranks):
    before, probes = as_hf(ranks), ranks("vllm", "probes")
    assert all(
        len(probe) and torch.equal(probe, again)
        for pair, other in zip(probes, ranks("vllm", "probes"), strict=True)
        for probe, again in zip(pair, other, strict=True)
    )
    for version in (1, 2):
        assert all(metrics["grad_norm"] > 0 for metrics in ranks("vllm", "learn"))
        assert ranks("vllm", "generate", GREEDY) == before, "the sampler keeps its adapters"
        assert ranks("vllm", "sync", version) == [version, version]
        after = as_hf(ranks)
        assert all(new != old for new, old in zip(after, before, strict=True)), "also where the prompt was in the cache"
        for said, own in ranks("vllm", "log_probs", SAMPLED):
            torch.testing.assert_close(said, own, atol=1e-4, rtol=0)
        before = after
    for old, new in zip(probes, ranks("vllm", "probes"), strict=True):
        assert not any(torch.equal(one, other) for one, other in zip(old, new, strict=True))
    assert ranks("vllm", "files_of_adapters") == [["adapter_config.json"]] * 2, "tensors stay in memory"


@pytest.mark.nightly
def test_adapters_reach_each_of_several_engines(vllm_ranks, folders):
    several = {"temperature": 0.7, "engines_per_gpu": 2}
    vllm_ranks("vllm", "start", folders["tied"], "fsdp2", LORA, several, 256)
    for version in (0, 1):
        vllm_ranks("vllm", "sync", version)
        vllm_ranks("vllm", "sleep")
        before = as_hf(vllm_ranks)
        for said, own in vllm_ranks("vllm", "log_probs", SAMPLED):
            torch.testing.assert_close(said, own, atol=1e-4, rtol=0)
        vllm_ranks("vllm", "learn")
    assert vllm_ranks("vllm", "generate", GREEDY) == before
    vllm_ranks("vllm", "stop")


def test_a_sampler_that_sleeps_keeps_base_and_adapters(ranks):
    before = as_hf(ranks)
    versions = ranks("vllm", "sleep")
    assert all(None not in pair for pair in versions)
    assert as_hf(ranks) == before


def test_adapters_that_vllm_would_not_use_are_refused(ranks):
    before = ranks("vllm", "generate", GREEDY)
    for kind, text in ranks("vllm", "refusal", "other_adapters", "layers.9.mlp.up_proj"):
        assert kind == "ValueError" and "vLLM uses 13 of 14 adapters" in text and "lora.merge=True" in text
    for kind, text in ranks("vllm", "refusal", "other_adapters", "layers.1.mlp.other"):
        assert kind == "ValueError" and "cannot take these adapters" in text and "lora.merge=True" in text
    assert all("no complete set of weights" in text for _, text in ranks("vllm", "refusal", "generate", GREEDY))
    ranks("vllm", "sync", 3)
    assert ranks("vllm", "generate", GREEDY) == before


def both_ways(ranks, before_last=None):
    """The turns of each rank with a memory, after they were compared with those without one."""
    ranks("vllm", "forget_prefixes")
    plain = ranks("vllm", "conversation", TURN, False, before_last)
    ranks("vllm", "forget_prefixes")
    found = ranks("vllm", "conversation", TURN, True, before_last)
    for with_memory, without in zip(found, plain, strict=True):
        assert [turn[0] for turn in with_memory] == [turn[0] for turn in without], "the same tokens and log-probs"
        assert [turn[3] for turn in with_memory] == [turn[3] for turn in without], "from the same cache"
        assert all(turn[2] for turn in (*with_memory, *without)), "vLLM's own hashes"
        assert [turn[1] for turn in without] == [0, 2, 3, 0 if before_last else 5], "those of the prompt before"
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


@pytest.mark.slow
def test_samplers_have_the_dequantised_base(vllm_ranks, tmp_path):
    """With the original weights log-probs would differ by some hundredths."""
    pytest.importorskip("bitsandbytes", reason="NF4 needs bitsandbytes (rlx[nf4])")
    for part in make_tiny(
        TinyModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    ):
        part.save_pretrained(tmp_path)
    vllm_ranks("vllm", "start", str(tmp_path), "fsdp2", LORA | {"quantization": "nf4"}, {"temperature": 0.7})
    for version in (0, 1):
        vllm_ranks("vllm", "sync", version)
        as_hf(vllm_ranks)
        for said, own in vllm_ranks("vllm", "log_probs", SAMPLED):
            torch.testing.assert_close(said, own, atol=1e-4, rtol=0)
        vllm_ranks("vllm", "learn")
    vllm_ranks("vllm", "stop")


@pytest.mark.slow
def test_the_mismatch_in_bf16_is_small_with_merged_weights(vllm_ranks, folders):
    vllm_ranks("vllm", "start", folders["tied"], "fsdp2", MERGED, {"temperature": 0.7, "dtype": "bf16"})
    vllm_ranks("vllm", "sync", 0)
    vllm_ranks("vllm", "learn")
    vllm_ranks("vllm", "sync", 1)
    pairs = vllm_ranks("vllm", "log_probs", SAMPLED)
    vllm_ranks("vllm", "stop")
    assert torch.cat([(said - own).abs() for said, own in pairs]).mean() < 0.02


@pytest.mark.slow
def test_layers_of_vllm_and_the_trainer_number_experts_alike_and_replay_takes_the_mismatch_away(
    experts_folder, vllm_ranks
):
    for (own, differing, used), (replayed, _, none) in vllm_ranks("vllm_experts", "mismatch", experts_folder, "bf16"):
        assert 0.002 < differing == used < 0.2 and none == 0
        assert replayed < own
    for own, replayed in vllm_ranks("vllm_experts", "mismatch", experts_folder, "fp32"):
        assert own[1:] == replayed[1:] == (0, 0)
        assert max(own[0], replayed[0]) < 1e-4
