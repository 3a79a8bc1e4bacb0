import os
import re
import stat
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from run_tools import STATE

from rlx.config.compose.command_line import compose
from rlx.config.schema.tree import LEAVES
from rlx.trainer.checkpoints import ResumeError, require_parts, write_driver_state
from rlx.trainer.resume_config import FREE, OF_THE_RESUME, REFUSED, SAID, changes, keep, longer

LR = "actor_rollout_ref.actor.optim.lr"
MODEL = ["actor_rollout_ref.model.path=m", "data.train_files=a.jsonl"]


def text(*overrides: str) -> str:
    composed = compose([*MODEL, *overrides])
    assert not composed.faults
    return composed.yaml


def resume(folder: Path, step: int, *overrides: str) -> list[str]:
    return keep(folder, text(*overrides), step, changes(folder, step, text(*overrides)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that began with a learning rate of 1e-6."""
    assert keep(tmp_path, text(f"{LR}=1e-6"), 0, []) == []
    return tmp_path


def test_every_pattern_names_a_key():
    for pattern in (*FREE, *SAID, *OF_THE_RESUME, *(key for keys in REFUSED.values() for key in keys)):
        assert any(fnmatchcase(key, pattern) for key in LEAVES), pattern


def modes_of_the_umask() -> int:
    umask = os.umask(0o022)
    os.umask(umask)
    return 0o666 & ~umask


def test_an_unchanged_resume_says_and_writes_nothing(run: Path):
    assert resume(run, 40, f"{LR}=1e-6", "trainer.resume_mode=auto") == []
    assert [file.name for file in run.iterdir()] == ["config.yaml"]
    assert stat.S_IMODE((run / "config.yaml").stat().st_mode) == modes_of_the_umask()


def test_changes_are_said_and_kept_in_a_file_of_their_own(run: Path):
    before = (run / "config.yaml").read_text()
    told = resume(run, 40, f"{LR}=2e-6", "data.train_batch_size=512", "trainer.save_freq=7")
    assert told == [
        "from step 40 on the run trains differently: data.train_batch_size: 1024 -> 512",
        f"from step 40 on the run trains differently: {LR}: 1e-06 -> 2e-06",
        "changed from step 40 on, with the same results: trainer.save_freq: -1 -> 7",
    ]
    assert (run / "config.yaml").read_text() == before
    kept = yaml.safe_load((run / "config_2_from_step_40.yaml").read_text())
    assert kept[LR] == {"before": 1e-6, "now": 2e-6} and len(kept) == 3
    assert stat.S_IMODE((run / "config_2_from_step_40.yaml").stat().st_mode) == modes_of_the_umask()


def test_samplers_of_their_own_train_differently_only_with_rounds_of_tokens(tmp_path: Path):
    rounds, own = "actor_rollout_ref.rollout.partial.max_staleness", "trainer.n_rollout_gpus"
    differs, same = "from step 4 on the run trains differently: ", "changed from step 4 on, with the same results: "
    for staleness, before, now, said in [(2, 0, 1, differs), (2, 2, 1, same), (0, 0, 1, same)]:
        folder, key = tmp_path / f"{staleness}_{before}", f"{rounds}={staleness}"
        folder.mkdir()
        keep(folder, text(key, f"{own}={before}"), 0, [])
        assert resume(folder, 4, key, f"{own}={now}") == [f"{said}{own}: {before} -> {now}"]


@pytest.mark.parametrize(
    ("keys", "is_calm"),
    [
        ((), True),
        ((f"{LR}_warmup_steps=5",), True),
        ((f"{LR}_warmup_steps_ratio=0.1",), False),
        ((f"{LR}_scheduler_type=cosine",), False),
        (("critic.optim.lr_scheduler_type=linear",), False),
        (("critic.optim.lr_scheduler_type=linear", "algorithm.adv_estimator=grpo"), True),
    ],
)
def test_more_steps_are_said_calmly_if_no_schedule_depends_on_them(
    tmp_path: Path, keys: tuple[str, ...], is_calm: bool
):
    keep(tmp_path, text(*keys, "trainer.total_training_steps=4"), 0, [])
    now = text(*keys, "trainer.total_training_steps=8")
    changed = changes(tmp_path, 4, now)
    told, calm = keep(tmp_path, now, 4, changed), list(longer(changed, now).values())
    if is_calm:
        assert (told, calm) == ([], ["continues to step 8 instead of 4"])
    else:
        assert (told, calm) == (["from step 4 on the run trains differently: trainer.total_training_steps: 4 -> 8"], [])
    assert "trainer.total_training_steps" in (tmp_path / "config_2_from_step_4.yaml").read_text()


def test_a_resume_compares_with_the_settings_that_led_to_its_step(run: Path):
    resume(run, 40, f"{LR}=2e-6")
    assert resume(run, 60, f"{LR}=2e-6") == []
    assert resume(run, 20, f"{LR}=1e-6") == [], "step 20 was trained with the first settings"
    assert yaml.safe_load((run / "config_3_from_step_20.yaml").read_text()) == {}
    assert resume(run, 50, f"{LR}=1e-6") == [], "the changes of step 40 are undone"
    assert len(resume(run, 50, f"{LR}=3e-6")) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("actor_rollout_ref.model.path=other", "the starting model"),
        ("data.train_files=[a.jsonl,b.jsonl]", "the prompts and their order"),
        ("data.seed=7", "the prompts and their order"),
        ("algorithm.adv_estimator=grpo", "the estimator"),
        ("actor_rollout_ref.model.lora_rank=8", "the starting model"),
    ],
)
def test_what_the_saved_state_belongs_to_is_refused_and_all_at_once(run: Path, change: str, why: str):
    key, _, value = change.partition("=")
    with pytest.raises(ResumeError) as refused:
        changes(run, 40, text(f"{LR}=1e-6", change, "algorithm.kl_ctrl.type=adaptive", "trainer.save_freq=7"))
    message = str(refused.value)
    assert (
        f"{key}: " in message
        and re.search(rf" -> {re.escape(value)}[^(]*\({why}", message)
        and "kl_ctrl.type: fixed -> adaptive" in message
    )
    assert "save_freq" not in message and "python -m rlx.export" in message
    assert "trainer.experiment_name=NAME, or trainer.resume_mode=disable" in message


def test_a_damaged_file_is_named(run: Path):
    (run / "config_2_from_step_3.yaml").write_text("a: [")
    with pytest.raises(ResumeError, match=r"config_2_from_step_3\.yaml: cannot be read as YAML"):
        changes(run, 40, text())
    (run / "config.yaml").write_text("7")
    with pytest.raises(ResumeError, match=r"config\.yaml: got a int, expected a mapping"):
        changes(run, 40, text())


def test_a_folder_without_a_configuration_gets_one(tmp_path: Path):
    assert changes(tmp_path, 40, text()) == []
    assert keep(tmp_path, text(), 40, []) == [] and (tmp_path / "config.yaml").is_file()


def test_rows_may_lie_elsewhere_if_the_checkpoint_knows_them(run: Path):
    moved = text(f"{LR}=1e-6", "data.train_files=moved.jsonl", "data.answer_key=answer")
    with pytest.raises(ResumeError, match=r"data.train_files: .*data.answer_key: "):
        changes(run, 40, moved)
    assert {change.key for change in changes(run, 40, moved, knows_rows=True)} >= {
        "data.train_files",
        "data.answer_key",
    }


def test_unfinished_samples_go_on_only_with_a_correction_and_without_stop_strings(tmp_path: Path):
    checkpoint = tmp_path / "checkpoints" / "global_step_3"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor" / "checkpoint.json").write_text('{"contents": ["model"], "adapters": false}')
    write_driver_state(checkpoint, replace(STATE, queue=[{"step": 4}]))

    def found(*overrides: str):
        composed = compose([*MODEL, "algorithm.adv_estimator=grpo", *overrides])
        require_parts(composed.config, checkpoint)
        return True

    with pytest.raises(
        ResumeError, match=r"max_staleness=0; set algorithm.*rollout_is=token, actor.*rollout\.stop=\[\]$"
    ):
        found("actor_rollout_ref.rollout.stop=['x']")
    assert found("algorithm.rollout_correction.rollout_is=sequence") and found("trainer.val_only=True")
    write_driver_state(checkpoint, STATE)
    (checkpoint / "queue.json").unlink()
    assert found("actor_rollout_ref.rollout.stop=['x']")
