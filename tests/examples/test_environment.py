"""The example of an environment, in the processes that a run uses."""

import re
from pathlib import Path

import pytest

from rlx.config.compose.command_line import compose
from rlx.driver import main
from rlx.environments.answers import checked_observation
from rlx.environments.environment_pool import EnvironmentPool
from rlx.environments.protocol import Observation, Reset, Turn
from rlx.environments.spec import EnvironmentSpec, environment_spec

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "environment.py"
PAGES = {"environment.py": "environments.md", "agent_openai.py": "agents.md"}
PROMPT = [{"role": "user", "content": "3 + 4?"}]


def command(name: str = EXAMPLE.name) -> list[str]:
    """What the example's own text says to type."""
    (line,) = [line for line in (EXAMPLES / name).read_text().splitlines() if "rlx train" in line]
    return line.split("rlx train ")[1].replace("examples/", f"{EXAMPLE.parent}/").split()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_the_example(name: str):
    code = (EXAMPLES / name).read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{code}```" in (EXAMPLES.parent / "docs" / PAGES[name]).read_text()


def test_the_game_of_the_page_pays_for_digits(tmp_path: Path):
    page = (EXAMPLE.parents[1] / "docs" / "environments.md").read_text()
    (game,) = re.findall(r"```python\n(class Game:.*?)```", page, re.DOTALL)
    (tmp_path / "game.py").write_text(game)
    environment = EnvironmentSpec("Game", str(tmp_path / "game.py")).load()()
    assert environment.reset({"prompt": PROMPT}) == PROMPT
    assert checked_observation(environment.step(Turn("a1b2", 0))) == Observation([], 0.5, True, {"digits": 2})


@pytest.mark.parametrize("name", PAGES)
def test_the_command_of_the_example_is_valid(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--check", "--tree", *command(name)]) == 0
    assert str(EXAMPLES / name) in capsys.readouterr().out


def test_the_teacher_pays_less_for_a_later_answer():
    def answer() -> Reset | Observation:
        for _ in range(600):
            if found := pool.poll(0.1):
                return found[0][1]
        raise AssertionError("no answer within 60 s")

    with EnvironmentPool(environment_spec(compose(command()).config), 1, None) as pool:
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
