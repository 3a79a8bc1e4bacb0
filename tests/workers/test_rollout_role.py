"""The sampler's role in two processes: an engine that fails in the middle, rests and checkpoints between generations."""

from dataclasses import replace

import pytest
import torch

from rlx.config.schema import EngineKwargsConfig, RolloutConfig

FIRST, SECOND = 3, 6  # calls of the plug-in: in the middle of a generation, and of the one after the restart


@pytest.fixture(scope="module")
def with_vllm(config):
    plugin = EngineKwargsConfig(
        vllm={"logits_processors": ["failing_plugin:Failing"], "kv_cache_memory_bytes": 1 << 22}
    )
    policy = replace(config.actor_rollout_ref, rollout=RolloutConfig(name="vllm", engine_kwargs=plugin))
    return replace(config, actor_rollout_ref=policy)


@pytest.fixture(scope="module")
def ranks(vllm_ranks, with_vllm):
    vllm_ranks("role", "start", with_vllm)
    yield vllm_ranks
    vllm_ranks("role", "stop")


@pytest.fixture(scope="module")
def shares(prompts):
    return [prompts.rows([0, 1, 2]), prompts.rows([3, 4])]


@pytest.fixture(scope="module")
def samples(ranks, shares):
    """What an engine that does not fail gives."""
    answers = ranks("role", "generate", shares, "train")
    assert all(calls >= SECOND for _, _, calls in answers), "a fault in the middle is in the middle"
    return [batch for batch, _, _ in answers]


def assert_equal(answers, samples):
    for (batch, _, _), expected in zip(answers, samples, strict=True):
        for name in ("input_ids", "response_mask", "policy_versions", "seed"):
            assert torch.equal(batch[name], expected[name])
        torch.testing.assert_close(batch["rollout_log_probs"], expected["rollout_log_probs"], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_an_engine_that_fails_on_one_rank_is_started_again_on_all_and_gives_the_same_samples(ranks, shares, samples):
    answers = ranks("role", "generate", shares, "train", {1: (FIRST,)})
    assert_equal(answers, samples)
    for (_, warnings, calls), cause in zip(answers, ["on another rank", f"injected at call {FIRST}"], strict=True):
        (warning,) = warnings
        assert "the sampler failed and is started again" in warning and cause in warning
        assert calls > SECOND
    # What failed is gone by then: on a GPU there is room for one.
    assert ranks("role", "left_at_a_restart") == [[(set(), 0)], [(set(), 0)]]
    again = ranks("role", "generate", shares, "train")
    assert_equal(again, samples)
    assert all(warnings == [] for _, warnings, _ in again)


@pytest.mark.slow
def test_samples_that_were_complete_when_an_engine_failed_are_not_sampled_again(ranks, shares):
    (before, _), _ = ranks("role", "sample_as", {"by_position": True, "stop_token_ids": tuple(range(16))})
    whole = [batch for batch, _, _ in ranks("role", "generate", shares, "train")]
    short, long = sorted(whole[1]["response_mask"].sum(dim=1).tolist())
    assert short < long
    assert_equal(ranks("role", "generate", shares, "train", {1: (short + 1,)}), whole)
    assert [tokens for _, tokens in ranks("role", "sample_as", before)] == [0, long]


@pytest.mark.slow
def test_an_engine_that_does_not_end_well_leaves_nothing_bad_to_the_next(ranks, shares, samples):
    """What vLLM shares between engines of a process is not emptied with this one."""
    ranks("role", "break_shutdown")
    answers = ranks("role", "generate", shares, "train", {1: (FIRST,)})
    assert_equal(answers, samples)
    for _, warnings, _ in answers:
        assert len(warnings) == 2 and "RuntimeError: injected at shutdown" in warnings[1]
    ranks("role", "left_at_a_restart")


@pytest.mark.slow
def test_an_engine_that_fails_again_ends_the_step_everywhere(ranks, with_vllm, shares, samples):
    answers = ranks("role", "generate", shares, "train", {1: (FIRST, SECOND)})
    for rank, ((kind, text), warnings, _) in enumerate(answers):
        assert kind == "EngineError" and len(warnings) == 1
        assert text.startswith("the sampler failed again after a restart: ")
        assert (f"RuntimeError: injected at call {SECOND}" if rank == 1 else "in another process") in text
    for (kind, text), _, _ in ranks("role", "generate", shares, "train"):
        assert kind == "EngineError" and "has been closed" in text
    ranks("role", "start", with_vllm)
    assert_equal(ranks("role", "generate", shares, "train"), samples)


def test_rest_and_a_checkpoint_between_generations_change_nothing(ranks, shares, samples, tmp_path):
    ranks("role", "rest_and_save", str(tmp_path / "actor"))
    assert (tmp_path / "actor").is_dir()
    assert_equal(ranks("role", "generate", shares, "train"), samples)


def test_validation_is_greedy_and_without_log_probs(ranks, shares):
    first, second = (
        ranks("role", "generate", [s.with_(seed=s["seed"] + add) for s in shares], "val") for add in (0, 9)
    )
    for (batch, _, _), (other, _, _) in zip(first, second, strict=True):
        assert "rollout_log_probs" not in batch
        assert torch.equal(batch["input_ids"], other["input_ids"])


def test_a_share_without_rows_comes_back_as_one(ranks, shares, samples):
    empty = [shares[0], shares[1].rows([])]
    (first, _, _), (second, _, _) = ranks("role", "generate", empty, "train")
    assert torch.equal(first["input_ids"], samples[0]["input_ids"])
    assert len(second) == 0 and second.response_length == samples[1].response_length


@pytest.mark.nightly
def test_several_engines_give_the_same_samples_and_one_that_is_killed_is_started_again(
    ranks, with_vllm, shares, samples
):
    answers = ranks("role", "on_two_engines", with_vllm, shares)
    assert_equal([first for first, _, _ in answers], samples)
    assert_equal(
        [
            (batch.with_(policy_versions=batch["policy_versions"] - batch["response_mask"].int()), *rest)
            for _, (batch, *rest), _ in answers
        ],
        samples,
    )
    for (_, (_, warnings, _), left), cause in zip(answers, ["on another rank", " of 2 (process "], strict=True):
        (warning,) = warnings
        assert "the sampler failed and is started again" in warning and cause in warning
        assert left == 0
