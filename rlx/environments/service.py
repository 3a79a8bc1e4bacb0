"""Answer the calls of anyone who has the key: `rlx serve`. Each call is a sample of its own, so nothing is remembered of it."""

import math
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from rlx.environments.chat import Chat
from rlx.environments.endpoint_pool import Asked, Cancelled, Event
from rlx.environments.endpoint_run import AgentRun, Call, Rejected, Sample
from rlx.environments.running import (
    IDLE_WAIT_S,
    ConversationBounds,
    ConversationOptions,
    ConversationRow,
    rare_collections,
)
from rlx.processes.pool import Lost, WorkerPool
from rlx.rollout.protocol import Rollout, Sampling, aborting

SEEDS = 2**62
LIMITS = {
    "temperature": (0.01, 100.0),
    "top_p": (1e-6, 1.0),
    "top_k": (1, 2**31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
OFF = {"temperature": (0,), "top_k": (0, -1)}
"""Values beside the limits: greedy, and all tokens."""


class ServedAddress:
    """The process that serves the address, with settings as in `endpoint_server`; a context that ends it."""

    def __init__(self, host: str, settings: dict[str, Any], tool_format: str):
        self._pool = WorkerPool("rlx.environments.endpoint_server", None, "", math.inf, lambda message, _: (0, message))
        self._server = self._pool.start()
        self._server.send(["start", host, "", "refuse", tool_format, settings])
        self.url = ""

    def __enter__(self) -> Self:
        while not self.url:
            self.poll(IDLE_WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def poll(self, timeout_s: float) -> list[Event]:
        """Return what has come; wait for the first at most this long. Raises RuntimeError if the process has ended."""
        events: list[Event] = []
        for _, _, what in self._pool.exchange(timeout_s):
            match what:
                case Lost(_, how):
                    raise RuntimeError(f"the process that serves the address {how}; see its output above")
                case "address", url:
                    self.url = url
                case "call", number, _, content:
                    events.append(Asked(number, content))
                case "cancel", number, _:
                    events.append(Cancelled(number))
        return events

    def reply(self, _: int, kind: str, number: int, *content: Any) -> None:
        self._server.send([kind, number, *content])


class Service(AgentRun):
    """Samples the turns of calls until it is interrupted.

    Args:
        context: longest prompt and turn together [tokens].
        sampling: of calls that do not ask for another.
        takes_texts: whether the sampler knows stop strings that come with a request.
    """

    def __init__(
        self, rollout: Rollout, address: ServedAddress, chat: Chat, sampling: Sampling, context: int, takes_texts: bool
    ):
        bounds = ConversationBounds(prompt_tokens=sys.maxsize, response_tokens=context)
        super().__init__(rollout, address, {}, ConversationOptions(chat, sampling, bounds, in_waves=takes_texts))
        self._address, self._context = address, context

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Serve until `is_over`. Raises EngineError if the sampler fails."""
        with aborting(self._rollout), rare_collections():
            while not is_over():
                self._take_turns(self._rollout.step() if self._sampled else [])
                calls: dict[int, Call] = {}
                for event in self._address.poll(0.0 if self._sampled else IDLE_WAIT_S):
                    if isinstance(event, Asked):
                        number, content = event
                        # The same for the same seed of a call
                        seed = secrets.randbelow(SEEDS) if content["seed"] is None else 0
                        self._rows[number], self._samples[number] = ConversationRow({}, seed, []), Sample()
                        calls[number] = Call(number, number, content)
                    elif isinstance(event, Cancelled) and event.number in self._samples:
                        if calls.pop(event.number, None) is None:
                            self._abort(event.number, [event.number])
                        self._forget(event.number)
                self._take_calls([*calls.values()])

    def _forget(self, number: int) -> None:
        del self._rows[number], self._samples[number]

    def _answer(self, call: Call) -> None:
        super()._answer(call)
        self._forget(call.key)

    def _reject(self, call: Call, reason: str, text: str) -> None:
        super()._reject(call, reason, text)
        self._forget(call.key)

    def _room(self, call: Call) -> int:
        count = len(call.nodes[0].prompt)
        if count >= self._context:
            raise Rejected(
                "length", f"the prompt has {count} tokens, expected fewer than {self._context}, the context (--context)"
            )
        return self._context - count

    def _sampling(self, call: Call) -> Sampling:
        """Return the sampling that a call asks for. Raises Rejected."""
        content, chosen = call.content, dict(call.content["chosen"])
        for name, value in chosen.items():
            low, high = LIMITS[name]
            if not (low <= value <= high or value in OFF.get(name, ())):
                also = "".join(f" or {each}" for each in OFF.get(name, ()))
                raise Rejected("invalid_value", f"{name}: got {value:g}, expected {low:g} to {high:g}{also}")
        if "top_k" in chosen:
            chosen["top_k"] = int(chosen["top_k"]) or -1
        own = self._options.sampling
        stop = (*own.stop, *(content["stop"] if self._options.in_waves else ()))
        return replace(own, with_log_probs=content["with_log_probs"], stop=stop, **chosen)
