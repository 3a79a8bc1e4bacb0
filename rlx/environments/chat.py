"""Messages in tokens, as the chat template writes them: first prompts, and the text between two turns."""

import re
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx.data.files import text_ids, together_or_alone
from rlx.environments.protocol import CLOSE, OPEN, Message
from rlx.errors import ExplainedError
from rlx.rollout.protocol import Completion
from rlx.user_code import TEMPLATE_CHAT_S, TEMPLATE_LIMIT_S, call_within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE, SAID, HIDDEN = "rlxPROBE", "rlxSAID", "rlxHIDDEN"
"""Words that stand in texts for others: those of a turn, of a message, and special tokens."""
NUMBERED = re.compile(HIDDEN)
ANCHOR = "\n"
UNWRITTEN = "the chat template does not write the content of the role {}, given as text"
Tools = list[dict[str, Any]]
Opening = tuple[list[Message], Tools]

_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
_FUNCTION = {"name": "f", "description": "a", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_ROLES: dict[str, tuple[Message, Message]] = {
    "user": ({"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}),
    "tool": (
        {"role": "assistant", "content": "b", "tool_calls": [_CALL]},
        {"role": "tool", "content": "c", "name": "f", "tool_call_id": _CALL["id"]},
    ),
}
"""Plain examples of a turn and of an answer to it, by the answer's role."""


class RewrittenHistory(ExplainedError, ValueError):
    """A chat template writes earlier turns in another way once messages follow them."""


class UnusableTemplate(ExplainedError, ValueError):
    """A chat template leaves the content of a message out."""


class Written(NamedTuple):
    """What the template writes before a turn."""

    token_ids: list[int]  # those that it adds; of the whole conversation up to the turn if the history is rewritten
    text: str  # of the whole conversation up to the turn
    is_rewritten: bool = False  # whether it writes earlier turns in another way than the model has read and said them


class Gap(NamedTuple):
    """The place between a turn and the next."""

    history: list[Message]  # all messages so far; the last is the turn
    added: list[Message]  # the messages that follow. Special tokens in their texts become plain text.
    tools: Tools  # schemas that the first prompt had
    last_token: int  # the last sampled token. If the template closes a turn with it, it is not written twice.
    before: str = ""  # the template's text up to the turn; empty if it is not known
    said: str = ""  # the turn's text as it was sampled
    answers: Collection[int] = ()  # places in `history` of the same; special tokens are plain text there, too


class Chat:
    """Writes messages in tokens, by the tokenizer's chat template; without one, one content after the other.

    `on_rewritten` says what follows when the template would write earlier turns in another way than before, such as without their
    thinking: `refuse` lets `between` return RewrittenHistory; `keep` keeps their tokens and adds the new messages' alone; `fork`
    rewrites the whole conversation.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", on_rewritten: str = "refuse"):
        self._tokenizer, self._keeps, self.forks = tokenizer, on_rewritten == "keep", on_rewritten == "fork"
        self.vocabulary = len(tokenizer)
        listed = sorted(filter(None, tokenizer.get_added_vocab()), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, [*listed, HIDDEN])))
        # SentencePiece writes a space before each text; behind a line break it does not.
        first = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))[0]
        self._anchor_ids = tokenizer.encode(ANCHOR, add_special_tokens=False) if first.startswith("\u2581") else []
        self._end: str | None = None
        self._checked: set[tuple[str, bool]] = set()

    def first(self, chats: Sequence[Opening], from_agents: bool = False) -> list[Written | Exception]:
        """Return the first prompt of each chat, from its messages and the schemas of its tools, or any error of the template.

        In messages `from_agents` special tokens are plain text, except in the assistant's.
        """
        hides = from_agents and self._tokenizer.chat_template is not None
        return _for_all(self._first_from_agents if hides else self._first, chats)

    def _first(self, chats: Sequence[Opening]) -> list[Written]:
        if self._tokenizer.chat_template is None:
            return [Written(ids, "") for ids in text_ids(self._tokenizer, [contents_of(each) for each, _ in chats])]
        texts = self._prompts(chats)
        different = [*dict.fromkeys(texts)]  # the samples of a group have one prompt
        found = dict(zip(different, self._tokens(different), strict=True))
        return [Written([*found[text]], text) for text in texts]

    def _first_from_agents(self, chats: Sequence[Opening]) -> list[Written]:
        hidden: list[list[str]] = [[] for _ in chats]
        markers = {"assistant": NUMBERED}
        texts = self._prompts(
            [
                ([self._hide(each, own, markers.get(each["role"], self._marker)) for each in messages], tools)
                for (messages, tools), own in zip(chats, hidden, strict=True)
            ]
        )
        ids = self._ids([None] * len(texts), texts, hidden)
        return [*map(Written, ids, texts)]

    def plain_ids(self, text: str, behind: bool) -> list[int]:
        """Return the tokens of a text without messages: at the beginning, or behind another."""
        return self._encoded([text], ())[0] if behind else text_ids(self._tokenizer, [text])[0]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone."""
        return [self._tokenizer.decode([token]) for token in token_ids]

    def whole_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens with all special ones."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text alone, without any that the tokenizer puts around it."""
        return self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def texts_of(self, completions: Sequence[Completion]) -> list[str]:
        """Return the turns' texts with special tokens and stop strings, without the stop tokens that ended them."""
        ended = [own.finish_reason == "stop" and own.stop_string is None for own in completions]
        turns = [own.token_ids[: len(own.token_ids) - at] for own, at in zip(completions, ended, strict=True)]
        if self._tokenizer.is_fast:  # on all cores; transformers' own call takes one turn after the other
            return list(self._tokenizer.backend_tokenizer.decode_batch(turns, skip_special_tokens=False))
        return self._tokenizer.batch_decode(turns, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def between(self, gaps: Sequence[Gap]) -> list[Written | Exception]:
        """Return for each gap the tokens from the end of its turn to the beginning of the next, or the error.

        With `fork` and a rewritten history they are the tokens of the whole conversation. Errors are RewrittenHistory, with
        `refuse`; UnusableTemplate, if the template leaves the content of a message out; and any error of the template.
        """
        return _for_all(self._between, gaps)

    def _between(self, gaps: Sequence[Gap]) -> list[Written]:
        hidden: list[list[str]] = [[] for _ in gaps]
        safe = [self._with_plain_answers(*each) for each in zip(gaps, hidden, strict=True)]
        if self._tokenizer.chat_template is None:
            texts = [""] * len(gaps)
            tails = [contents_of(gap.added) or "\n" for gap in safe]  # something must lie between two turns
        else:
            texts = self._prompts([([*gap.history, *gap.added], gap.tools) for gap in safe])
            tails = [self._tail(*each) for each in zip(safe, texts, strict=True)]
        ids = self._ids(tails, texts, hidden)
        return [
            Written(own[1:] if tail is not None and own[:1] == [gap.last_token] else own, text, tail is None)
            for gap, own, text, tail in zip(gaps, ids, texts, tails, strict=True)
        ]

    def shows(self, tools: Tools) -> bool:
        """Return whether the template writes anything about tools."""
        if self._tokenizer.chat_template is None:
            return False
        chats = [[{"role": "user", "content": "a"}]]
        return self._texts(chats, tools) != self._texts(chats, [])

    def fault_of(self, role: str) -> str:
        """Return why no conversation can continue with messages of this role, user or tool; empty if plain ones do."""
        turn, answer = _ROLES.get(role, _ROLES["user"])
        history, added = [{"role": "user", "content": "a"}, turn], [{**answer, "role": role}]
        try:
            before, said = self._as_in_histories(history, added)
            (found,) = self.between([Gap(history, added, _TOOLS, -1, before, said)])
        except Exception as fault:  # of the template
            found = fault
        return f"{type(found).__name__}: {found}" if isinstance(found, Exception) else ""

    def _as_in_histories(self, history: list[Message], added: list[Message]) -> tuple[str, str]:
        """Return the text before the last turn and the turn, as the template writes both in a history; empty if it has no such place.

        The last turn of all may look otherwise: Qwen3 writes an empty thought into it.
        """
        (first,) = self._first([(history[:-1], _TOOLS)])
        (after,) = self._texts([[*history, *added]], _TOOLS, prompt=True) if first.text else [""]
        said, closing, _ = after[len(first.text) :].partition(self._closing()) if first.text else ("", "", "")
        is_there = closing.strip() and after.startswith(first.text) and str(history[-1]["content"]) in said
        return (first.text, said) if is_there else ("", "")

    def _tail(self, gap: Gap, after: str) -> str | None:
        """Return the part of `after`, the text of all messages, behind the words of the turn; None if the row forks there.

        A text that begins with all that the model has read and said, and closes the turn there, rewrites nothing. Otherwise the
        template or the environment writes the turn in other words, for example calls of tools, and the template's text without
        the new messages shows which. A fork follows these words too.
        """
        self._require_content(gap)
        words, closing = gap.before + gap.said, self._closing()
        # The template may write words of its own for an empty turn; a closing without letters may be part of a longer turn.
        if gap.before and gap.said and closing.strip() and after.startswith(words + closing):
            return after[len(words) :]
        try:
            tail = self._tail_by_rendering(gap, gap.added, after)
        except RewrittenHistory:
            if not self.forks:
                raise
            return None
        return None if self.forks and gap.before and words + tail != after else tail

    def _tail_by_rendering(self, gap: Gap, added: list[Message], after: str) -> str:
        *earlier, turn = gap.history
        (before,) = self._texts([gap.history], gap.tools)
        words = before.removesuffix(self._closing())
        if before.endswith(self._closing()) and after.startswith(words) and (self._keeps or _has_words(before, gap)):
            return after[len(words) :]
        if self._keeps:
            # What the template writes behind other words of the same turn
            turn = {**turn, "content": PROBE}
            (before,) = self._texts([[*earlier, turn]], gap.tools)
            (after,) = self._texts([[*earlier, turn, *added]], gap.tools, prompt=True)
            calls = before.rpartition(PROBE)[2].removesuffix(self._closing())
            rest = after.rpartition(PROBE)[2]
            if before.count(PROBE) == after.count(PROBE) == 1 and rest.startswith(calls):
                return rest[len(calls) :]
        raise RewrittenHistory(
            "the chat template writes earlier turns in another way once new messages follow, for example without their "
            "thinking; expected one that only adds text. Set actor_rollout_ref.rollout.multi_turn.on_rewritten_history=keep to "
            "continue with the sampled tokens, or =fork to continue with the rewritten ones in a separate row, or take "
            "a template that keeps them"
        )

    def _closing(self) -> str:
        """Return the text that the template writes behind the words of a last turn."""
        if self._end is None:
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
            (text,) = self._texts([messages], [])
            if PROBE not in text:
                raise UnusableTemplate(UNWRITTEN.format("assistant"))
            self._end = text.rpartition(PROBE)[2]
        return self._end

    def _require_content(self, gap: Gap) -> None:
        """Raise UnusableTemplate if the template does not write what a role says, the first time that it comes."""
        kind = (str(gap.added[0].get("role")), "tool_calls" in gap.history[-1])
        if kind not in self._checked:
            said = [{**gap.added[0], "content": SAID}]
            (after,) = self._texts([[*gap.history, *said]], gap.tools, prompt=True)
            if SAID not in after:
                raise UnusableTemplate(UNWRITTEN.format(kind[0]))
            self._checked.add(kind)

    def _prompts(self, chats: Sequence[Opening]) -> list[str]:
        """Return the text up to the next turn of each chat; neighbours with the same tools are rendered in one call."""
        return [
            text
            for tools, same in groupby(chats, key=itemgetter(1))
            for text in self._texts([messages for messages, _ in same], tools, prompt=True)
        ]

    def _texts(self, chats: list[list[Message]], tools: Tools, prompt: bool = False) -> list[str]:
        # A template is a program that came with the model
        limit_s, template = TEMPLATE_LIMIT_S + TEMPLATE_CHAT_S * len(chats), self._tokenizer.apply_chat_template
        return call_within(limit_s, template, chats, tools=tools or None, tokenize=False, add_generation_prompt=prompt)

    def _with_plain_answers(self, gap: Gap, hidden: list[str]) -> Gap:
        """Return the gap with numbers in place of special tokens in the environment's texts, and append these to `hidden`.

        Special tokens in the first prompt and in the model's turns are read as such.
        """
        markers = [self._marker if place in gap.answers else NUMBERED for place in range(len(gap.history))]
        history = [self._hide(message, hidden, own) for message, own in zip(gap.history, markers, strict=True)]
        return gap._replace(history=history, added=[self._hide(each, hidden, self._marker) for each in gap.added])

    def _hide(self, value: Any, hidden: list[str], marker: re.Pattern[str]) -> Any:
        """Return the message with a number in place of each match in its texts, and append these to `hidden`."""

        def numbered(found: re.Match[str]) -> str:
            hidden.append(found[0])
            return f"{HIDDEN}{len(hidden) - 1};"

        match value:
            case str():
                if value.isascii() and not marker.search(value):
                    return value
                whole = value.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
                return marker.sub(numbered, whole)
            case dict():
                return {
                    name: each if name == "role" else self._hide(each, hidden, marker) for name, each in value.items()
                }
            case list():
                return [self._hide(each, hidden, marker) for each in value]
        return value

    def _ids(self, tails: list[str | None], texts: list[str], hidden: list[list[str]]) -> list[list[int]]:
        """Return the tokens of each tail, or of the whole text where that is None, in which `_hide` hid its texts."""
        pieces: list[str] = []
        ends, firsts = [], set()
        for tail, text, own in zip(tails, texts, hidden, strict=True):
            if tail is None:
                firsts.add(len(pieces))
            for place, piece in enumerate(re.split(f"{HIDDEN}([0-9]+);", text if tail is None else tail)):
                pieces += self._plain(own[int(piece)]) if place % 2 else [piece]
            ends.append(len(pieces))
        ids = self._encoded(pieces, firsts)
        starts = [0, *ends]
        return [[token for piece in ids[at:end] for token in piece] for at, end in zip(starts, ends, strict=False)]

    def _plain(self, text: str) -> list[str]:
        """Return pieces of a text without special tokens: each is cut behind its first character."""
        found = self._marker.search(text)
        if found is None or len(found[0]) < 2:
            return [text]
        cut = found.start() + 1
        return [text[:cut], *self._plain(text[cut:])]

    def _encoded(self, texts: list[str], firsts: Collection[int]) -> list[list[int]]:
        """Return the tokens of each text as they are behind another text, but for the places in `firsts`."""
        anchor = self._anchor_ids
        behind = [bool(anchor and text) and place not in firsts for place, text in enumerate(texts)]
        found = self._tokens([ANCHOR + text if each else text for text, each in zip(texts, behind, strict=True)])
        return [
            ids
            if not each
            else ids[len(anchor) :]
            if ids[: len(anchor)] == anchor
            else self._tokenizer.encode(text, add_special_tokens=False)
            for text, ids, each in zip(texts, found, behind, strict=True)
        ]


def _for_all(call: Callable[[Sequence[Any]], list[Written]], items: Sequence[Any]) -> list[Written | Exception]:
    """Return the result for each item, or its error; that of the last one tried if the others were not."""
    found = together_or_alone(call, items)
    return found + found[-1:] * (len(items) - len(found))


def _has_words(text: str, gap: Gap) -> bool:
    """Return whether the template's text has the turn, if with other white space; a call of a tool may have other words.

    Such a call's thoughts may not be missing, because the model would not read them later.
    """
    turn = gap.history[-1]
    content = contents_of([turn])
    is_call = "tool_calls" in turn or not content.endswith(gap.said)
    thoughts, closed, _ = content.rpartition(CLOSE)
    words = gap.said if not is_call else thoughts.rpartition(OPEN)[2] if closed else ""
    return "".join(words.split()) in "".join(text.split())


def contents_of(messages: list[Message]) -> str:
    """Return the concatenated contents of messages; of a list of parts those of text."""
    contents = [message.get("content") or "" for message in messages]
    parts = [part for each in contents for part in (each if isinstance(each, list) else [{"text": each}])]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
