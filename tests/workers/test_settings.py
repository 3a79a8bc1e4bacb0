import pytest

from rlx.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
    ValKwargsConfig,
)
from rlx.rollout.protocol import Sampling
from rlx.workers.roles import optimizer_steps, sampling_for


def tree(critic=None, **rollout):
    return PPOConfig(
        data=DataConfig(train_batch_size=32, max_response_length=20),
        actor_rollout_ref=ActorRolloutRefConfig(
            model=ModelConfig(path="/policy"),
            actor=ActorConfig(ppo_mini_batch_size=8, ppo_epochs=2),
            rollout=RolloutConfig(**rollout),
        ),
        critic=critic or CriticConfig(ppo_mini_batch_size=8, ppo_epochs=2),
        trainer=TrainerConfig(total_training_steps=10, critic_warmup=4),
    )


def test_optimizer_steps_count_mini_batches_epochs_and_the_critics_warm_up():
    assert optimizer_steps(tree(), "actor") == (10 - 4) * (32 // 8) * 2
    assert optimizer_steps(tree(), "critic") == 10 * (32 // 8) * 2
    assert optimizer_steps(tree(critic=CriticConfig(ppo_mini_batch_size=16, ppo_epochs=1)), "critic") == 10 * 2


@pytest.mark.parametrize(
    ("val", "expected"),
    [
        (
            ValKwargsConfig(temperature=0.7, top_p=0.5),
            Sampling(20, temperature=0.0, stop_token_ids=(1,), with_log_probs=False),
        ),
        (
            ValKwargsConfig(temperature=0.7, top_p=0.5, top_k=3, do_sample=True),
            Sampling(20, 0.7, 0.5, 3, (1,), with_log_probs=False),
        ),
    ],
)
def test_sampling_of_training_and_validation(val, expected):
    config = tree(temperature=0.9, top_p=0.8, top_k=7, val_kwargs=val)
    assert sampling_for(config, "train", (1,)) == Sampling(20, 0.9, 0.8, 7, (1,))
    assert sampling_for(config, "val", (1,)) == expected
    greedy = Sampling(20, temperature=0.0, stop_token_ids=(1,), with_log_probs=False)
    assert sampling_for(config, "greedy", (1,)) == greedy


def test_stops_hold_everywhere_and_penalties_in_validation_alone():
    val = ValKwargsConfig(min_p=0.1, repetition_penalty=1.2, bad_words=("x",), logit_bias={"5": -100})
    config = tree(stop=("</a>",), include_stop_str_in_output=True, ignore_eos=True, val_kwargs=val)
    ends = {"stop": ("</a>",), "include_stop_str_in_output": True}
    changes = {"repetition_penalty": 1.2, "bad_words": ("x",), "logit_bias": ((5, -100.0),)}
    assert sampling_for(config, "train", (1,)) == Sampling(20, **ends)
    assert sampling_for(config, "greedy", (1,)) == Sampling(20, 0.0, with_log_probs=False, **ends)
    assert sampling_for(config, "val", (1,)) == Sampling(20, 0.0, with_log_probs=False, **ends, **changes)


def test_a_top_k_of_0_keeps_all_tokens():
    val = ValKwargsConfig(temperature=1.0, top_k=0, do_sample=True)
    for purpose in ("train", "val"):
        assert sampling_for(tree(top_k=0, val_kwargs=val), purpose, ()).top_k == -1
