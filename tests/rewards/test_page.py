"""The functions of docs/rewards.md run as they stand there."""

import re
from pathlib import Path

import pytest

from rlx.config.schema import CustomRewardConfig, RewardConfig, RewardManagerConfig
from rlx.rewards.manager import RewardManager
from rlx.rewards.rules import FORM_PATTERNS

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_every_form():
    assert {("async def compute" in block, "data_sources" in block) for block in BLOCKS} == {
        (is_async, lists) for is_async in (False, True) for lists in (False, True)
    }


@pytest.mark.parametrize("block", BLOCKS)
def test_a_function_of_the_page(make_batch, write_module, tmp_path, block):
    reward = RewardConfig(
        num_workers=1, reward_manager=RewardManagerConfig("batch" if "data_sources" in block else "naive")
    )
    with RewardManager(reward, CustomRewardConfig(write_module(block))) as rewards:
        scores = rewards.score(make_batch(["it is 7", "it is 8"], ["7", "7"]), tmp_path).scores.tolist()
    assert scores == [1.0, 0.0]


def test_the_page_shows_the_forms_as_they_are():
    shown = dict(re.findall(r"^\| `(\w+)` \| `(.+)` \|$", PAGE, re.MULTILINE))
    assert {name: text.replace(r"\|", "|") for name, text in shown.items() if name in FORM_PATTERNS} == FORM_PATTERNS
