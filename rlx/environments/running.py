"""Run conversations: sample their turns, and bring each to its environment and the answer back.

The sampler continues other conversations while environments work. Only when nothing is left to sample does it wait for them.
"""

import contextlib
import gc
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rlx.config.schema.rollout import EnvironmentConfig, MultiTurnConfig
from rlx.data.seeding import seed_for
from rlx.environments.answers import Answer
from rlx.environments.chat import Chat, Gap
from rlx.environments.conversation import Conversation
from rlx.environments.environment_pool import EnvironmentPool
from rlx.environments.protocol import Failure, Message, Observation, Reset, Turn
from rlx.errors import ExplainedError, cause_of
from rlx.heartbeat import beat
from rlx.rollout.protocol import Completion, FirstRank, Request, Rollout, Sampling, aborting

IDLE_WAIT_S = 0.2  # for environments while nothing is sampled; then the process shows that it lives, and waits again
TEMPLATE_REASON = "template"
YOUNG_OBJECTS = 50_000


class EnvironmentFailed(ExplainedError, RuntimeError):
    """An environment failed, and the run is to end then; or no conversation could continue."""


class ConversationRow(NamedTuple):
    """A conversation to run."""

    data: dict[str, Any]  # of the environment's `reset`
    seed: int  # of the sample; turns have seeds of their own, which it and their index determine
    prompt_ids: list[int]  # the data set's prompt: that of the row if the environment gives none
    kept: Conversation | None = None  # what it has so far, if it may be broken off
    budget: int = 0  # most tokens of the model before it is broken off; 0: any number


@dataclass(frozen=True)
class ConversationBounds:
    """Limits of a conversation."""

    prompt_tokens: int  # longest first prompt
    response_tokens: int  # most tokens behind it, in each branch
    turns: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)


@dataclass(frozen=True)
class ConversationOptions:
    """How conversations are run."""

    chat: Chat  # writes messages
    sampling: Sampling  # of turns; max_tokens is at most `bounds.response_tokens`
    bounds: ConversationBounds  # limits of each
    first_rank: FirstRank = field(default_factory=FirstRank)  # of a tensor-parallel group
    # Sample only when no environment works. Then requests that are sampled together, and with them rounding, do not
    # depend on the speed of environments.
    in_waves: bool = False


class Run:
    """A conversation for each row, to its end or until its budget is spent.

    Args:
        rollout: with weights, and without requests in flight.
        pool: of environments; None on ranks that do not decide, see `FirstRank`.
        done: conversations by row, which are not run again; see `Rollout.generate`.
    """

    def __init__(
        self,
        rollout: Rollout,
        pool: EnvironmentPool | None,
        rows: Sequence[ConversationRow],
        options: ConversationOptions,
        done: dict[int, Conversation] | None = None,
    ):
        self._rollout, self._pool, self._rows, self._options = rollout, pool, rows, options
        self._chat, self._bounds = options.chat, options.bounds
        self.ended: dict[int, Conversation] = {} if done is None else done
        self._waiting = deque(row for row in range(len(rows)) if row not in self.ended)
        self._open: dict[int, Conversation] = {}
        self._asked: dict[int, float] = {}  # when a row's environment got its turn
        self._sampled: dict[int, int] = {}  # rows by numbers of requests
        self._arrived: dict[int, Answer] = {}
        self.waited_s = 0.0
        self._spent = Counter[int]()  # tokens of the model, by row
        self._hopeless = ""  # why the template stopped a conversation, if no text of the model is the cause

    def to_the_end(self) -> list[Conversation]:
        """Run all conversations, and return them by row when they have ended, or spent their budget.

        Raises EnvironmentFailed if an environment failed and `on_failure` says so, or the chat template stopped every conversation;
        EngineError if the sampler failed.
        """
        if any(row.kept is not None for row in self._rows):
            self._to_pool("release", {row.seed for row in self._rows})
        try:
            with aborting(self._rollout), rare_collections():
                self._all()
        finally:
            for key in self._open:
                self._to_pool("end", key)
            self._open.clear()
        ended = [self.ended[row] for row in range(len(self._rows))]
        for own in ended:
            own.waited_s += self.waited_s
        return ended

    def _all(self) -> None:
        while self._waiting or self._open:
            while self._waiting and len(self._open) < (self._bounds.environment.max_parallel or len(self._rows)):
                self._begin(self._waiting.popleft())
            self._to_pool("flush")  # environments work, or close, while the sampler does
            if self._sampled:
                self._take_turns(self._rollout.step())
            if self._some_are_away() and not (self._options.in_waves and self._sampled):
                self._listen()
        if self._hopeless and all(each.reason.startswith(TEMPLATE_REASON) for each in self.ended.values()):
            raise EnvironmentFailed(f"no conversation could continue: {self._hopeless}")

    def _some_are_away(self) -> bool:
        return len(self._sampled) < len(self._open)

    def _to_pool(self, method: str, *arguments: Any) -> None:
        if self._pool is not None:
            getattr(self._pool, method)(*arguments)

    def _begin(self, row: int) -> None:
        kept, data = self._rows[row].kept, self._rows[row].data
        if kept is None or not kept.messages:
            self._open[row] = Conversation([], self._bounds.response_tokens)
            self._to_pool("reset", row, data)
        else:
            self._open[row] = deepcopy(kept)  # a sampler that fails begins again
            turns = [
                Turn(own["text"], index, own["finish_reason"], own["end"] - own["start"])
                for index, own in enumerate(kept.own_turns)
            ]
            self._to_pool("restore", row, self._rows[row].seed, data, turns, kept.seen)
            self._ask(row)

    def _break_off(self, key: int) -> None:
        """End the conversation for now."""
        self.ended[key] = conversation = self._open.pop(key)
        if self._pool is not None:
            conversation.seen = self._pool.hold(key, self._rows[key].seed)

    def _take_turns(self, stopped: list[tuple[int, Completion]]) -> None:
        if not stopped:
            return
        whole = list[tuple[int, Completion]]()
        for number, completion in stopped:
            key = self._sampled.pop(number)
            conversation, version = self._open[key], self._rollout.version
            self._spent[key] += len(completion.token_ids)
            if completion.finish_reason == "budget":
                assert version is not None
                conversation.begun = conversation.begun.continued(completion, version)
                self._break_off(key)
            else:
                whole.append((key, conversation.whole_turn(completion)))
        texts = self._chat.texts_of([completion for _, completion in whole]) if whole else []
        for (key, completion), text in zip(whole, map(self._options.sampling.shown, texts), strict=True):
            self._asked[key] = time.monotonic()
            self._to_pool("step", key, self._open[key].add_turn(completion, text))

    def _polled(self) -> list[tuple[int, Any]]:
        """Return what has come from environments, by key; wait for it only if nothing is sampled."""
        started, idle = time.monotonic(), not self._sampled
        wait_s = IDLE_WAIT_S if idle else 0.0
        found = self._options.first_rank.decide(lambda: self._pool.poll(wait_s))  # type: ignore[union-attr]
        if idle:
            beat()
            self.waited_s += time.monotonic() - started
        return found

    def _listen(self) -> None:
        """Take the answers that have arrived; in waves wait for all of them."""
        self._arrived |= dict(self._polled())
        if self._options.in_waves and len(self._arrived) < len(self._open):
            return
        self._take_answers({key: self._arrived[key] for key in sorted(self._arrived) if key in self._open})
        self._arrived.clear()

    def _take_answers(self, answers: dict[int, Answer]) -> None:
        """Let conversations continue, or end. The tokens between their turns are made together, which is faster."""
        self._take_prompts({key: answer for key, answer in answers.items() if isinstance(answer, Reset)})
        gaps: dict[int, Gap] = {}
        for key, answer in answers.items():
            conversation = self._open[key]
            if isinstance(answer, Failure):
                self._fail(conversation, answer.kind, answer.reason, answer.traceback)
            elif isinstance(answer, Observation):
                conversation.add_answer(answer, time.monotonic() - self._asked[key])
                if self._goes_on(conversation, answer):
                    added = [_cut(message, self._bounds.turns) for message in answer.messages]
                    gap = conversation.gap(added, self._chat.forks)
                    if gap is None:
                        conversation.reason = "length"
                    else:
                        gaps[key] = gap
        for (key, gap), written in zip(gaps.items(), self._chat.between([*gaps.values()]), strict=True):
            conversation = self._open[key]
            if isinstance(written, Exception):
                self._hopeless = self._hopeless or self._chat.fault_of(str(gap.added[0].get("role")))
                self._fail(conversation, TEMPLATE_REASON, f"{type(written).__name__}: {written}")
            elif not conversation.add_messages(gap.added, written):
                conversation.reason = "length"
        for key in answers:
            if self._open[key].reason:
                self.ended[key] = self._open.pop(key)
                self._to_pool("end", key)
            else:
                self._ask(key)

    def _take_prompts(self, answers: dict[int, Reset]) -> None:
        found = self._chat.first([(answer.messages, answer.tools) for answer in answers.values()])
        longest = self._bounds.prompt_tokens
        for (key, answer), written in zip(answers.items(), found, strict=True):
            conversation = self._open[key]
            if isinstance(written, Exception):
                self._fail(conversation, TEMPLATE_REASON, f"{type(written).__name__}: {written}")
                self._hopeless = conversation.reason
            elif not 0 < (count := len(written.token_ids)) <= longest:
                reason = f"the first prompt has {count} tokens, expected 1 to {longest}"
                self._fail(conversation, TEMPLATE_REASON, reason)
            else:
                conversation.prompt_ids, conversation.text = written.token_ids, written.text
                conversation.messages, conversation.tools = [*answer.messages], answer.tools

    def _goes_on(self, conversation: Conversation, answer: Observation) -> bool:
        """Return whether the environment's messages follow; otherwise the conversation ends here."""
        limits, own = self._bounds.turns, len(conversation.own_turns)
        if answer.done:
            conversation.reason = "done"
        elif conversation.turns[-1]["finish_reason"] == "length" and not (limits.max_turn_tokens and conversation.room):
            conversation.reason = "length"
        elif own == limits.max_assistant_turns or len(conversation.turns) - own == limits.max_user_turns:
            conversation.reason = "max_turns"
        elif not answer.messages:
            self._fail(conversation, "nonsense", "it gave no message and did not end the conversation")
        return not conversation.reason

    def _fail(self, conversation: Conversation, kind: str, reason: str, traceback: str = "") -> None:
        text, environment = f"{kind}: {reason}", self._bounds.environment
        if environment.on_failure == "end_run":
            raise EnvironmentFailed(
                f"an environment failed, {text}; set environment.on_failure=end_row to end its conversation alone"
            ) from cause_of(traceback)
        conversation.fail(text, environment.failure_reward, traceback)

    def _ask(self, key: int) -> None:
        """Request the next turn, or the rest of one."""
        conversation, seed, budget = self._open[key], self._rows[key].seed, self._rows[key].budget
        turn, sampling, left = len(conversation.own_turns), self._options.sampling, budget - self._spent[key]
        if budget and left <= 0:
            return self._break_off(key)
        most = min(conversation.room, self._bounds.turns.max_turn_tokens or conversation.room)
        if most < sampling.max_tokens:
            sampling = replace(sampling, max_tokens=most)
        begun = conversation.begun.token_ids
        tokens = (*conversation.prompt_ids, *conversation.token_ids, *begun)
        turn_seed = seed_for(seed, turn) if turn else seed
        limits = {"kept": len(begun), "budget": left if budget else None}
        request = Request(tokens, turn_seed, sampling, conversation.memory, **limits)  # type: ignore[arg-type]
        self._sampled[self._rollout.add_request(request)] = key


def _cut(message: Message, limits: MultiTurnConfig) -> Message:
    """Return the message of a tool with at most so many characters."""
    text, most = message.get("content"), limits.max_tool_response_length
    if message.get("role") != "tool" or not isinstance(text, str) or len(text) <= most:
        return message
    first = {"left": most, "right": 0, "middle": most // 2}[limits.tool_response_truncate_side]
    last = most - first
    return {**message, "content": f"{text[:first]}...(cut)...{text[len(text) - last :]}"}


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for garbage in cycles rarely: after 50,000 new objects in place of 700.

    A look reads all lists that are new, of which conversations have many with thousands of tokens, and finds nothing. It took a
    third of the time in which vLLM takes a request with a prompt of 800 tokens.
    """
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, YOUNG_OBJECTS) if first else 0, *others)  # 0 means never
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
