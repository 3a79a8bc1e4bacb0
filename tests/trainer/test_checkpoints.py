"""Run folders and checkpoints of the driver."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from run_tools import make

from rlx.checkpoint.manifest import damage, seal
from rlx.config.schema import AlgorithmConfig, PPOConfig, TrainerConfig
from rlx.supervisor import link
from rlx.trainer import checkpoints as ck
from rlx.trainer.run import continued


def config_in(folder, **trainer):
    base = PPOConfig()
    return replace(base, trainer=replace(base.trainer, default_local_dir=str(folder), **trainer))


def test_each_run_gets_a_folder_of_its_own_and_resuming_is_asked_for(tmp_path):
    config = config_in(tmp_path)
    first, second = ck.run_folder(config, None), ck.run_folder(config, None)
    assert first != second and first.parent == second.parent == tmp_path
    make(first, 2, "actor")
    assert ck.starting_checkpoint(config).checkpoint is None
    auto = ck.starting_checkpoint(config_in(tmp_path, resume_mode="auto")).checkpoint
    assert auto == first / "checkpoints" / "global_step_2"
    assert ck.run_folder(config, auto) == first


def test_auto_takes_the_latest_step_of_the_newest_run_whatever_the_times_of_files_are(tmp_path):
    config = config_in(tmp_path, resume_mode="auto")
    assert ck.starting_checkpoint(config) == (None, [])
    older = make(tmp_path / "2026-01-01_10-00-00", 50, "actor")
    newest = make(tmp_path / "2026-01-02_10-00-00", 10, "actor")
    make(tmp_path / "2026-01-02_10-00-00", 2, "actor")
    (tmp_path / "2026-01-02_10-00-00/checkpoints/.global_step_12.partial/actor").mkdir(parents=True)
    (tmp_path / "2026-01-03_10-00-00/checkpoints").mkdir(parents=True)
    for folder, seconds in ((newest, 1), (older, 9e8)):
        os.utime(folder / "driver.json", (seconds, seconds))
        os.utime(folder / "manifest.json", (seconds, seconds))
    assert ck.starting_checkpoint(config) == (newest, [])


def test_a_clock_that_goes_back_does_not_make_the_newest_run_an_old_one(tmp_path):
    config = config_in(tmp_path, resume_mode="auto")
    make(tmp_path / "2999-01-01_10-00-00_9", 50, "actor")
    runs = [ck.run_folder(config, None) for _ in range(2)]
    assert [run.name for run in runs] == ["2999-01-01_10-00-00_10", "2999-01-01_10-00-00_11"]
    make(runs[0], 3, "actor")
    assert ck.starting_checkpoint(config).checkpoint == runs[0] / "checkpoints/global_step_3"


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def resealed(checkpoint, text):
    """Replace the driver's state, and let the manifest fit, as another version would have written them."""
    (checkpoint / "driver.json").write_text(text)
    (checkpoint / "manifest.json").unlink()
    seal(checkpoint, {})


OF_ANOTHER_VERSION = ("later format", "later state", "earlier state")
DAMAGE = {
    "flipped weights": (lambda c: flipped(c / "actor/weights"), "actor/weights: bytes 0 to 256 have changed"),
    "missing": (lambda c: (c / "actor/weights").unlink(), "actor/weights: is missing"),
    "another step's": (lambda c: c.rename(c.parent / "global_step_9"), "got the state of step 3, expected 9"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "manifest.json: is missing"),
    "later format": (
        lambda c: (c / "manifest.json").write_text('{"format": 3}'),
        "was written by a later version of rlx: got format 3, this version reads 2",
    ),
    "state of lists": (lambda c: resealed(c, "[3]"), "driver.json: got a JSON list, expected an object"),
    "later state": (
        lambda c: resealed(c, json.dumps({**json.loads((c / "driver.json").read_text()), "curriculum": 1})),
        "driver.json: was written by another version of rlx: it has curriculum, which this version does not know; resume with",
    ),
    "earlier state": (
        lambda c: resealed(c, '{"step": 3}'),
        "driver.json: was written by another version of rlx: it has no first_validation, kl_controller, ",
    ),
}
"""What the driver does about damage; tests/engine/test_damaged_checkpoints.py has all kinds of it."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_by_auto_and_refused_if_it_is_named(damage, tmp_path):
    harm, said = DAMAGE[damage]
    whole, harmed = (make(tmp_path / "run", step, "actor") for step in (2, 3))
    harm(harmed)
    harmed = ck.checkpoints_in(whole.parent)[-1]
    auto = ck.starting_checkpoint(config_in(tmp_path, resume_mode="auto"))
    assert auto.checkpoint == whole
    assert re.search(f"passed over {harmed.name}: .*{said}", "; ".join(auto.passed_over))
    named = config_in(tmp_path, resume_mode="resume_path", resume_from_path=str(harmed))
    with pytest.raises(ck.ResumeError, match=rf"{said}.*; name {whole}, or set trainer.resume_mode=auto"):
        ck.starting_checkpoint(named)
    shutil.rmtree(whole)
    with pytest.raises(ck.ResumeError, match=rf"{said}.*; name one of another run, or start a new run"):
        ck.starting_checkpoint(named)
    validating = config_in(tmp_path, resume_mode="auto", val_only=True)
    with pytest.raises(ck.ResumeError, match="no checkpoint can be used: passed over"):
        ck.starting_checkpoint(validating)
    if damage not in OF_ANOTHER_VERSION:
        assert ck.starting_checkpoint(config_in(tmp_path, resume_mode="auto")) == (None, auto.passed_over), (
            "it starts from scratch"
        )
        return
    with pytest.raises(ck.ResumeError, match="no checkpoint can be used: passed over"):
        ck.starting_checkpoint(config_in(tmp_path, resume_mode="auto"))


@pytest.mark.parametrize(
    ("name", "words"), [("elsewhere", "global_step_N"), ("global_step_7", "without manifest.json")]
)
def test_a_path_that_is_no_finished_checkpoint_is_refused(tmp_path, name, words):
    (tmp_path / name).mkdir()
    config = config_in(tmp_path, resume_mode="resume_path", resume_from_path=str(tmp_path / name))
    with pytest.raises(ck.ResumeError, match=words):
        ck.starting_checkpoint(config)


def test_only_the_newest_are_kept_for_each_role(tmp_path):
    made = [make(tmp_path, step, "actor", "critic") for step in (1, 2, 10)]
    ck.keep_newest(tmp_path / "checkpoints", "actor", 1)
    assert [(m / "actor").exists() for m in made] == [False, False, True]
    assert [ck.is_finished(m) for m in made] == [False, False, True]
    assert all((m / "critic").exists() for m in made)
    ck.keep_newest(tmp_path / "checkpoints", "critic", 2)
    assert [m.exists() for m in made] == [False, True, True]
    ck.keep_newest(tmp_path / "checkpoints", "critic", None)
    assert made[1].exists()


def test_checkpoints_of_steps_that_a_run_repeats_are_set_aside(tmp_path):
    for step in (2, 4, 10):
        make(tmp_path, step, "actor")
    folder = tmp_path / "checkpoints"
    (folder / "superseded/global_step_10").mkdir(parents=True)
    assert ck.set_aside_later(folder, 2) == ["global_step_10", "global_step_4"]
    assert ck.newest_whole(folder).checkpoint == folder / "global_step_2"
    assert sorted(os.listdir(folder / "superseded")) == ["global_step_10", "global_step_4"]
    assert damage(folder / "superseded/global_step_10") == []
    assert ck.set_aside_later(folder, 2) == []


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
    (alone / "actor/checkpoint.json").write_text('{"format": 2, "rank": 8}')
    with pytest.raises(ck.ResumeError, match=r"actor/checkpoint\.json was written by another version of rlx"):
        ck.require_parts(grpo, alone)


def test_the_restart_of_a_validation_begins_as_it_did(monkeypatch, tmp_path):
    monkeypatch.setenv(link.FOLDER, str(tmp_path))
    trainer = TrainerConfig(resume_mode="resume_path", resume_from_path="elsewhere", val_only=True)
    config = PPOConfig(trainer=trainer)
    assert continued(config) is config
    trains = replace(config, trainer=replace(trainer, val_only=False))
    assert continued(trains).trainer.resume_mode == "disable", (
        "a training goes on in its own folder, here without a checkpoint"
    )
