from dataclasses import replace

import pytest

from rlx.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    PPOConfig,
    RefConfig,
    RolloutConfig,
    TrainerConfig,
    ValKwargsConfig,
)
from rlx.engine.micro_batch import MicroBatchRule
from rlx.rollout.protocol import Sampling
from rlx.workers.settings import log_prob_rule, optimizer_steps, sampling_for, update_rule

ACTOR = ActorConfig(
    strategy="fsdp",
    ppo_mini_batch_size=8,
    ppo_micro_batch_size_per_gpu=3,
    ppo_epochs=2,
    shuffle=True,
    loss_agg_mode="seq-mean-token-sum",
)


def tree(actor=ACTOR, critic=None, **rollout):
    return PPOConfig(
        data=DataConfig(train_batch_size=32, max_response_length=20),
        actor_rollout_ref=ActorRolloutRefConfig(
            model=ModelConfig(path="/policy"), actor=actor, rollout=RolloutConfig(**rollout)
        ),
        critic=critic or CriticConfig(ppo_mini_batch_size=8, ppo_epochs=2),
        trainer=TrainerConfig(total_training_steps=10, critic_warmup=4),
    )


def test_micro_batches_follow_the_actor_where_nothing_else_is_said():
    by_tokens = replace(ACTOR, use_dynamic_bsz=True, ppo_micro_batch_size_per_gpu=None, ppo_max_token_len_per_gpu=77)
    for settings in (RolloutConfig(), RefConfig()):
        assert log_prob_rule(settings, ACTOR) == MicroBatchRule(rows=3)
        assert log_prob_rule(settings, by_tokens) == MicroBatchRule(tokens=77)
    assert update_rule(by_tokens) == MicroBatchRule(tokens=77)
    assert log_prob_rule(RefConfig(log_prob_micro_batch_size_per_gpu=5), by_tokens) == MicroBatchRule(rows=5)
    tokens = RolloutConfig(log_prob_use_dynamic_bsz=True, log_prob_max_token_len_per_gpu=11)
    assert log_prob_rule(tokens, ACTOR) == MicroBatchRule(tokens=11)


def test_optimizer_steps_count_mini_batches_epochs_and_the_critics_warm_up():
    assert optimizer_steps(tree(), "actor") == (10 - 4) * (32 // 8) * 2
    assert optimizer_steps(tree(), "critic") == 10 * (32 // 8) * 2
    assert optimizer_steps(tree(critic=CriticConfig(ppo_mini_batch_size=16, ppo_epochs=1)), "critic") == 10 * 2


@pytest.mark.parametrize(
    ("val", "expected"),
    [
        (ValKwargsConfig(temperature=0.7, top_p=0.5), Sampling(20, temperature=0.0, stop_token_ids=(1,))),
        (ValKwargsConfig(temperature=0.7, top_p=0.5, top_k=3, do_sample=True), Sampling(20, 0.7, 0.5, 3, (1,))),
    ],
)
def test_sampling_of_training_and_validation(val, expected):
    config = tree(temperature=0.9, top_p=0.8, top_k=7, val_kwargs=val)
    assert sampling_for(config, "train", (1,)) == Sampling(20, 0.9, 0.8, 7, (1,))
    assert sampling_for(config, "val", (1,)) == expected


def test_a_top_k_of_0_keeps_all_tokens():
    val = ValKwargsConfig(temperature=1.0, top_k=0, do_sample=True)
    for purpose in ("train", "val"):
        assert sampling_for(tree(top_k=0, val_kwargs=val), purpose, ()).top_k == -1
