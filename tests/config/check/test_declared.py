"""Keys that are set without effect: one warning lists them all, defaults are silent."""

from pathlib import Path

import pytest
from case_tables import ACTOR, GAE, REF, ROLLOUT, cases, composed

from rlx.config.check.declared import CheckContext, conditions, unused_keys
from rlx.config.machine import Machine
from rlx.config.schema.tree import LEAVES

CASES = cases("unused")


def setting(command: str, machine: Machine) -> CheckContext:
    found = composed(*command.split())
    return CheckContext(found.config, found.set_keys, machine)


@pytest.mark.parametrize(("command", "keys"), CASES, ids=[case[0] for case in CASES])
def test_keys_without_effect_are_found_and_no_others(cpu_machine: Machine, command: str, keys: list[str]):
    found = unused_keys(setting(command, cpu_machine))
    assert list(found) == [key for key in LEAVES if key in keys]
    assert all(found.values())


def test_every_declared_condition_has_a_case(cpu_machine: Machine):
    reached = set()
    for command, keys in CASES:
        s = setting(command, cpu_machine)
        reached |= {each.why for key in keys for each in conditions()[key] if each.holds(s)}
    assert {each.why for found in conditions().values() for each in found} - reached == set()


@pytest.mark.parametrize(
    "command",
    [
        "",
        f"{ROLLOUT}.enforce_eager=False {ROLLOUT}.gpu_memory_utilization=0.5 algorithm.gamma=1 trainer.critic_warmup=0",
        f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.1 {REF}.log_prob_micro_batch_size_per_gpu=4",
        f"{GAE} trainer.critic_warmup=3 algorithm.lam=0.9",
        "trainer.save_freq=5 trainer.max_actor_ckpt_to_keep=1",
    ],
)
def test_defaults_and_keys_with_effect_are_silent(verdict, command: str):
    assert verdict(command.split()).warnings == ()


def test_values_of_packaged_files_are_not_the_users(verdict):
    # The experiment sets the reference's param_offload; on CPU it has no effect.
    assert not any("without effect" in warning for warning in verdict(["experiment=gsm8k_grpo_8gpu"]).warnings)


def test_one_warning_lists_all_keys(verdict):
    (warning,) = verdict(["algorithm.gamma=0.5", "trainer.critic_warmup=2", f"{ROLLOUT}.enforce_eager=True"]).warnings
    assert [line.split("=")[0].strip() for line in warning.splitlines()[1:]] == [
        f"{ROLLOUT}.enforce_eager",
        "algorithm.gamma",
        "trainer.critic_warmup",
    ]


def test_other_warnings(verdict):
    twice = [f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True", "algorithm.adv_estimator=rloo"]
    assert any("counts twice" in warning for warning in verdict(twice).warnings)
    assert "share 4 CPU cores" in verdict(["trainer.n_gpus_per_node=8"]).warnings[0]
    warmed_up = ["trainer.critic_warmup=3", "algorithm.adv_estimator=gae"]
    assert "never learns" in verdict([*warmed_up, "trainer.total_training_steps=3"]).warnings[0]
    for enough in ("trainer.total_training_steps=4", "trainer.total_training_steps=null"):
        assert verdict([*warmed_up, enough]).warnings == ()


def test_own_rows_are_not_validated_on_generated_problems_without_a_word(verdict, tmp_path: Path):
    (tmp_path / "mine.jsonl").write_text("{}")
    own = [f"data.train_files={tmp_path}/mine.jsonl", "data.answer_key=answer"]
    for recipe in ([], ["experiment=qwen2.5_0.5b_1x24gb"]):
        assert any("validation is on generated problems" in each for each in verdict([*recipe, *own]).warnings)
    for enough in (
        ["trainer.val_before_train=False", "trainer.test_freq=-1"],
        [f"data.val_files={tmp_path}/mine.jsonl"],
    ):
        assert not any("generated problems" in each for each in verdict([*own, *enough]).warnings)


def test_a_key_that_could_not_be_read_is_not_warned_of(verdict):
    assert verdict(["algorithm.gamma=3", "trainer.critic_warmup=x"]).warnings == ()
