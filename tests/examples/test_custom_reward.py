from pathlib import Path

import pytest
import torch

from rlx.config.compose import compose
from rlx.data.batch import Batch
from rlx.main_ppo import main
from rlx.rewards.manager import RewardManager

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward.py"
OVERRIDE = f"custom_reward_function.path={EXAMPLE}"


def test_right_and_short_earns_most(tmp_path: Path):
    config = compose([OVERRIDE]).config
    responses = ["#### 7", "So " * 15 + "it is #### 7", "So " * 100 + "it is #### 7", "#### 8"]
    info = {
        "response_text": responses,
        "data_source": ["rlx/arithmetic"] * 4,
        "ground_truth": ["7"] * 4,
        "extra_info": [{}] * 4,
    }
    batch = Batch.of({"group_id": torch.zeros(4, dtype=torch.int64)}, info)
    scores = RewardManager(config.reward, config.custom_reward_function).score(batch, tmp_path)
    assert scores.extra["acc"] == [1.0, 1.0, 1.0, 0.0]
    assert scores.extra["characters"] == [len(text) for text in responses]
    assert scores.scores.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_the_command_of_the_example_is_valid(capsys: pytest.CaptureFixture[str]):
    assert main(["--check", OVERRIDE]) == 0
    assert str(EXAMPLE) in capsys.readouterr().out
