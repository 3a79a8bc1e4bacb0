from pathlib import Path

from rlx.config.compose.command_line import group_choices
from rlx.config.describe import help_text, page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "run: python -m rlx.config.describe > docs/configuration.md"


def test_help_lists_groups_and_exit_codes():
    text = help_text()
    assert all(f"experiment={name}" in text for name in group_choices()["experiment"])
    assert all(word in text for word in ("--check", "--help", "130", "actor_rollout_ref.*"))
