"""Run folders and checkpoints of the driver."""

import json
from dataclasses import replace

import pytest

from rlx.checkpoint.manifest import seal
from rlx.config.schema import AlgorithmConfig, PPOConfig
from rlx.trainer import checkpoints as ck

STATE = ck.DriverState(
    step=3,
    seed=1,
    policy_version=4,
    sampler={"epoch": 0, "position": 6},
    kl_controller={"coef": 0.1},
    skipped_steps=0,
    first_validation={"val/accuracy": 0.25},
)


def config_in(folder, **trainer):
    base = PPOConfig()
    return replace(base, trainer=replace(base.trainer, default_local_dir=str(folder), **trainer))


def make(run, step, *roles):
    folder = run / "checkpoints" / f"global_step_{step}"
    for role in roles:
        (folder / role).mkdir(parents=True)
    ck.write_driver_state(folder, replace(STATE, step=step))
    seal(folder, {})
    return folder


def test_state_comes_back_as_written(tmp_path):
    folder = make(tmp_path, 3, "actor")
    assert ck.read_driver_state(folder) == STATE
    assert not list(folder.glob("*.part"))


def test_each_run_gets_a_folder_of_its_own_and_resuming_is_asked_for(tmp_path):
    config = config_in(tmp_path)
    first, second = ck.run_folder(config, None), ck.run_folder(config, None)
    assert first != second and first.parent == second.parent == tmp_path
    make(first, 2, "actor")
    assert ck.starting_checkpoint(config) is None
    auto = ck.starting_checkpoint(config_in(tmp_path, resume_mode="auto"))
    assert auto == first / "checkpoints" / "global_step_2"
    assert ck.run_folder(config, auto) == first


def test_auto_takes_the_newest_finished_one_and_starts_anew_without_any(tmp_path):
    config = config_in(tmp_path, resume_mode="auto")
    assert ck.starting_checkpoint(config) is None
    make(tmp_path / "a", 2, "actor")
    newest = make(tmp_path / "a", 10, "actor")
    (tmp_path / "a/checkpoints/global_step_12/actor").mkdir(parents=True)
    assert ck.starting_checkpoint(config) == newest


@pytest.mark.parametrize(("name", "words"), [("elsewhere", "global_step_N"), ("global_step_7", "without driver.json")])
def test_a_path_that_is_no_finished_checkpoint_is_refused(tmp_path, name, words):
    (tmp_path / name).mkdir()
    config = config_in(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / name))
    with pytest.raises(ck.ResumeError, match=words):
        ck.starting_checkpoint(config)


def test_only_the_newest_are_kept_for_each_role(tmp_path):
    made = [make(tmp_path, step, "actor", "critic") for step in (1, 2, 10)]
    ck.keep_newest(tmp_path / "checkpoints", "actor", 1, 10)
    assert [(m / "actor").exists() for m in made] == [False, False, True]
    assert [ck.finished(m) for m in made] == [False, False, True]
    assert all((m / "critic").exists() for m in made)
    ck.keep_newest(tmp_path / "checkpoints", "critic", 2, 10)
    assert [m.exists() for m in made] == [False, True, True]
    ck.keep_newest(tmp_path / "checkpoints", "critic", None, 10)
    assert made[1].exists()


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [2, 4]), (3, [2, 4, 10])])
def test_after_resuming_from_before_the_one_just_written_is_the_newest(tmp_path, keep, left):
    for step in (2, 10, 4):
        make(tmp_path, step, "actor")
    ck.keep_newest(tmp_path / "checkpoints", "actor", keep, 4)
    assert [ck.step_of(c) for c in ck.checkpoints_in(tmp_path / "checkpoints")] == left


def test_a_checkpoint_being_written_anew_is_not_finished(tmp_path):
    folder = make(tmp_path, 3, "actor")
    ck.reopen(folder)
    assert not ck.finished(folder) and (folder / "actor").is_dir()
    ck.write_driver_state(folder, STATE)
    assert ck.finished(folder)
    ck.reopen(tmp_path / "checkpoints" / "global_step_4")  # of one that is new there is nothing to take


def described(run, **roles):
    """A checkpoint whose roles say so much of themselves: their contents, and whether they have adapters."""
    folder = make(run, 3, *roles)
    for role, (contents, adapters) in roles.items():
        about = {"contents": contents, "adapters": {"layer": [1.0, False]} if adapters else {}}
        (folder / role / "checkpoint.json").write_text(json.dumps(about))
    return folder


def with_rank(config, rank):
    policy = config.actor_rollout_ref
    return replace(config, actor_rollout_ref=replace(policy, model=replace(policy.model, lora_rank=rank)))


def test_a_checkpoint_has_what_the_run_goes_on_from(tmp_path):
    ppo, whole = PPOConfig(), (["model", "optimizer"], False)
    grpo = replace(ppo, algorithm=AlgorithmConfig(adv_estimator="grpo"))
    ck.require_parts(ppo, described(tmp_path / "a", actor=whole, critic=whole))
    alone = described(tmp_path / "b", actor=whole)
    ck.require_parts(grpo, alone)
    with pytest.raises(ck.ResumeError, match=r"there is no critic in it, only \['actor'\]"):
        ck.require_parts(ppo, alone)
    adapted = described(tmp_path / "c", actor=(["model"], True), critic=(["optimizer"], False))
    ck.require_parts(with_rank(grpo, 4), adapted)
    with pytest.raises(ck.ResumeError) as caught:
        ck.require_parts(ppo, adapted)
    assert "its actor has LoRA adapters, but actor_rollout_ref.model.lora_rank=0" in str(caught.value)
    assert "its critic holds ['optimizer'] without the model" in str(caught.value)
    with pytest.raises(ck.ResumeError, match=r"its actor has no LoRA adapters, but .*lora_rank=4"):
        ck.require_parts(with_rank(grpo, 4), alone)
