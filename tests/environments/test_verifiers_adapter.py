"""Environments of verifiers, where the package is installed; elsewhere the message that says so."""

import asyncio
import importlib.util
import json
import sys

import pytest

from rlx.environments.protocol import Turn
from rlx.environments.spec import EnvironmentSpec
from rlx.environments.verifiers_adapter import Verifiers, write_rows
from rlx.user_code import UserCodeError

has_it = importlib.util.find_spec("verifiers") is not None
needs_it = pytest.mark.skipif(not has_it, reason="verifiers is not installed: pip install 'verifiers>=0.2,<0.4'")
PACKAGE = '''
import verifiers as vf
from datasets import Dataset

def load_environment(goal="yes"):
    class Asks(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return [{"role": "user", "content": f"really {len(messages)}?"}]

    def right(completion, answer, **kwargs):
        last = completion[-1]
        text = last["content"] if isinstance(last, dict) else last.content
        return 1.0 if text == answer else 0.25

    rows = [{"question": f"Say {goal}", "answer": goal}, {"question": "Say no", "answer": "no"}]
    return Asks(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=2)

def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)

def tools():
    rows = [{"question": "3+4?", "answer": "7"}]
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=vf.Rubric(funcs=[lambda **_: 1.0]), max_turns=5)
'''


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "rlx_asks.py").write_text(PACKAGE)
    (tmp_path / "rlx_adds.py").write_text(
        PACKAGE.replace("def load_environment", "def unused").replace("tools()", "load_environment()")
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.skipif(has_it, reason="verifiers is installed")
def test_without_the_package_the_message_says_how_to_get_it():
    with pytest.raises(UserCodeError, match=r"needs the package verifiers .*pip install 'verifiers>=0.2,<0.4'"):
        EnvironmentSpec("verifiers", kwargs={"env_id": "wordle"}).load()


def test_an_interface_without_load_environment_is_refused(tmp_path, monkeypatch):
    (tmp_path / "verifiers.py").write_text('__version__ = "0.4.0"')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    with pytest.raises(UserCodeError, match=r"verifiers 0.4.0 has no load_environment, expected verifiers>=0.2,<0.4"):
        EnvironmentSpec("verifiers", kwargs={"env_id": "new"}).load()
    sys.modules.pop("verifiers", None)


@needs_it
def test_a_rollout(package):
    assert write_rows("rlx-asks", package / "rows.jsonl", {"goal": "maybe"}) == 2
    row = json.loads((package / "rows.jsonl").read_text().splitlines()[0])

    async def play(*texts):
        environment = Verifiers("rlx-asks", {"goal": "maybe"})
        begin = await environment.reset({**row, "ground_truth": row["reward_model"]["ground_truth"]})
        return begin, [await environment.step(Turn(text, place)) for place, text in enumerate(texts)]

    begin, (first, last) = asyncio.run(play("no", "maybe"))
    assert begin == [{"role": "user", "content": "Say maybe"}]
    assert first.messages == [{"role": "user", "content": "really 2?"}] and not first.done
    assert last.done and last.reward == 1.0 and last.info["right"] == 1.0
    assert asyncio.run(play("no", "no"))[1][-1].reward == 0.25


@needs_it
def test_its_tools(package):
    async def play():
        environment = Verifiers("rlx-adds", tool_format="hermes")
        await environment.reset({"prompt": [{"role": "user", "content": "3+4?"}], "ground_truth": "7"})
        call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
        return environment.tools, await environment.step(Turn(call, 0)), await environment.step(Turn("7", 1))

    tools, answer, last = asyncio.run(play())
    assert tools[0]["function"]["name"] == "add" and tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert [(message["role"], message["content"]) for message in answer.messages] == [("tool", "7")]
    assert last.done and last.reward == 1.0


@needs_it
def test_in_a_process(package, make_pool, answers):
    pool = make_pool("verifiers", kwargs={"env_id": "rlx-asks"})
    for key in range(4):
        pool.reset(key, {"prompt": [{"role": "user", "content": "?"}], "ground_truth": "yes", "extra_info": None})
    answers(pool, range(4), 120.0)
    for turn in range(2):
        for key in range(4):
            pool.step(key, Turn("yes" if key % 2 else "no", turn))
        found = answers(pool, range(4))
    assert [found[key].reward for key in range(4)] == [0.25, 1.0, 0.25, 1.0]
