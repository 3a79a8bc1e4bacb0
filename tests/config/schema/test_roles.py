from dataclasses import replace

from rlx.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    ModelConfig,
    PPOConfig,
    RefConfig,
    RolloutConfig,
)
from rlx.config.schema.roles import critic_role, critic_settings, log_prob_pass, log_prob_size, reference_role
from rlx.config.schema.tree import with_value

ACTOR = ActorConfig(
    strategy="fsdp",
    ppo_mini_batch_size=8,
    ppo_micro_batch_size_per_gpu=3,
    ppo_epochs=2,
    shuffle=True,
    loss_agg_mode="seq-mean-token-sum",
)


def tree(actor=ACTOR, critic=None):
    policy = ActorRolloutRefConfig(model=ModelConfig(path="/policy"), actor=actor)
    return PPOConfig(actor_rollout_ref=policy, critic=critic or CriticConfig())


def test_the_critics_nulls_are_the_actors_values():
    critic = critic_settings(tree())
    names = (
        "strategy",
        "ppo_mini_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ppo_epochs",
        "shuffle",
        "loss_agg_mode",
    )
    assert {name: getattr(critic, name) for name in names} == {name: getattr(ACTOR, name) for name in names}
    assert critic.model.path == "/policy"
    assert replace(critic.model, path=None) == ModelConfig(), "the rest of the model is its own"


def test_a_critic_on_the_actors_path_is_loaded_as_the_actor():
    policy = ModelConfig("/policy", True, {"rope_theta": 2.0}, "eager", lora_rank=4)

    def loaded(model: ModelConfig) -> ModelConfig:
        return critic_settings(
            PPOConfig(actor_rollout_ref=ActorRolloutRefConfig(policy), critic=CriticConfig(model=model))
        ).model

    assert loaded(ModelConfig(None)) == replace(policy, lora_rank=0)
    own = ModelConfig(None, override_config={"rope_theta": 3.0}, attn_implementation="flash_attention_2")
    assert loaded(own) == replace(own, path="/policy", trust_remote_code=True)
    assert loaded(ModelConfig("/value")) == ModelConfig("/value"), "a path of its own brings nothing of the actor's"


def test_what_the_critic_says_itself_stays():
    own = CriticConfig(
        strategy="fsdp2",
        model=ModelConfig(path="/value"),
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=1,
        ppo_epochs=1,
        shuffle=False,
        loss_agg_mode="token-mean",
        ulysses_sequence_parallel_size=1,
    )
    assert critic_settings(tree(critic=own)) == own


def test_the_critic_cuts_by_its_own_size_else_by_the_actors():
    by_tokens = replace(ACTOR, use_dynamic_bsz=True, ppo_micro_batch_size_per_gpu=None, ppo_max_token_len_per_gpu=77)
    dynamic = CriticConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=99)
    for actor, critic, rows, tokens in (
        (ACTOR, None, 3, None),
        (by_tokens, None, None, 77),
        (ACTOR, dynamic, None, 99),
        (by_tokens, CriticConfig(ppo_micro_batch_size_per_gpu=5), 5, None),
    ):
        assert critic_role(tree(actor, critic)).micro == (rows, tokens)


def test_log_probs_are_cut_by_their_own_size_else_by_the_actors():
    by_tokens = replace(ACTOR, use_dynamic_bsz=True, ppo_micro_batch_size_per_gpu=None, ppo_max_token_len_per_gpu=77)
    for kind in (RolloutConfig, RefConfig):
        assert log_prob_size(kind(), ACTOR) == (3, None)
        assert log_prob_size(kind(), by_tokens) == (None, 77)
        assert log_prob_size(kind(log_prob_micro_batch_size_per_gpu=5), by_tokens) == (5, None)
        tokens = kind(log_prob_use_dynamic_bsz=True, log_prob_max_token_len_per_gpu=11)
        assert log_prob_size(tokens, ACTOR) == (None, 11)
    assert reference_role(tree(by_tokens)).micro == (None, 77)


def test_old_log_probs_take_a_pass_where_their_numbers_are_needed_first():
    """Of 8 prompts in mini-batches of 2 all but the first, of one mini-batch none, and all where the reason says so."""

    def found(size=2, step=5, **changes):
        config = with_value(tree(ActorConfig(ppo_mini_batch_size=size)), "data.train_batch_size", 8)
        for key, value in {"algorithm.adv_estimator": "grpo", **changes}.items():
            config = with_value(config, key, value)
        return log_prob_pass(config, step).prompts

    correction, rollout = "algorithm.rollout_correction", "actor_rollout_ref.rollout"
    by_sequence = {f"{correction}.rollout_is": "sequence"}
    forks = {"environment.name": "guessing", f"{rollout}.multi_turn.on_rewritten_history": "fork"}
    warm_up = {"trainer.critic_warmup": 5}
    assert (found(), found(8), found(**by_sequence), found(**forks), found(**warm_up)) == (6, 0, 6, 6, 6)
    assert found(**{f"{correction}.bypass_mode": True}) == 0
    every = (
        {"algorithm.use_kl_in_reward": True},
        {f"{correction}.rollout_rs": ("token_k1",)},
        {f"{correction}.rollout_token_veto_threshold": 1e-4},
        {f"{correction}.rollout_is": "token", f"{correction}.rollout_is_batch_normalize": True},
        by_sequence | forks,
        {f"{rollout}.enable_rollout_routing_replay": True},
        warm_up | {"algorithm.adv_estimator": "gae"},
    )
    assert [found(8, **changes) for changes in every] == [8] * len(every)
    assert found(8, 6, **every[-1]) == 0, "after the warm-up"
