"""The command `rlx eval`: the numbers of validation, from a run, its checkpoints or a Hugging Face folder."""

import json

import pytest
import ray
from run_tools import make

from rlx.config.compose.command_line import compose
from rlx.export import main as export
from rlx.trainer import validation
from rlx.trainer.checkpoints import ResumeError
from rlx.trainer.evaluate import command_of, main, table
from rlx.trainer.finished import Policy, policies_at
from rlx.trainer.run_lock import RunLock
from rlx.trainer.tracking import finite

SAMPLED = [f"actor_rollout_ref.rollout.val_kwargs.{each}" for each in ("n=2", "do_sample=True", "temperature=1.0")]


@pytest.mark.e2e
@pytest.mark.slow
def test_an_evaluation_has_the_numbers_of_the_run_s_own_validation(train, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("reward.py").write_text(
        "def score(data_source, solution_str, **_):\n    return len(set(solution_str)) / 16"
    )
    own = [f"custom_reward_function=[{{path: {tmp_path}/reward.py, name: score, metric: mine}}]", "trainer.seed=3"]
    steps = [f"trainer.{each}" for each in ("total_training_steps=2", "save_freq=1", "test_freq=1")]
    run, metrics = train(*steps, "algorithm.adv_estimator=gae", *own, *SAMPLED)
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)  # the drivers take this one
    with RunLock(run):  # as if it still trained
        assert main([str(run), "--all", "--out", str(tmp_path / "found.json")]) == 0, capfd.readouterr().err
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["step"] for each in found] == [1, 2]
    for each in found:
        assert each["metrics"] == {name: metrics[each["step"]][name] for name in each["metrics"]}
        names = [row["name"] for row in each["rows"]]
        assert (
            names == ["avg@2", "pass@2", "reward avg@2"] and each["rows"][2]["value"] == each["metrics"]["val/reward"]
        )
    (one, two) = sorted(run.glob("evaluations/*/[12].jsonl"), key=lambda file: file.name)
    assert [one.read_text(), two.read_text()] == [(run / f"validation/{step}.jsonl").read_text() for step in (1, 2)]
    assert before == {file: file.stat().st_mtime_ns for file in before}, "the run itself is left alone"
    assert '/reward.py": [' in next(run.glob("evaluations/*/settings.json")).read_text(), "another file, other numbers"
    output = capfd.readouterr().out
    assert "global_step_1" in output and "pass@2" in output
    main([str(run / "checkpoints/global_step_2"), "--out", str(tmp_path / "again.json")])
    assert "Ray" not in capfd.readouterr().out and json.loads((tmp_path / "again.json").read_text()) == found[1:]

    assert export([str(run / "checkpoints/global_step_2"), str(tmp_path / "model")]) == 0
    settings = [
        each for each in policies_at(str(run))[0].overrides if not each.startswith("actor_rollout_ref.model.path")
    ]
    assert main([str(tmp_path / "model"), *settings]) == 2
    assert "expected rows that your reward function can score" in " ".join(capfd.readouterr().err.split())
    settings += ["data.val_files=builtin:arithmetic", "--out", str(tmp_path / "of_model.json")]
    assert main([str(tmp_path / "model"), *settings]) == 0
    (of_model,) = json.loads((tmp_path / "of_model.json").read_text())
    assert of_model["metrics"] == found[1]["metrics"]


def test_every_setting_of_a_run_becomes_an_override(tmp_path, capsys):
    given = ["actor_rollout_ref.model.path='a b/it''s'".replace("''", "\\'"), "data.val_files=[x.jsonl,'y, z.jsonl']"]
    given += [
        "actor_rollout_ref.rollout.stop=['</answer>',\"'\",'a\\\\']",
        "environment.kwargs={turns:3,a\\:b:4,words:[null,'true',1.5e-07]}",
    ]
    given += ["data.max_prompt_length=77", "actor_rollout_ref.rollout.top_k=3", "trainer.project_name=dropped"]
    composed = compose(given)
    assert not composed.faults
    run = tmp_path / "run"
    run.mkdir()
    run.joinpath("config.yaml").write_text(composed.yaml)
    # A resume from step 3
    run.joinpath("config_2_from_step_3.yaml").write_text("data.max_prompt_length: {before: 77, now: 5}")
    make(run, 3, "actor")
    make(run, 4, "actor").joinpath("driver.json").write_text("{}")
    (policy,) = policies_at(str(run))
    assert policies_at(str(run), every=True) == [policy] and capsys.readouterr().err.count("over global_step_4") == 2
    again = compose(policy.overrides)
    changed = compose([*given, "trainer.project_name=rlx", "trainer.seed=1"])
    assert not again.faults and again.yaml == changed.yaml
    assert policy.with_given(["data.max_prompt_length=5"]).count("data.max_prompt_length=5") == 1
    assert "data.max_prompt_length=77" not in policy.with_given(["data.max_prompt_length=5"])
    with pytest.raises(ResumeError, match=r"reward_model\.key: .* secret"):
        Policy(run, None, [], ("reward_model.key",)).with_given(["a=1"])
    secret = "custom_reward_function.reward_kwargs={api_key:hidden-text}"
    folder, overrides = command_of(policy, [f"data.val_files={tmp_path}/r*/config.yaml", secret])
    told = (folder / "settings.json").read_text()
    assert "hidden-text" not in told and "/run/config.yaml" in told and secret in overrides


def test_a_run_on_rows_of_its_own_is_not_evaluated_on_generated_problems(tmp_path, capfd):
    own = ["data.train_files=mine.jsonl", "data.answer_key=answer", "custom_reward_function.path=reward.py"]
    run = make(tmp_path / "run", 3, "actor").parent.parent
    run.joinpath("config.yaml").write_text(compose([*own, "trainer.test_freq=-1"]).yaml)
    assert main([str(run)]) == 2
    told = " ".join(capfd.readouterr().err.split())
    assert "validation is on generated problems" in told and "say, or trainer" not in told


def test_other_paths_are_rejected_with_what_is_there(tmp_path, capsys):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("")
    (tmp_path / "other=1").mkdir()
    (tmp_path / "other=1/notes.txt").write_text("")
    told = {
        "runn": "does not exist, expected a run.* has other=1, run",
        "run": "a run without a checkpoint.* wait until the run saves",
        "other=1": "got a folder with notes.txt, expected a run",
        "s3://bucket/run": "got a URL, expected a run.* download it",
    }
    for name, text in told.items():
        with pytest.raises(ResumeError, match=text):
            policies_at(name if "://" in name else str(tmp_path / name))
    assert main([str(tmp_path / "other=1")]) == 2
    assert "got a folder with notes.txt" in " ".join(capsys.readouterr().err.split())


def test_a_table_tells_runs_apart_and_has_no_interval_of_one_prompt():
    own = finite(validation.Estimate("x", "avg@1", 1.0, *[float("nan")] * 2, 1)._asdict())
    metrics = {"val/accuracy": 1.0, "val/reward": 1.0}
    found = [{"policy": f"/runs/{run}/global_step_2", "metrics": metrics, "rows": [own]} for run in "ab"]
    cells = [[*column.cells] for column in table(json.loads(json.dumps(found, allow_nan=False))).columns]
    assert (cells[0], cells[3]) == (["a/global_step_2", "b/global_step_2"], ["1.000", "1.000"])
