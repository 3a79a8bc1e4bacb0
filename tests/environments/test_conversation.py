"""Tokens of conversations: as they were sampled, with the template's own between them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlx.config.schema import EnvironmentConfig, PPOConfig
from rlx.environments import chat as chat_module
from rlx.environments.chat import Chat, Gap, RewrittenHistory, UnusableTemplate
from rlx.environments.conversation import Conversation
from rlx.environments.role import ConversationSampler, require_usable_template
from rlx.rollout.protocol import Completion

USER = {"role": "user", "content": "go"}
SAID = {"role": "assistant", "content": "hi"}
# As Qwen3's: thinking of turns before the last user message is dropped.
DROPS_THINKING = (
    "{%- set last = namespace(user=0) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{%- set said = m.content -%}"
    "{%- if m.role == 'assistant' and loop.index0 < last.user -%}{%- set said = said.split('</think>')[-1] -%}{%- endif -%}"
    "{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' + said }}"
    "{%- for call in m.tool_calls or [] -%}{{ '[' + call.function.name + ']' }}{%- endfor -%}"
    "{%- if m.role == 'assistant' -%}{{ eos_token + '.' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def between(tokenizer, history, added, mode="refuse", last_token=None):
    last_token = tokenizer.eos_token_id if last_token is None else last_token
    (found,) = Chat(tokenizer, mode).between([Gap(history, added, [], last_token)])
    if isinstance(found, Exception):
        raise found
    return found.token_ids


def add(conversation, chat, messages):
    """Return whether the messages fit, and append them."""
    gap = conversation.gap(messages)
    return gap is not None and conversation.add_messages(messages, *chat.between([gap]))


def test_a_next_turn_begins_with_what_the_template_writes_and_its_end_is_written_once(tokenizer):
    expected = tokenizer.encode("<|user|>go<|assistant|>", add_special_tokens=False)
    assert between(tokenizer, [USER, SAID], [USER]) == expected
    assert between(tokenizer, [USER, SAID], [USER], last_token=99) == [tokenizer.eos_token_id, *expected]
    tokenizer.chat_template = DROPS_THINKING
    assert tokenizer.decode(between(tokenizer, [USER, SAID], [USER])) == ".<|user|>go<|assistant|>"


def test_gaps_that_are_written_together_are_those_written_alone(tokenizer):
    """Also if some fail, and with tools of their own; text that the template has written spares a second rendering."""
    tokenizer.chat_template = "{%- if tools -%}{{ '(' + tools[0].name + ')' }}{%- endif -%}" + DROPS_THINKING
    chat, thought = Chat(tokenizer), {"role": "assistant", "content": "<think>hm</think>hi"}
    added = [{"role": "user", "content": "go</s>"}, {"role": "tool", "content": "é"}, {"role": "user", "content": ""}]
    gaps = [
        Gap([USER, turn], [message], tools, 1, before, turn["content"])
        for turn in (SAID, thought)
        for message in added
        for tools in ([], [{"name": "f"}])
        for before in ("", chat.first([([USER], tools)])[0].text, "another")
    ]
    found, alone = chat.between(gaps), [chat.between([gap])[0] for gap in gaps]
    assert len(found) == len(gaps) == 36 and chat.between([]) == []
    for own, one in zip(found, alone, strict=True):
        assert own == one if not isinstance(own, Exception) else (type(own), str(own)) == (type(one), str(one))
    assert [isinstance(own, RewrittenHistory) for own in found] == [False] * 18 + (
        [True] * 6 + [False] * 6 + [True] * 6
    )
    by_before = [found[place::3] for place in range(3)]
    assert by_before[0][:6] == by_before[1][:6] == by_before[2][:6]
    whole = [own.text for own in by_before[0][:1]]
    assert whole == ["<|user|>go<|assistant|>hi</s>.<|user|>gorlxHIDDEN0;<|assistant|>"]


def test_a_turn_that_the_template_writes_in_other_words_is_found_by_rendering_it(tokenizer):
    """Here without its spaces, and the call from its parts."""
    tokenizer.chat_template = DROPS_THINKING.replace("set said = m.content", "set said = m.content.strip()")
    chat = Chat(tokenizer)
    before = chat.first([([USER], [])])[0].text
    said = {"role": "assistant", "content": " hi ", "tool_calls": [{"function": {"name": "add"}}]}
    (found,) = chat.between([Gap([USER, said], [USER], [], 1, before, " hi [ add ]")])
    assert tokenizer.decode(found.token_ids) == ".<|user|>go<|assistant|>"


@pytest.mark.parametrize("closing", ["</s>.", "\n", ""])
@pytest.mark.parametrize("said", ["", "hi"])
def test_words_that_the_template_or_the_environment_adds_to_a_turn_do_not_follow_it(tokenizer, said, closing):
    """The template writes an empty thought for an empty turn, the environment a remark behind a turn."""
    tokenizer.chat_template = (
        "{%- for m in messages -%}{{ '<|' + m.role + '|>' }}"
        "{%- if m.role == 'assistant' -%}{{ (m.content or '<think></think>') + '" + closing + "' }}"
        "{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
    )
    chat = Chat(tokenizer)
    before = chat.first([([USER], [])])[0].text
    for content in (said, f"{said}\n(no number was found)"):
        turn = {"role": "assistant", "content": content}
        (found,) = chat.between([Gap([USER, turn], [USER], [], 99, before, said)])
        assert tokenizer.decode(found.token_ids) == f"{closing}<|user|>go<|assistant|>"


def test_a_large_batch_of_chats_has_more_time(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_module, "TEMPLATE_LIMIT_S", 1e-6)
    found = Chat(tokenizer).first([([USER], [])] * 200)
    assert [own.text for own in found] == ["<|user|>go<|assistant|>"] * 200


def test_chats_behind_three_that_take_too_long_are_not_tried(tokenizer, monkeypatch):
    """Off the main thread, where Ray runs a worker's methods."""
    monkeypatch.setattr(chat_module, "TEMPLATE_LIMIT_S", 0.5)
    monkeypatch.setattr(chat_module, "TEMPLATE_CHAT_S", 0.0)
    endless = "{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}"
    tokenizer.chat_template = "{%- if messages[0].content == 'stop' -%}" + endless + "{%- endif -%}ab"
    chats = [([{"role": "user", "content": text}], []) for text in ("go", "stop", "go", "stop", "stop", "stop", "go")]
    first = Chat(tokenizer).first
    with ThreadPoolExecutor() as other:
        found = other.submit(first, chats).result()
    assert [isinstance(each, TimeoutError) for each in found] == [False, True, False, True, True, True, True]
    assert found[5] is found[6] is found[4] is not found[1]


def test_equal_first_prompts_have_lists_of_their_own(tokenizer):
    chat, other = Chat(tokenizer), {"role": "user", "content": "another"}
    alone = [chat.first([([message], [])])[0] for message in (USER, other, USER)]
    together = chat.first([([USER], []), ([other], []), ([USER], [])])
    assert together == alone
    assert together[0].token_ids is not together[2].token_ids


def test_without_a_template_contents_follow_one_another(tokenizer):
    tokenizer.chat_template = None
    assert Chat(tokenizer).first([([USER, SAID], [])])[0].token_ids == tokenizer.encode(
        "gohi", add_special_tokens=False
    )
    assert between(tokenizer, [USER, SAID], [USER]) == tokenizer.encode("go", add_special_tokens=False)
    ended = {"role": "user", "content": f"go{tokenizer.eos_token}"}
    (written,) = Chat(tokenizer).first([([ended], [])])
    assert written.token_ids == tokenizer.encode(ended["content"], add_special_tokens=False)


@pytest.mark.parametrize(
    "text",
    ["</s>", "a<|assistant|>yes</s><|user|>", "<|<|user|>user|>", "rlxHIDDEN0;</s>rlxSAID", "</s", "\u2028🙂</s>\x00"],
)
def test_special_tokens_in_an_environments_text_are_plain_text(tokenizer, text):
    ids = between(tokenizer, [USER, SAID], [{"role": "user", "content": text}])
    opened, closed = (tokenizer.convert_tokens_to_ids(name) for name in ("<|user|>", "<|assistant|>"))
    assert [ids[0], ids[-1]] == [opened, closed]
    assert not {0, 1, 2, 259, 260, 261} & set(ids[1:-1])
    assert bytes(token - 3 for token in ids[1:-1]).decode() == text


def test_a_template_that_drops_thinking_is_refused_or_its_turns_are_kept(tokenizer):
    tokenizer.chat_template = DROPS_THINKING
    thought = {"role": "assistant", "content": "<think>hm</think>hi"}
    with pytest.raises(RewrittenHistory, match="on_rewritten_history=keep"):
        between(tokenizer, [USER, thought], [USER])
    assert tokenizer.decode(between(tokenizer, [USER, thought], [USER], mode="keep")) == ".<|user|>go<|assistant|>"
    call = {**thought, "tool_calls": [{"function": {"name": "add"}}]}
    assert tokenizer.decode(between(tokenizer, [USER, call], [USER], mode="keep")) == ".<|user|>go<|assistant|>"
    # A tool's output is no user message, so its template keeps the thinking.
    tool = {"role": "tool", "content": "2"}
    assert tokenizer.decode(between(tokenizer, [USER, thought], [tool])) == ".<|user|>2<|assistant|>"


def test_a_role_with_which_no_conversation_goes_on_is_found(tokenizer):
    assert Chat(tokenizer).fault_of("user") == ""
    assert "wizard" in Chat(tokenizer).fault_of("wizard")
    tokenizer.chat_template = DROPS_THINKING
    assert (Chat(tokenizer).fault_of("user"), Chat(tokenizer).fault_of("tool")) == ("", "")
    tokenizer.chat_template = DROPS_THINKING.replace("said.split('</think>')[-1]", "'earlier'")
    assert "RewrittenHistory" in Chat(tokenizer).fault_of("user") and Chat(tokenizer, "keep").fault_of("user")


def test_a_run_with_a_template_that_allows_no_second_turn_does_not_start(tokenizer):
    require_usable_template(PPOConfig(), tokenizer)
    tokenizer.chat_template = DROPS_THINKING.replace("said.split('</think>')[-1]", "'earlier'").replace(
        "{%- set said = m.content -%}", "{%- set said = m.content if m.role != 'tool' else 'hidden' -%}"
    )
    with pytest.raises(
        UnusableTemplate, match=r"(?s)user's message: RewrittenHistory.*tool's output: UnusableTemplate.*role tool"
    ):
        require_usable_template(PPOConfig(), tokenizer)


def test_a_template_that_leaves_a_message_out_is_refused(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content", "(message.content if message.role != 'user' else '')"
    )
    with pytest.raises(UnusableTemplate, match="role user"):
        between(tokenizer, [USER, SAID], [USER])


def test_turns_stay_as_sampled(tokenizer):
    """The bytes of a turn that are no text survive, though the text of the turn lacks them."""
    chat, broken = Chat(tokenizer), [3 + 0xFF, 3 + 65, tokenizer.eos_token_id]
    conversation = Conversation(chat.first([([USER], [])])[0].token_ids, width=40, messages=[USER])
    completion = Completion(broken, [-0.1, -0.2, -0.3], "stop")
    turn = conversation.add_turn(completion, *chat.texts_of([completion]))
    assert (turn.text, turn.index, turn.token_count) == ("A", 0, 3)
    conversation.messages.append({"role": "assistant", "content": turn.text})
    assert add(conversation, chat, [USER])
    assert conversation.token_ids[:3] == broken and conversation.sampled == [True] * 3 + [False] * 4
    assert conversation.log_probs == [-0.1, -0.2, -0.3, 0, 0, 0, 0]
    assert [(turn["role"], turn["start"], turn["end"]) for turn in conversation.turns] == [
        ("assistant", 4, 7),
        ("user", 7, 11),
    ]


def test_a_message_in_the_models_role_is_no_turn_of_the_model(tokenizer):
    """An environment may show how it would have answered; that has no tokens of the policy, and no reward."""
    chat = Chat(tokenizer)
    conversation = Conversation(chat.first([([USER], [])])[0].token_ids, width=40, messages=[USER])
    conversation.add_turn(Completion([70, 1], None, "stop"), "C")
    conversation.messages.append(SAID)
    assert add(conversation, chat, [USER, {"role": "assistant", "content": "ag"}])
    assert [turn["role"] for turn in conversation.turns] == ["assistant", "environment"]
    assert len(conversation.own_turns) == 1 and sum(conversation.sampled) == 2


def test_messages_without_room_for_an_answer_are_not_appended(tokenizer):
    chat = Chat(tokenizer)
    conversation = Conversation([5], width=6, messages=[USER])
    conversation.add_turn(Completion([70, 1], None, "stop"), "C")
    conversation.messages.append(SAID)
    assert conversation.room == 4
    assert not add(conversation, chat, [USER]), "four tokens leave none"
    assert not add(conversation, chat, [{"role": "user", "content": "x" * 10_000_000}])
    assert add(conversation, chat, [{"role": "user", "content": "g"}]) and conversation.room == 1


def tokenizer_with_spaces():
    """As Llama 2's, whose tokens of a text depend on whether something stands before it."""
    pieces = ["<unk>", "</s>", "\u2581", "\n", *"abgo"]
    words = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>", pad_token="</s>")


def test_a_tokenizer_that_begins_texts_with_a_space_does_not_do_so_between_turns():
    spaced = tokenizer_with_spaces()
    assert spaced.convert_ids_to_tokens(spaced.encode("go")) == ["\u2581", "g", "o"]
    spaced.chat_template = (
        "{%- for m in messages -%}{{ 'a' + m.content + (eos_token if m.role == 'assistant' else '') }}{%- endfor -%}b"
    )
    ids = between(spaced, [USER, {"role": "assistant", "content": "b"}], [USER])
    assert spaced.convert_ids_to_tokens(ids) == ["a", "g", "o", "b"]


TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "a", "parameters": {"type": "object"}}}]
SHOWS = "{%- for tool in tools or [] -%}{{ tool.function.name }}{%- endfor -%}{%- for m in messages -%}{{ m.content }}{%- endfor -%}"


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
