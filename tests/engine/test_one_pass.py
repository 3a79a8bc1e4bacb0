"""Old log-probs of a step's first mini-batch are those of its own update: what a pass before it gives, to 1e-12."""

import pytest
import torch

ACTOR, MODEL, CORRECTION = "actor_rollout_ref.actor", "actor_rollout_ref.model", "algorithm.rollout_correction"
ROWS = 8
HALVES = {f"{ACTOR}.ppo_mini_batch_size": 2}


def of(estimator, loss, **others):
    return {"algorithm.adv_estimator": estimator, f"{ACTOR}.policy_loss.loss_mode": loss, **others}


PADDED = {f"{MODEL}.use_remove_padding": False}
TREE = {f"{MODEL}.use_shared_prefix": True, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8}
TOKENS = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 30}
KL = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.05}
EPOCHS = {f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.shuffle": True}
# Each estimator, each loss, each layout of micro-batches, and what else a first update computes.
CASES = {
    "grpo-vanilla": of("grpo", "vanilla", **{f"{ACTOR}.clip_ratio_c": 1.1}, **TREE, **KL),
    "rloo-gspo": of("rloo", "gspo", **TOKENS, **EPOCHS, **{f"{CORRECTION}.rollout_is": "sequence"}),
    "opo-cispo": of("opo", "cispo", **PADDED, **HALVES, **{f"{CORRECTION}.rollout_is": "token"}),
    "remax-sapo": of("remax", "sapo", **HALVES, **TREE, **EPOCHS),
    "gae-geo_mean": of("gae", "geo_mean", **TOKENS, **HALVES, **KL),
    "grpo_passk-vanilla": of("grpo_passk", "vanilla", **{f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}),
    "reinforce_plus_plus-vanilla": of("reinforce_plus_plus", "vanilla", **PADDED),
    "reinforce_plus_plus_baseline-vanilla": of("reinforce_plus_plus_baseline", "vanilla", **HALVES),
}


def agree(once, twice, halves, rows=ROWS):
    """Metrics, old log-probs, gradients and weights are equal; the pass is gone, or over the other mini-batch."""
    for (calls, has_phase), metrics, expected in zip(once[0], once[1], twice[1], strict=True):
        passes = [count for name, count in calls if name == "actor.log_probs"]
        assert has_phase == bool(passes) == halves and all(0 < count < rows for count in passes)
        assert [name for name, _ in calls].count("actor.first_update") == 1
        assert metrics.keys() == expected.keys() and {"actor/entropy", "mismatch/kl_k3"} <= metrics.keys()
        for name, value in metrics.items():
            assert value == pytest.approx(expected[name], rel=1e-10, abs=1e-12, nan_ok=True), name
    for found, wanted in zip(once[2:4], twice[2:4], strict=True):
        assert (found - wanted).norm() <= 1e-12 * wanted.norm()
    for name, weight in twice[4].items():
        torch.testing.assert_close(once[4][name], weight, rtol=1e-11, atol=1e-11)
    assert not any(name == "actor.first_update" for calls, _ in twice[0] for name, _ in calls)


@pytest.mark.parametrize("name", CASES)
def test_one_process(name, model_folder, one_rank):
    ((once, twice),) = one_rank("one_pass", "both", model_folder, CASES[name])
    agree(once, twice, halves=f"{ACTOR}.ppo_mini_batch_size" in CASES[name])


@pytest.mark.parametrize("together", [1, 2])
def test_two_processes_and_conversations_of_several_rows(together, model_folder, two_ranks):
    """On their own rows, and both on all rows."""
    options = {**of("grpo", "gspo", **HALVES, **TREE), f"{ACTOR}.ulysses_sequence_parallel_size": together}
    options |= {f"{CORRECTION}.rollout_is": "token", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}
    for once, twice in two_ranks("one_pass", "both", model_folder, options, True):
        agree(once, twice, halves=True)


NEEDED_FIRST = {
    "KL": {"algorithm.use_kl_in_reward": True},
    "warm-up": {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 2},
    "dropout": {f"{MODEL}.override_config": {"attention_dropout": 0.2}},
}


@pytest.mark.parametrize("name", NEEDED_FIRST)
def test_a_pass_stays_where_its_numbers_are_needed_first(name, model_folder, one_rank):
    """The configurations are those of `test_roles`; a model that differs in training is seen when it runs."""
    ((calls, metrics, *_),) = one_rank("one_pass", "steps", model_folder, NEEDED_FIRST[name])
    for of_step, has_phase in calls:
        assert has_phase and ("actor.log_probs", ROWS) in of_step
        assert not any(called == "actor.first_update" for called, _ in of_step)
    assert all("mismatch/kl_k3" in of_step and "actor/entropy" in of_step for of_step in metrics)
