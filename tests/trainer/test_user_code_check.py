"""Code of the user's own is tried before anything starts."""

import os
from dataclasses import replace

import pytest

from rlx.config.compose.command_line import compose
from rlx.config.machine import Machine
from rlx.trainer.try_inputs import SILENT_S, check_user_code

CODE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...

def policy_loss(log_probs, old_log_probs, advantages, mask, settings): ...

def short(a): ...

class Data:
    def __init__(self, files, config, tokenizer, split): ...
"""
CPU = Machine(gpus=0, cpus=2, packages=frozenset())
REWARD, LOSS, DATA = "custom_reward_function", "actor_rollout_ref.actor.policy_loss", "data.custom_cls"


@pytest.fixture
def tried(tmp_path):
    """tried(text, *overrides): the verdict on a command whose three paths, as far as it sets the names, are a file of this text."""

    def of(text, *overrides, machine=CPU):
        (tmp_path / "mine.py").write_text(text)
        paths = [f"{key}.path={tmp_path}/mine.py" for key in (REWARD, LOSS, DATA) if any(key in o for o in overrides)]
        composed = compose([*paths, *(each.replace("PATH", f"{tmp_path}/mine.py") for each in overrides)])
        return check_user_code(composed.partial, composed.broken, machine)

    return of


NAMED = (f"{REWARD}.name=compute_score", f"{LOSS}.name=policy_loss", f"{DATA}.name=Data")


def test_what_can_be_used_has_no_faults(tried):
    assert tried(CODE, *NAMED) == ((), ())
    assert tried("raise ValueError") == ((), ()), "nothing of the user's own is asked for"


def test_all_faults_come_together_and_say_what_to_do(tried):
    reward, loss, data = tried(CODE, f"{REWARD}.name=compute_scor", f"{LOSS}.name=short", f"{DATA}.name=short").faults
    assert reward.what.startswith("the reward function") and "did you mean compute_score?" in reward.got
    assert reward.expected.startswith("compute_scor(data_source, solution_str, ground_truth, extra_info)")
    assert loss.what.startswith("the policy loss") and "(too many positional arguments)" in loss.got
    assert loss.expected == "short(log_probs, old_log_probs, advantages, mask, settings)"
    assert (
        data.what.startswith("the dataset class") and data.remedy == f"correct the file or {DATA}.path or {DATA}.name"
    )


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("+custom_reward_function.reward_kwargs.factor=2", "unexpected keyword argument 'factor'"),
        ("reward.reward_manager.name=batch", "set reward.reward_manager.name=naive"),
    ],
)
def test_a_reward_function_must_take_what_the_other_keys_say(tried, override, what):
    (fault,) = tried(CODE, f"{REWARD}.name=compute_score", override).faults
    assert what in fault.got


SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): "


@pytest.fixture
def scored(tried, tmp_path):
    """scored(text, *overrides): the verdict on a reward function with this body, for a file of one row."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Three words, please.", "answer": "a b c", "level": 2}\n')
    row = (f"data.train_files={tmp_path}/rows.jsonl", "data.answer_key=answer", "data.train_batch_size=1")

    def of(body, *overrides):
        return tried(SCORE + body, f"{REWARD}.name=compute_score", *row, *overrides)

    return of


def test_a_reward_function_is_tried_with_the_first_row(scored):
    told = 'assert (solution_str, ground_truth, extra_info["level"]) == ("a b c", "a b c", 2); return 1'
    assert scored(told) == ((), ())


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return float('nan')", "returned nan, expected a finite number"),
        ("return extra_info['difficulty']", "raised KeyError: 'difficulty' (line 1)"),
    ],
)
def test_a_reward_function_that_fails_with_the_first_row_is_refused(scored, body, what):
    (fault,) = scored(body).faults
    assert fault.what == "the reward function of your own fails" and what in fault.got and "'a b c'" in fault.got
    assert fault.remedy == "correct the function, or let such samples score 0: reward.on_error=zero"
    verdict = scored(body, "reward.on_error=zero")
    assert verdict.faults == () and what in verdict.warnings[0]


def test_each_part_of_the_reward_is_tried_with_the_first_row(scored):
    judge = "{model: q, base_url: 'http://127.0.0.1:9/v1', template: /no/file}"
    parts = f"{REWARD}.parts=[{{path: PATH, metric: a}}, {{metric: rule}}, {judge}]"
    none, judge = scored("pass", f"{REWARD}.path=null", parts).faults
    assert none.what == "the part a of the reward fails" and "returned None" in none.got
    assert (
        judge.what == "the part judge of the reward cannot be used" and "parts[2].template: got '/no/file'" in judge.got
    )


def test_a_slow_reward_function_is_no_fault(scored):
    verdict = scored("import time; time.sleep(60)", "reward.timeout_s=0.5", "reward.on_crash=stop")
    assert verdict.faults == () and "took longer than 0.5 s for one response" in verdict.warnings[0]


def test_a_reward_function_of_other_rows_is_not_tried(scored):
    assert scored("pass", f"{REWARD}.data_sources=[my/data]") == ((), ())
    assert scored("pass", "environment.name=python") == ((), ())


GAME = """
class Game:
    def reset(self, row):
        assert row["prompt"] == [{"role": "user", "content": "Three words, please."}] and row["seed"] == 0
        return [{"role": "user", "content": row["extra_info"]["BODY"]}]
    def step(self, turn): ...
"""


@pytest.mark.parametrize("key", ["level", "difficulty"])
def test_the_reset_of_an_environment_is_tried_with_the_first_row(tried, scored, tmp_path, key):
    (tmp_path / "game.py").write_text(GAME.replace('["BODY"]', f'["{key}"].__class__.__name__'))
    game = (f"environment.path={tmp_path}/game.py", "environment.name=Game", "environment.rewards=replace")
    rows = (f"data.train_files={tmp_path}/rows.jsonl", "data.answer_key=answer", "data.train_batch_size=1")
    verdict, strict = tried("", *game, *rows), tried("", *game, *rows, "environment.on_failure=end_run")
    if key == "level":
        assert verdict == strict == ((), ())
        return
    what = "raised KeyError (game.py:5): 'difficulty'"
    assert verdict.faults == () and verdict.warnings == (f"the environment, tried with the first training row, {what}",)
    (fault,) = strict.faults
    assert fault.what == "the environment fails" and fault.got == f"with the first training row, its reset {what}"


def test_async_functions_and_functions_of_a_batch_are_tried_too(tried, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    row = (f"data.train_files={tmp_path}/rows.jsonl", "data.answer_key=answer")
    (fault,) = tried(f"async {SCORE} return None", f"{REWARD}.name=compute_score", *row).faults
    assert "returned None" in fault.got
    text = "def compute_score(data_sources, solution_strs, ground_truths, extra_infos): return 1.0"
    (fault,) = tried(text, f"{REWARD}.name=compute_score", "reward.reward_manager.name=batch", *row).faults
    assert "returned 1.0, expected a list of 1 numbers or dicts" in fault.got


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import os\nos._exit(3)", "ended its process (exit code 3)"),
        ("import sys\nsys.exit()", "failed with SystemExit"),
        ("x = 1 / 0", "failed with ZeroDivisionError: division by zero (line 1)"),
    ],
)
def test_an_import_that_ends_the_process_does_not_end_the_driver(tried, text, what):
    faults = tried(text, *NAMED).faults
    assert len(faults) == 3 and all(what in fault.got for fault in faults)


def test_an_import_leaves_nothing_in_the_driver(tried):
    assert tried(f"import os\nos.environ['RLX_IMPORTED'] = '1'\n{CODE}", *NAMED) == ((), ())
    assert "RLX_IMPORTED" not in os.environ


def test_a_key_that_could_not_be_read_is_not_reported_twice(tried):
    assert tried("", f"{REWARD}.name=[1,2]", f"{LOSS}.nam=policy_loss") == ((), ())


def test_a_file_that_is_not_there_is_the_rules_affair(tmp_path):
    composed = compose([f"{key}.path={tmp_path}/none.py" for key in (REWARD, LOSS, DATA)])
    assert check_user_code(composed.partial, composed.broken, CPU) == ((), ())


def test_a_driver_without_gpu_only_warns_of_a_loss_that_needs_one(tried):
    """Of a driver whose own node has none; what is no matter of the machine stays a fault."""
    driver = replace(CPU, gpus=0)
    overrides = (f"{LOSS}.name=policy_loss", "trainer.device=cuda")
    faults, (warning,) = tried("import a_package_for_gpus", *overrides, machine=driver)
    assert not faults and "a_package_for_gpus" in warning and "no GPU" in warning
    assert len(tried("", *overrides, machine=driver).faults) == 1
    assert len(tried("import a_package_for_gpus", *overrides, machine=replace(CPU, gpus=1)).faults) == 1


@pytest.mark.slow
def test_a_long_import_is_not_silent(tried, capsys):
    slow = f"import time; time.sleep({SILENT_S + 1})"
    assert tried(f"{slow}\n{CODE}", f"{REWARD}.name=compute_score").faults == ()
    (line,) = capsys.readouterr().err.splitlines()[:1]
    assert "the import of the reward function of your own is not done yet" in line
