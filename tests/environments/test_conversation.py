"""Tokens of conversations: as they were sampled, with the template's own between them."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlx.environments.conversation import Chat, Conversation, RewrittenHistory, UnusableTemplate
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


def between(tokenizer, history, added, keeps=False, last_token=None):
    last_token = tokenizer.eos_token_id if last_token is None else last_token
    return Chat(tokenizer, keeps).between(history, added, [], last_token)


def test_a_next_turn_begins_with_what_the_template_writes_and_its_end_is_written_once(tokenizer):
    expected = tokenizer.encode("<|user|>go<|assistant|>", add_special_tokens=False)
    assert between(tokenizer, [USER, SAID], [USER]) == expected
    assert between(tokenizer, [USER, SAID], [USER], last_token=99) == [tokenizer.eos_token_id, *expected]
    tokenizer.chat_template = DROPS_THINKING
    assert tokenizer.decode(between(tokenizer, [USER, SAID], [USER])) == ".<|user|>go<|assistant|>"


def test_without_a_template_contents_follow_one_another(tokenizer):
    tokenizer.chat_template = None
    assert Chat(tokenizer).first([USER, SAID], []) == tokenizer.encode("gohi", add_special_tokens=False)
    assert between(tokenizer, [USER, SAID], [USER]) == tokenizer.encode("go", add_special_tokens=False)


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
    assert tokenizer.decode(between(tokenizer, [USER, thought], [USER], keeps=True)) == ".<|user|>go<|assistant|>"
    call = {**thought, "tool_calls": [{"function": {"name": "add"}}]}
    assert tokenizer.decode(between(tokenizer, [USER, call], [USER], keeps=True)) == ".<|user|>go<|assistant|>"
    # A tool's output is no user message, so its template keeps the thinking.
    tool = {"role": "tool", "content": "2"}
    assert tokenizer.decode(between(tokenizer, [USER, thought], [tool])) == ".<|user|>2<|assistant|>"


def test_a_role_with_which_no_conversation_goes_on_is_found(tokenizer):
    assert Chat(tokenizer).fault_of("user") == ""
    assert "wizard" in Chat(tokenizer).fault_of("wizard")
    tokenizer.chat_template = DROPS_THINKING
    assert (Chat(tokenizer).fault_of("user"), Chat(tokenizer).fault_of("tool")) == ("", "")
    tokenizer.chat_template = DROPS_THINKING.replace("said.split('</think>')[-1]", "'earlier'")
    assert "RewrittenHistory" in Chat(tokenizer).fault_of("user") and Chat(tokenizer, keeps_rewritten=True).fault_of(
        "user"
    )


def test_a_template_that_leaves_a_message_out_is_refused(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content", "(message.content if message.role != 'user' else '')"
    )
    with pytest.raises(UnusableTemplate, match="role user"):
        between(tokenizer, [USER, SAID], [USER])


def test_turns_stay_as_sampled(tokenizer):
    """The bytes of a turn that are no text survive, though the text of the turn lacks them."""
    chat, broken = Chat(tokenizer), [3 + 0xFF, 3 + 65, tokenizer.eos_token_id]
    conversation = Conversation(chat.first([USER], []), width=40, messages=[USER])
    turn = conversation.add_turn(Completion(broken, [-0.1, -0.2, -0.3], "stop"), chat)
    assert (turn.text, turn.index, turn.token_count) == ("A", 0, 3)
    conversation.messages.append({"role": "assistant", "content": turn.text})
    assert conversation.add_messages([USER], chat)
    assert conversation.token_ids[:3] == broken and conversation.sampled == [True] * 3 + [False] * 4
    assert conversation.log_probs == [-0.1, -0.2, -0.3, 0, 0, 0, 0]
    assert [(turn["role"], turn["start"], turn["end"]) for turn in conversation.turns] == [
        ("assistant", 4, 7),
        ("user", 7, 11),
    ]


def test_messages_without_room_for_an_answer_are_not_appended(tokenizer):
    chat = Chat(tokenizer)
    conversation = Conversation([5], width=6, messages=[USER])
    conversation.add_turn(Completion([70, 1], None, "stop"), chat)
    conversation.messages.append(SAID)
    assert conversation.room == 4
    assert not conversation.add_messages([USER], chat), "four tokens leave none"
    assert not conversation.add_messages([{"role": "user", "content": "x" * 10_000_000}], chat)
    assert conversation.add_messages([{"role": "user", "content": "g"}], chat) and conversation.room == 1


def test_a_tokenizer_that_begins_texts_with_a_space_does_not_do_so_between_turns(tokenizer):
    """As Llama 2's, whose tokens of a text depend on whether something stands before it."""
    pieces = ["<unk>", "</s>", "\u2581", "\n", *"abgo"]
    words = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    spaced = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    assert spaced.convert_ids_to_tokens(spaced.encode("go")) == ["\u2581", "g", "o"]
    spaced.chat_template = (
        "{%- for m in messages -%}{{ 'a' + m.content + (eos_token if m.role == 'assistant' else '') }}{%- endfor -%}b"
    )
    ids = Chat(spaced).between([USER, {"role": "assistant", "content": "b"}], [USER], [], spaced.eos_token_id)
    assert spaced.convert_ids_to_tokens(ids) == ["a", "g", "o", "b"]
