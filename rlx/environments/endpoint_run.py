"""Run samples whose agents call the policy at an address: their calls become requests, their turns rows.

A turn continues the tokens of the turn that its messages continue, as those were sampled. So a sample is a tree of turns. Each path
that only grew is one row; a turn that another one has already continued begins a new row with its history, which is not in the loss.
"""

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.data.seeding import seed_for
from rlx.environments.chat import Gap, Tools, Written, contents_of
from rlx.environments.conversation import CHARACTERS_PER_TOKEN, Branch, Conversation, common, with_opening
from rlx.environments.endpoint_pool import Asked, Cancelled, Finished, Restarted
from rlx.environments.protocol import Failure, Message, Observation
from rlx.environments.running import TEMPLATE_REASON, Run
from rlx.rollout.protocol import Completion, PrefixMemory, Request, Sampling

logger = logging.getLogger(__name__)

MOST_TURNS = 2048  # of a sample without `max_assistant_turns`
LEAST_LOG_PROB = -9999.0  # JSON has no infinity
_told: set[str] = set()


@dataclass(eq=False)
class Node:
    """A turn and the tokens before it."""

    parent: "Node | None"  # the turn that it continues
    prompt: list[int]  # tokens behind the parent's; without one all of the row before the turn
    row_prompt: int  # how many tokens of its row are the row's prompt
    behind: int  # how many tokens of the row are behind that and before the turn
    is_history: bool = False  # whether the row begins with a history that is not only its prompt
    role: str = "user"  # of the last message before it
    said_before: str = ""  # contents of the messages that its call added
    # For the chat template:
    messages: list[Message] = field(default_factory=list)  # all before the turn
    answers: list[int] = field(default_factory=list)  # places of those whose special tokens are plain text
    tools: Tools = field(default_factory=list)
    before: str = ""  # their text
    completion: Completion = field(default_factory=lambda: Completion([], None, "stop"))
    text: str = ""
    memory: PrefixMemory = field(default_factory=PrefixMemory, repr=False)
    answered: float = 0.0  # when
    seconds: float | None = None  # from then to the agent's next call or end
    overlaps: bool = False  # whether its seed depends on the order of calls made at once

    @property
    def is_first(self) -> bool:
        """Whether it is the first turn of its row."""
        return self.parent is None or self.is_history

    @property
    def tokens(self) -> list[int]:
        """All tokens of the row up to the end of the turn."""
        path = [self]
        while not path[-1].is_first:
            path.append(path[-1].parent)  # type: ignore[arg-type]
        return [token for each in reversed(path) for token in (*each.prompt, *each.completion.token_ids)]


def conversation_of(nodes: Sequence[Node], width: int) -> Conversation:
    """Return the rows of a sample's turns, in the order in which they came; the last row is the conversation's own."""
    rows: list[Conversation] = []
    places: dict[Node, tuple[int, int]] = {}  # row, and tokens behind its prompt up to the turn's end
    records: list[dict[str, Any]] = []
    for node in nodes:
        place, end = (0, 0) if node.is_first else places[node.parent]  # type: ignore[index]
        known = len(rows[place].turns) if rows else 0
        if node.is_first or end < len(rows[place].token_ids):
            before = node.prompt[node.row_prompt :] if node.is_first else rows[place].token_ids[:end]
            prompt = node.prompt[: node.row_prompt] if node.is_first else rows[place].prompt_ids
            place, known = len(rows), 0
            rows.append(Conversation(prompt, width))
            if node.is_history or not node.is_first:
                rows[place].append(before, False, [0.0] * len(before), "history", node.said_before * node.is_first)
        row = rows[place]
        if not node.is_first:
            row.append(node.prompt, False, [0.0] * len(node.prompt), node.role, node.said_before)
        row.add_turn(node.completion, node.text)
        row.turns[-1]["seconds"] = node.seconds
        row.turns[-1] |= {"overlaps": True} if node.overlaps else {}
        places[node] = place, len(row.token_ids)
        records += [record | {"branch": place} for record in row.turns[known:]]
    if not rows:
        return Conversation([], width)
    *earlier, last = rows
    branches = [Branch(each.prompt_ids, each.token_ids, each.sampled, each.log_probs) for each in earlier]
    return replace(last, earlier=branches, turns=records, tools=nodes[0].tools)


class Rejected(Exception):
    """A call is not sampled: the reason as a conversation's, and a text for the agent."""


@dataclass(eq=False)
class Call:
    """A call in work."""

    key: int  # of its sample
    number: int
    content: dict[str, Any]  # see `endpoint_server`
    nodes: list[Node] = field(default_factory=list)  # one for each choice
    left: set[int] = field(default_factory=set)  # numbers of its requests that are sampled


@dataclass
class Sample:
    """The calls of a sample."""

    begun: int = 0  # choices that were requested
    read: int = 0  # calls that continued a turn
    limit: str = ""  # why the last such call was rejected: length or max_turns
    told: str = ""  # the error that its agent got
    nodes: dict[tuple[int, int], Node] = field(default_factory=dict)  # its turns, in order
    calls: dict[int, Call] = field(default_factory=dict)  # in work


class AgentRun(Run):
    """Runs an agent for each row; see Run."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._samples: dict[int, Sample] = {}
        self._pending: dict[int, list[Call]] = {}
        self._finished: dict[int, Finished] = {}
        self._node_of: dict[int, tuple[Call, Node]] = {}  # by numbers of requests

    def _begin(self, row: int) -> None:
        super()._begin(row)
        self._samples[row] = Sample()

    def _some_are_away(self) -> bool:
        return bool(self._open)

    def _take_turns(self, stopped: list[tuple[int, Completion]]) -> None:
        texts = self._chat.texts_of([completion for _, completion in stopped]) if stopped else []
        for (number, completion), text in zip(stopped, texts, strict=True):
            del self._sampled[number]
            call, node = self._node_of.pop(number)
            if call.content["stop"]:
                completion, text = self._cut(completion, call.content["stop"], text)
            own = self._options.sampling
            ends = replace(own, stop=(*own.stop, *call.content["stop"]))
            node.completion, node.text = completion, ends.shown(text)
            call.left.discard(number)
            if not call.left:
                self._answer(call)

    def _cut(self, completion: Completion, stops: Sequence[str], text: str) -> tuple[Completion, str]:
        """Return a completion up to the token that completes one of these strings, and its text."""
        ids, log_probs = completion.token_ids, completion.log_probs
        if not any(stop in text for stop in stops):
            return completion, text

        def begins(count: int) -> str:
            return self._chat.whole_text(ids[:count])

        count = bisect_left(range(len(ids)), True, key=lambda count: any(stop in begins(count) for stop in stops))
        left = begins(count)
        own = next(stop for stop in stops if stop in left)
        return Completion(ids[:count], log_probs and log_probs[:count], "stop", stop_string=own), left

    def _answer(self, call: Call) -> None:
        sample, content, choices = self._samples[call.key], call.content, []
        del sample.calls[call.number]
        with_ids = content["return_token_ids"]
        for place, node in enumerate(call.nodes):
            sample.nodes[call.number, place], node.answered = node, time.monotonic()
            ids, log_probs, reason = node.completion[:3]
            whole = "" if content["is_chat"] else self._chat.whole_text(ids)
            choice = {"text": node.text, "whole_text": whole, "finish_reason": reason, "count": len(ids)}
            choice["stop_string"] = node.completion.stop_string
            if content["with_log_probs"] and log_probs:
                shown = [max(x, LEAST_LOG_PROB) for x in log_probs]
                choice |= {"log_probs": shown, "token_texts": self._chat.pieces(ids)}
            choices.append(choice | ({"token_ids": ids} if with_ids else {}))
        before = node.tokens[: -len(ids)] if with_ids else None
        answer = {"choices": choices, "prompt_tokens": node.row_prompt + node.behind, "prompt_ids": before}
        self._to_pool("reply", call.key, "answer", call.number, answer)

    def _listen(self) -> None:
        """Take what has come from agents; in waves wait until each has a call or has ended."""
        for key, event in self._polled():
            if key in self._open:
                self._note(key, event)
        if self._options.in_waves and any(
            not self._pending.get(key) and key not in self._finished for key in self._open
        ):
            return
        self._take_calls([call for key in sorted(self._pending) for call in self._pending[key]])
        self._pending.clear()
        for key in sorted(self._finished):
            self._finish(key, self._finished.pop(key))

    def _note(self, key: int, event: Any) -> None:
        """Take an `endpoint_pool.Event`."""
        match event:
            case Asked(number, content):
                self._pending.setdefault(key, []).append(Call(key, number, content))
            case Cancelled(number):
                self._pending[key] = [each for each in self._pending.get(key, ()) if each.number != number]
                self._abort(key, [number])
            case Restarted() | Finished():
                self._pending.pop(key, None)
                self._abort(key, [*self._samples[key].calls])
                if isinstance(event, Finished):
                    self._finished[key] = event
                else:
                    self._samples[key] = Sample()

    def _abort(self, key: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            call = self._samples[key].calls.pop(number, None)
            if call is not None:
                self._rollout.abort(call.left)
                for request in call.left:
                    del self._node_of[request], self._sampled[request]

    def _take_calls(self, calls: Sequence[Call]) -> None:
        """Request the turns of calls, or reject them. Tokens of all are made together, which is faster."""
        longest = CHARACTERS_PER_TOKEN * (self._bounds.prompt_tokens + self._bounds.response_tokens)
        for call in calls:
            call.nodes.append(self._node(call))
        fits = {call.number for call in calls if len(call.nodes[0].said_before) <= longest}
        chats = [call for call in calls if call.content["is_chat"] and call.number in fits]
        behind = [call for call in chats if call.nodes[0].parent is not None]
        first = [call for call in chats if call.nodes[0].parent is None]
        found = self._chat.between([_gap(call.nodes[0], len(call.content["added"])) for call in behind])
        found += self._chat.first([(call.nodes[0].messages, call.nodes[0].tools) for call in first], from_agents=True)
        written = {call.number: each for call, each in zip(behind + first, found, strict=True)}
        for call in calls:
            try:
                if call.number not in fits:
                    raise Rejected("length", f"the messages have more than {longest} characters")
                self._write(call, written.get(call.number))
                self._request(call)
            except Rejected as fault:
                self._reject(call, *fault.args)

    def _reject(self, call: Call, reason: str, text: str) -> None:
        sample = self._samples[call.key]
        code = "context_length_exceeded" if reason == "length" else reason
        if reason not in (TEMPLATE_REASON, "invalid_value"):
            sample.limit, sample.told = reason, text
        self._to_pool("reply", call.key, "reject", call.number, text, code)

    def _node(self, call: Call) -> Node:
        """Return the turn that a call wants, without its tokens."""
        content, turn = call.content, call.content["turn"]
        parent = self._samples[call.key].nodes[tuple(turn)] if turn else None
        added = content["added"]
        node = Node(parent, [], 0, 0, tools=content["tools"], said_before=contents_of(added), role=added[-1]["role"])
        if not content["is_chat"]:
            return node
        if parent is not None:
            if parent.seconds is None:
                parent.seconds = time.monotonic() - parent.answered
            said = content["templated"] or {"role": "assistant", "content": parent.text}
            node.messages, node.answers = [*parent.messages, with_opening(said, parent.before)], [*parent.answers]
        start = len(node.messages)
        node.answers += [start + place for place, each in enumerate(added) if each["role"] != "assistant"]
        node.messages = node.messages + added
        return node

    def _write(self, call: Call, written: Written | Exception | None) -> None:
        """Give a call's turn the tokens before it. Raises Rejected."""
        node, content, bounds, sample = call.nodes[0], call.content, self._bounds, self._samples[call.key]
        if isinstance(written, Exception):
            raise Rejected(TEMPLATE_REASON, f"{type(written).__name__}: {written}")
        if written is not None:
            node.prompt, node.before = written.token_ids, written.text
            node.is_history = written.is_rewritten or content["is_rewritten"]
        elif content["ids"] is None:
            node.prompt = self._chat.plain_ids(node.said_before, behind=node.parent is not None)
        else:
            node.parent, node.prompt = _longest(sample.nodes.values(), content["ids"])
            most = self._chat.vocabulary - 1
            if (wrong := next((each for each in node.prompt if not 0 <= each <= most), None)) is not None:
                raise Rejected("invalid_value", f"prompt: got the token id {wrong}, expected 0 to {most}")
        count, first = len(node.prompt), next(iter(sample.nodes.values()), None)
        if node.parent is not None and not node.is_history:
            node.row_prompt, node.memory = node.parent.row_prompt, node.parent.memory
            node.behind = node.parent.behind + len(node.parent.completion.token_ids) + count
        else:
            node.row_prompt = count
            if first is not None and (node.is_history or count > bounds.prompt_tokens):
                base = node.parent or first
                node.row_prompt = max(1, common(base.tokens[: base.row_prompt], node.prompt))
                node.is_history = True
            node.behind = count - node.row_prompt
        if not 0 < node.row_prompt <= bounds.prompt_tokens:
            text = f"the first prompt has {count} tokens, expected 1 to {bounds.prompt_tokens} (data.max_prompt_length)"
            raise Rejected(TEMPLATE_REASON, text)

    def _request(self, call: Call) -> None:
        """Request the turns of a call. Raises Rejected."""
        node, content, bounds, sample = call.nodes[0], call.content, self._bounds, self._samples[call.key]
        room = self._room(call)
        limits = bounds.turns
        most, answers = limits.max_assistant_turns or MOST_TURNS, limits.max_user_turns or math.inf
        if sample.begun + content["n"] > most or (node.parent is not None and sample.read >= answers):
            raise Rejected("max_turns", f"the sample has had its {min(most, answers + 1)} turns")
        sampling, seed = self._sampling(call), self._rows[call.key].seed
        most = min(room, limits.max_turn_tokens or room, content["max_tokens"] or room)
        if most < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=most)
        overlapping = [each for each in (call, *sample.calls.values()) if sample.calls and each.content["seed"] is None]
        for own in (own for each in overlapping for own in each.nodes):
            own.overlaps = True
        if overlapping and "seed" not in _told:
            _told.add("seed")
            logger.warning(
                "calls of a sample overlap, and their order decides their seeds: a resumed run may differ; give each call a seed"
            )
        before = node.parent.tokens if node.parent is not None and not node.is_history else []
        call.nodes += [replace(node, memory=PrefixMemory()) for _ in range(content["n"] - 1)]
        for place, own in enumerate(call.nodes):
            turn = sample.begun + place
            own_seed = seed_for(seed, turn) if turn else seed
            if content["seed"] is not None:
                own_seed = seed_for(seed, "call", content["seed"], place)
            try:
                number = self._rollout.add_request(Request((*before, *node.prompt), own_seed, sampling, own.memory))
            except ValueError as fault:  # before the first is taken: they differ in their seeds alone
                raise Rejected(TEMPLATE_REASON, str(fault)) from None
            call.left.add(number)
            self._sampled[number], self._node_of[number] = call.key, (call, own)
        sample.begun, sample.read = sample.begun + content["n"], sample.read + (node.parent is not None)
        sample.calls[call.number] = call

    def _room(self, call: Call) -> int:
        """Return the most tokens of a call's turns. Raises Rejected."""
        behind, most = call.nodes[0].behind, self._bounds.response_tokens
        if behind < most:
            return most - behind
        text = f"{behind} tokens behind the prompt leave none of {most} (data.max_response_length)"
        raise Rejected("length", text)

    def _sampling(self, call: Call) -> Sampling:
        """Return the run's sampling, with a call's stop strings if the sampler knows texts; `_cut` handles them anyway."""
        own = self._options.sampling
        for name, value in call.content["chosen"].items():
            if value != getattr(own, name) and name not in _told:
                _told.add(name)
                logger.warning(
                    "an agent asks for %s=%s; the run's own value holds, because the trainer's log-probs are of that distribution "
                    "(actor_rollout_ref.rollout.%s)",
                    *(name, value, name),
                )
        knows_texts = self._options.in_waves or own.stop  # vLLM starts without a tokenizer otherwise
        return replace(own, stop=(*own.stop, *call.content["stop"])) if knows_texts and call.content["stop"] else own

    def _finish(self, key: int, finished: Finished) -> None:
        """Make a sample's conversation of the turns that its agent has read."""
        sample, answer = self._samples.pop(key), finished.answer
        read = {node for (number, _), node in sample.nodes.items() if number in finished.read}
        for node in [*read]:  # it has read all that it continued
            while node.parent is not None:
                node = node.parent
                read.add(node)
        nodes = [node for node in sample.nodes.values() if node in read]
        for node in nodes:
            node.seconds = time.monotonic() - node.answered if node.seconds is None else node.seconds
        own = self.ended[key] = conversation_of(nodes, self._bounds.response_tokens)
        # The agent may end by the error of a call beyond a limit
        is_limit = isinstance(answer, Failure) and sample.limit and sample.told in answer.reason
        if isinstance(answer, Failure) and not (is_limit and nodes):
            self._fail(own, answer.kind, answer.reason, answer.traceback)
        elif not nodes:
            self._fail(own, "nonsense", "the agent ended without an answer of the model")
        else:
            own.reason = sample.limit if is_limit else "done"
            if isinstance(answer, Observation):
                own.take_info(answer.info)
                own.own_turns[-1]["reward"] = answer.reward
        del self._open[key]
        self._to_pool("end", key)


def _gap(node: Node, added: int) -> Gap:
    parent = node.parent
    assert parent is not None
    ends = node.messages[:-added], node.messages[-added:]
    return Gap(*ends, node.tools, parent.completion.token_ids[-1], parent.before, parent.text, {*parent.answers})


def _longest(nodes: Iterable[Node], ids: list[int]) -> tuple[Node | None, list[int]]:
    """Return the longest turn whose row a prompt begins with, and the rest of the prompt."""
    begun = [node for node in nodes if ids[: len(tokens := node.tokens)] == tokens]
    found = max(begun, key=lambda node: len(node.tokens), default=None)
    return found, ids[len(found.tokens) if found else 0 :]
