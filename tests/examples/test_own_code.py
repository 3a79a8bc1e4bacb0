"""The examples of reward functions and of environments: their commands, and what they do in the processes that a run uses."""

import re
from pathlib import Path

import pytest
import torch

from rlx.config.compose.command_line import compose
from rlx.data.batch import Batch
from rlx.driver import main
from rlx.environments.answers import checked_observation
from rlx.environments.environment_pool import EnvironmentPool
from rlx.environments.protocol import Observation, Reset, Turn
from rlx.environments.spec import EnvironmentSpec, environment_spec
from rlx.rewards.manager import RewardManager, Scores

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = {"environment.py": "environments.md", "agent_openai.py": "agents.md"}
REWARDS = ["custom_reward.py", "custom_reward_async.py", "custom_reward_batch.py"]
PROMPT = [{"role": "user", "content": "3 + 4?"}]


def command(name: str) -> list[str]:
    """What the example's own text says to type."""
    (line,) = [line for line in (EXAMPLES / name).read_text().splitlines() if "rlx train" in line]
    return line.split("rlx train ")[1].replace("examples/", f"{EXAMPLES}/").split()


@pytest.mark.parametrize("name", [*PAGES, *REWARDS])
def test_the_command_of_the_example_is_valid(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--check", "--tree", *command(name)]) == 0
    assert str(EXAMPLES / name) in capsys.readouterr().out


def score(name: str, responses: list[str], truths: list[str], folder: Path) -> Scores:
    config = compose([*command(name), "reward.num_workers=1"]).config
    info = {"response_text": responses, "ground_truth": truths}
    info |= {"data_source": ["rlx/arithmetic"] * len(truths), "extra_info": [{}] * len(truths)}
    batch = Batch.of({"group_id": torch.zeros(len(truths), dtype=torch.int64)}, info)
    with RewardManager(config.reward, config.custom_reward_function) as rewards:
        return rewards.score(batch, folder)


def test_right_and_short_earns_most(tmp_path: Path):
    responses = ["#### 7", "So " * 15 + "it is #### 7", "So " * 100 + "it is #### 7", "#### 8"]
    scores = score("custom_reward.py", responses, ["7"] * 4, tmp_path)
    assert scores.extra["acc"] == [1.0, 1.0, 1.0, 0.0]
    assert scores.extra["characters"] == [len(text) for text in responses]
    assert scores.scores.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_programs_run_side_by_side(tmp_path: Path):
    programs = ["print(3 + 4)", "import time; time.sleep(0.2); print(7)", "print(8)", "exit(1)", "no program"]
    scores = score("custom_reward_async.py", programs, ["7"] * 5, tmp_path)
    assert scores.scores.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert scores.extra["too_slow"] == [0.0] * 5


def test_copies_share_one_reward(tmp_path: Path):
    scores = score("custom_reward_batch.py", ["#### 7", "so #### 7", "#### 7", "#### 8"], ["7"] * 4, tmp_path)
    assert scores.scores.tolist() == [0.5, 1.0, 0.5, 0.0]
    assert scores.extra["acc"] == [1.0, 1.0, 1.0, 0.0] and scores.extra["copies"] == [2.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_the_example(name: str):
    code = (EXAMPLES / name).read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in (EXAMPLES.parent / "docs" / PAGES[name]).read_text()


def test_the_game_of_the_page_pays_for_digits(tmp_path: Path):
    page = (EXAMPLES.parent / "docs" / "environments.md").read_text()
    (game,) = re.findall(r"```python\n(class Game:.*?)```", page, re.DOTALL)
    (tmp_path / "game.py").write_text(game)
    environment = EnvironmentSpec("Game", str(tmp_path / "game.py")).load()()
    assert environment.reset({"prompt": PROMPT}) == PROMPT
    assert checked_observation(environment.step(Turn("a1b2", 0))) == Observation([], 0.5, True, {"digits": 2})


def test_the_teacher_pays_less_for_a_later_answer():
    def answer() -> Reset | Observation:
        for _ in range(600):
            if found := pool.poll(0.1):
                return found[0][1]
        raise AssertionError("no answer within 60 s")

    with EnvironmentPool(environment_spec(compose(command("environment.py")).config), 1, None) as pool:
        pool.reset(0, {"prompt": PROMPT, "data_source": "a", "ground_truth": "7", "extra_info": {}, "seed": 1})
        assert answer() == Reset(PROMPT, [])
        for index, (text, content) in enumerate(
            [("seven", "Write #### and the number."), ("#### 8", "Wrong, try again.")]
        ):
            pool.step(0, Turn(text, index))
            expected = Observation([{"role": "user", "content": content}], 0.0, False, {"acc": 0.0})
            assert answer() == expected
        pool.step(0, Turn("#### 7", 2))
        assert answer() == Observation([], pytest.approx(1 / 3), True, {"acc": 1.0})
