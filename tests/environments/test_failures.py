"""Environments that fail, through their processes to what a run says of them: once, with the user's own lines, or as the run's end."""

import asyncio
import re
from pathlib import Path

import pytest
from in_this_process import Pool, Sampler

from rlx.config.schema.rollout import EnvironmentConfig, MultiTurnConfig
from rlx.environments.chat import Chat
from rlx.environments.role import batch_of
from rlx.environments.running import (
    ConversationBounds,
    ConversationOptions,
    ConversationRow,
    EnvironmentFailed,
    Run,
)
from rlx.environments.tools import ToolEnvironment, Tools
from rlx.errors import shown
from rlx.rollout.protocol import Sampling
from rlx.trainer.environment_rows import MOST_SHOWN, FailedConversations

ENVIRONMENT = """
import json, time

class Game:
    def reset(self, row):
        self.how = row["how"]
        if self.how == "misspelt":
            randon.Random(row["seed"])
        if self.how == "chain":
            try:
                json.loads("{")
            except ValueError as fault:
                raise RuntimeError(f"bad state {row['seed']}") from fault
        return [{"role": "wizard" if self.how == "template" else "user", "content": "x" * (99 if self.how == "long" else 2)}]

    def step(self, turn):
        if self.how == "step":
            raise KeyError(f"{self.how} {id(self)}")
        if self.how == "slow":
            time.sleep(60)
        if self.how == "nonsense":
            return "nonsense"
        if self.how == "nothing":
            return {"messages": []}
        if self.how == "refused":
            return {"messages": [{"role": "wizard", "content": "x"}]}
        if self.how.startswith("line"):
            exec(compile("\\n" * int(self.how[4:]) + "1 / 0", "elsewhere.py", "exec"))
        return {"messages": [], "done": True, "reward": 1.0}
"""
PROMPT = [{"role": "user", "content": "go"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"text": "a"}}\n</tool_call>'


class Screen:
    """What a run says."""

    def __init__(self):
        self.notices, self.remarks = [], []
        self.notice, self.remark = self.notices.append, self.remarks.append


@pytest.fixture
def play(make_pool, tokenizer):
    """play(hows) runs a conversation for each of them and returns the batch."""

    def start(*hows, pool=None, say="hi", turns=1, **environment):
        # The others end in time on a busy machine, too.
        pool = pool or make_pool("Game", ENVIRONMENT, limit_s=2.0 if "slow" in hows else 30.0)
        rows = [
            ConversationRow({"prompt": PROMPT, "how": how, "seed": seed}, seed, [7]) for seed, how in enumerate(hows)
        ]
        sampling = Sampling(100, stop_token_ids=(1,))
        limits = ConversationBounds(
            20, 100, MultiTurnConfig(max_assistant_turns=turns), EnvironmentConfig(**environment)
        )
        options = ConversationOptions(Chat(tokenizer), sampling, limits)
        ran = Run(Sampler(tokenizer, lambda request: (say, True)), pool, rows, options).to_the_end()
        return batch_of(ran, rows, 0, 100, 1, True)

    return start


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def failed(screen):
    return FailedConversations(EnvironmentConfig(path="mine.py"), screen)


def line_of(text):
    return 1 + next(place for place, line in enumerate(ENVIRONMENT.splitlines()) if text in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text", "told"),
    [
        ("misspelt", f"2 times error: raised NameError \\(mine.py:{line_of('randon')}\\): .*; correct it", "NameError: name 'randon'"),
        ("step", rf"error: raised KeyError \(mine.py:{line_of('KeyError')}\): .*; correct it", "KeyError: 'step "),
        ("slow", r"2 times timeout: took longer than 2 s; make it faster or raise environment.timeout_s", "time.sleep(60)"),
        ("nonsense", r"2 times nonsense: step returned 'nonsense', expected an Observation.*; correct it", None),
        ("long", r"the first prompt has 101 tokens, expected 1 to 20; begin with shorter messages", None),
    ],
)  # fmt: skip
def test_a_run_stops_where_every_conversation_of_a_batch_fails(play, failed, screen, how, text, told):
    with pytest.raises(EnvironmentFailed, match=f"environment mine.py: 2 of 2 .*{text}.*on_failure=end_row") as stopped:  # fmt: skip
        failed.judge(play(how, how))
    assert screen.notices == []
    cause = stopped.value.__cause__
    assert (cause is None) if told is None else told in shown(cause)
    if told:
        assert {Path(file).name for file in re.findall(r'File "(.*)", line', shown(cause))} == {"mine.py"}


def test_a_failure_beside_others_shows_its_traceback_once_in_the_run(play, failed, screen):
    for _ in range(2):
        failed.judge(play("chain", "chain", "step", "fine"))
    assert len(screen.notices) == 2 and "3 of 4 conversations ended by a failure" in screen.notices[0]
    chain, step = screen.remarks
    assert "json.loads" in chain and "direct cause" in chain and chain.endswith("RuntimeError: bad state 0")
    assert "KeyError" in step and "rlx/environments" not in chain + step


def test_a_failure_at_another_line_each_time_shows_few_tracebacks(play, failed, screen):
    failed.judge(play("fine", *(f"line{place}" for place in range(MOST_SHOWN + 3))))
    assert len(screen.remarks) == MOST_SHOWN


KINDS = {  # the turns of the model, and the reason
    "misspelt": (0, "error: raised NameError"),
    "step": (1, "error: raised KeyError"),
    "nothing": (1, "nonsense: step returned no messages"),
    "refused": (1, "template: "),
    "template": (0, "template: "),
    "long": (0, "template: the first prompt has 101 tokens, expected 1 to 20"),
}


def test_a_failure_ends_its_row_alone(play):
    *failed, fine = play(*KINDS, "fine", turns=2, failure_reward=-2.0).info["conversation"]
    for record, (turns, reason) in zip(failed, KINDS.values(), strict=True):
        assert record["failed"] and record["reason"].startswith(reason) and record["reward"] == -2.0
        assert [turn["role"] for turn in record["turns"]] == ["assistant"] * turns
    assert (fine["failed"], fine["reason"], fine["reward"]) == (False, "done", 1.0)


def test_a_template_that_stops_every_conversation_ends_the_run(play):
    with pytest.raises(EnvironmentFailed, match=r"no conversation could continue: TemplateError: .*wizard"):
        play("refused", "refused", turns=2)
    with pytest.raises(EnvironmentFailed, match=r"template: .*wizard.*on_failure=end_row"):
        play("refused", "fine", turns=2, on_failure="end_run")


@pytest.mark.parametrize(
    "hows", [("fine", "fine"), ("refused", "refused", "fine"), ("misspelt", "fine"), ("misspelt",)]
)
def test_a_run_goes_on_where_a_conversation_is_left_or_there_was_one_alone(play, failed, hows):
    failed.judge(play(*hows))


def look(text: str) -> str:
    """Look it up.

    Args:
        text: what.
    """
    raise KeyError(text)


class Looks(ToolEnvironment):
    def __init__(self):
        super().__init__(Tools([look]), "hermes")

    def step(self, turn):
        return asyncio.run(super().step(turn))


def test_a_tool_that_raises_in_every_conversation_is_an_answer_and_no_failure(play, failed, screen):
    batch = play("", "", pool=Pool(Looks), say=CALL)
    failed.judge(batch)
    assert screen.notices == screen.remarks == []
    for record in batch.info["conversation"]:
        assert not record["failed"] and record["turns"][0]["calls"][0]["error"]
