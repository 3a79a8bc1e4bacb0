"""What is said of tools that the model cannot see."""

import pytest

from rlx.config.schema import EnvironmentConfig, PPOConfig
from rlx.environments.chat import Chat
from rlx.environments.conversation import Conversation
from rlx.environments.role import ConversationSampler
from rlx.models.tiny import make_tiny_tokenizer

TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "a", "parameters": {"type": "object"}}}]
SHOWS = "{%- for tool in tools or [] -%}{{ tool.function.name }}{%- endfor -%}{%- for m in messages -%}{{ m.content }}{%- endfor -%}"


@pytest.fixture
def tokenizer():
    return make_tiny_tokenizer()


def test_a_template_shows_tools_if_it_writes_anything_about_them(tokenizer):
    assert not Chat(tokenizer).shows(TOOLS)
    tokenizer.chat_template = SHOWS
    assert Chat(tokenizer).shows(TOOLS) and not Chat(tokenizer).shows([])
    tokenizer.chat_template = None
    assert not Chat(tokenizer).shows(TOOLS)


@pytest.mark.parametrize(
    ("environment", "template", "is_told"),
    [
        ({"path": "tools.py", "name": "TOOLS"}, None, True),
        ({"path": "tools.py", "name": "TOOLS"}, SHOWS, False),
        ({"name": "python"}, None, True),
        ({"name": "calculator"}, None, False),  # calls are demonstrated to the tiny model
    ],
)
def test_tools_of_ones_own_that_the_template_leaves_out_are_told_once(
    tokenizer, caplog, environment, template, is_told
):
    tokenizer.chat_template = template or tokenizer.chat_template
    sampler = ConversationSampler(PPOConfig(environment=EnvironmentConfig(**environment)), tokenizer)
    for tools in ([], TOOLS, TOOLS):
        sampler._tell_hidden_tools([Conversation([5], 8), Conversation([5], 8, tools=tools)])
    assert [("(lookup)" in record.getMessage()) for record in caplog.records] == [True] * is_told
