"""Environments of verifiers: their episodes become samples, with the rewards and metrics that the package gives."""

import importlib.util
import math
import shutil
import sys
from pathlib import Path

import pytest
from in_this_process import VLLM, Recording, batch_of, conversations, rows_of, sampling

from rlx.environments.spec import EnvironmentSpec
from rlx.models.tiny import make_tiny_tokenizer
from rlx.user_code import UserCodeError

has_it = importlib.util.find_spec("verifiers") is not None
needs_it = pytest.mark.skipif(not has_it, reason="verifiers is not installed: pip install 'verifiers>=0.4,<0.5'")
SUMS = Path(__file__).parents[1] / "fixtures" / "verifiers_sums.py"
TASK = '{"prompt": "7?", "system_prompt": "s", "answer": "7"}'


def played(path, answers, *kwargs):
    """Return the batch of one task that the policy answers so."""
    tiny, answers = make_tiny_tokenizer(), iter(answers)
    batch = batch_of(tiny, [""])
    batch.info["extra_info"] = [{"task": TASK}]
    kwargs = (f"environment.kwargs.{each}" for each in ("agent.runtime.type=subprocess", *kwargs))
    sampler = conversations(tiny, f"environment.path={path}", "environment.name=verifiers", *kwargs, *VLLM)
    return sampler.generate(Recording(tiny, lambda request: (next(answers), True)), batch, sampling(tiny))


@needs_it
@pytest.mark.slow
def test_attempts_that_are_scored_against_each_other_are_rows_of_one_sample(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RLX_API_KEY": "of rlx serve", "http_proxy": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    found = played(SUMS, ["no", "no", "7", "7"], "id=best-of-n", "n=2")
    (own,) = found.info["conversation"]
    assert own["reason"] == "done", own["reason"] + own["traceback"]
    assert own["reward"] == (2 / 16 + 0.5 + 1 / 16) / 2 and len(rows_of(found, 0)[1]) == 2
    assert own["info"] == {"right": 0.5, "begun": 1.5 / 16, "turns": 2.0, "best": 0.5, "pass_at_n": 0.0}


@needs_it
@pytest.mark.slow
def test_an_agent_that_is_not_to_be_trained_may_not_call_the_policy(tmp_path):
    path = tmp_path / "frozen_sums.py"
    path.write_text(SUMS.read_text().replace("IS_FROZEN = False", "IS_FROZEN = True"))
    (own,) = played(path, "78").info["conversation"]
    assert own["failed"] and "the agent 'agent' is not to be trained and calls the policy" in own["reason"]


@needs_it
@pytest.mark.slow
def test_a_file_with_the_name_of_a_module_is_rejected(tmp_path, monkeypatch):
    for name in ("math.py", "sums.py"):
        shutil.copy(SUMS, tmp_path / name)
    with pytest.raises(UserCodeError, match=r"math\.py has the name of the module math \(.*\); rename the file"):
        EnvironmentSpec("verifiers", str(tmp_path / "math.py")).load()
    assert sys.modules["math"] is math
    monkeypatch.syspath_prepend(tmp_path)  # as that of a script in the same folder
    for _ in range(2):
        EnvironmentSpec("verifiers", str(tmp_path / "sums.py")).load()


@pytest.mark.slow
def test_what_verifiers_cannot_load_is_rejected_before_a_run():
    fault = "(?s)verifiers cannot load .*its `env` block, such as" if has_it else "needs verifiers>=0.4,<0.5"
    with pytest.raises(UserCodeError, match=fault):
        EnvironmentSpec("verifiers", kwargs={"env_id": "wordle"}).load()
