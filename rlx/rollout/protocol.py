"""The protocol between a worker and its sampler: requests in flight, weights, sleep. `Rollout` is the base of all samplers.

One sampler in this process, several engine processes or a server: clients see requests go in and completions come out.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
SAMPLED_PER_TENSOR = 1024


@dataclass(frozen=True)
class Sampling:
    """How to choose the tokens of a request."""

    max_tokens: int  # longest completion [tokens], the stop token included
    temperature: float = 1.0  # divides the logits; 0 takes the most likely token (greedy)
    top_p: float = 1.0  # keep the fewest most likely tokens whose probabilities reach this sum, in (0, 1]; 1 keeps all
    top_k: int = -1  # keep this many most likely tokens; -1 keeps all
    stop_token_ids: tuple[int, ...] = ()  # the first of these ends a completion and belongs to it
    with_log_probs: bool = True  # whether to return the log-prob of each token
    with_experts: bool = False  # whether to return the experts of each token; the sampler must be built for it
    # The token that completes one of these in the text, special tokens included, ends a completion
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False  # whether `shown` keeps the stop string
    min_p: float = 0.0  # drop tokens less likely than this share of the most likely one
    # Divides positive logits of tokens in prompt or completion, multiplies negative ones
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the completion
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time that the completion has it
    bad_words: tuple[str, ...] = ()  # texts that are not sampled: after all tokens of one but its last, the last is not
    logit_bias: tuple[tuple[int, float], ...] = ()  # tokens, and what is added to their logits
    # Each draw depends on the request's seed and the token's place in the completion alone, so a request that goes on from kept tokens
    # draws what one without a break would have drawn. The hf sampler always draws like this.
    by_position: bool = False

    @property
    def needs_tokenizer(self) -> bool:
        """Whether a sampler must know the texts of tokens."""
        return bool(self.stop or self.bad_words)

    def shown(self, text: str) -> str:
        """Return the text of a completion up to its first stop string, and with it if configured."""
        found = [(at, at + len(each)) for each in self.stop if (at := text.find(each)) >= 0]
        return text[: min(found)[self.include_stop_str_in_output]] if found else text

    @property
    def log_prob_temperature(self) -> float:
        """Temperature of the distribution that log-probs are taken from; 1 for greedy."""
        return self.temperature or 1.0


@dataclass(slots=True, eq=False)
class PrefixMemory:
    """What a sampler knows of a conversation's tokens from one turn to the next. Only the sampler reads and fills it.

    The conversation holds it, so that it goes with the conversation. It decides how fast a prompt is read, never what is sampled.
    """

    tokens: Sequence[int] = ()  # prompt and completion of the last request that had it
    block_hashes: Sequence[Any] = ()  # of their whole blocks
    era: object = None  # what the sampler had then; the hashes hold as long as it has the same


@dataclass(frozen=True)
class Request:
    """One prompt to complete once."""

    prompt_ids: tuple[int, ...]  # its tokens, at least one
    seed: int  # in [0, 2**63); with the prompt and the weights it determines the completion
    sampling: Sampling
    # The same for all turns of a conversation; a sampler may ignore it
    memory: PrefixMemory | None = field(default=None, compare=False, repr=False)
    # The last so many of `prompt_ids` are of an earlier request with this seed: they begin the completion
    kept: int = 0
    budget: int | None = None  # most tokens to sample now; None: all that `sampling.max_tokens` leaves

    @property
    def room(self) -> int:
        """Most tokens to sample now."""
        left = self.sampling.max_tokens - self.kept
        return left if self.budget is None else min(left, self.budget)

    @property
    def prompt(self) -> tuple[int, ...]:
        """The prompt without the tokens that begin the completion."""
        return self.prompt_ids[: len(self.prompt_ids) - self.kept]


class EngineError(RuntimeError):
    """The sampler failed and cannot be used any more; close it and build another."""


class Completion(NamedTuple):
    """One completion."""

    # At least one token, behind those that the request has; with "stop" the last is a stop token, or completes `stop_string`
    token_ids: list[int]
    # Of each token, from log_softmax(logits / temperature) over the whole vocabulary, before penalties, biases and cuts: the trainer's
    # definition. Greedy sampling uses temperature 1. None if they were not asked for.
    log_probs: list[float] | None
    # "length" after `max_tokens`; another request may continue "budget"
    finish_reason: Literal["stop", "length", "budget"]
    # Of prompt and completion without the last token, which the model does not read: (tokens, decoder layers, experts of a token) uint8,
    # or int16 if a layer has more than 256; 0 in layers without experts. None if not asked for.
    experts: Tensor | None = None
    stop_string: str | None = None  # the one of `Sampling.stop` that ended it


class Kept(NamedTuple):
    """What a sample has so far: tokens, their log-probs if asked for, and the version of the weights that sampled each."""

    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    versions: Sequence[int] = ()
    is_finished: bool = False

    def continued(self, completion: Completion, version: int) -> "Kept":
        tokens, log_probs = [*self.token_ids, *completion.token_ids], [*self.log_probs, *(completion.log_probs or ())]
        versions = [*self.versions, *[version] * len(completion.token_ids)]
        return Kept(tokens, log_probs, versions, completion.finish_reason != "budget")


class EngineLoad(NamedTuple):
    """How many requests an engine works on now, and how many wait for a place."""

    running: int
    waiting: int

    @classmethod
    def of(cls, requests: int, places: int) -> "EngineLoad":
        return cls(min(requests, places), max(0, requests - places))


class Rollout(ABC):
    """A sampler with its own copy of the weights, and the requests that it works on.

    A request is *in flight* from `add_request` until `step` returns its completion or `abort` ends it. More may be added
    between any two steps:

        number = rollout.add_request(request)
        while rollout.running:
            for number, completion in rollout.step():
                ...  # may add the next turn's request

    The processes of a tensor-parallel group call all methods with the same arguments in the same order; see `FirstRank`. With
    `ModelConfig.sends_adapters` the sampler loads the base by itself, and `update_weights` brings the adapters alone.

    This class numbers and counts the requests; a sampler implements the methods below `take_load`.

    Args:
        max_num_seqs: requests that are decoded at once; more wait.

    Attributes:
        version: of the weights in use; None until a complete set has arrived, and after a `sleep` that loses them.
        tokens: of all completions so far.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.version: int | None = None
        self.tokens = 0
        self._requests: dict[int, Request] = {}  # those in flight by number, oldest first
        self._numbers = count()
        self._load = SamplerLoad(max_num_seqs)
        self._finished = SimpleQueue[tuple[int, list[int]]]()

    @property
    def running(self) -> int:
        """Number of requests in flight, those that wait for a place among `max_num_seqs` included."""
        return len(self._requests)

    def add_request(self, request: Request) -> int:
        """Take a request and return its number, which no other request of this sampler has; wakes up if needed.

        Raises ValueError: there are no weights, or the request cannot be completed; EngineError: the sampler failed; build
        another.
        """
        self._require_weights("add_request")
        if fault := self._any_fault(request):
            raise ValueError(f"add_request: the request {fault}")
        return self._add(request)

    def step(self) -> list[tuple[int, Completion]]:
        """Work on the requests in flight and return those that stopped, by number; [] if none did or none is in flight.

        vLLM decodes one token of each request that has a place. The hf sampler completes up to `max_num_seqs` requests. Raises
        EngineError: the sampler failed and all its requests are lost; build another.
        """
        if not self._requests:
            return []
        try:
            stopped = self._advance(self._requests)
        except EngineError:
            self._requests.clear()  # the failed engine has lost them
            raise
        for place, (number, completion) in enumerate(stopped):
            request = self._requests.pop(number)
            self.tokens += len(completion.token_ids)
            if completion.finish_reason == "length" and request.kept + request.room < request.sampling.max_tokens:
                stopped[place] = number, completion._replace(finish_reason="budget")
        self._load.note(self.running, has_stopped=bool(stopped))
        return stopped

    def abort(self, numbers: Iterable[int] | None = None) -> None:
        """End requests in flight, all of them if no numbers are given, and free all that they hold; they get no completion.

        Raises ValueError: a number is of no request in flight; none is ended then.
        """
        ended = list(self._requests if numbers is None else dict.fromkeys(numbers))
        unknown = [number for number in ended if number not in self._requests]
        if unknown:
            raise ValueError(
                f"abort: got {unknown[0]}, expected the number of one of {self.running} requests in flight; a request that has "
                "stopped is no longer in flight"
            )
        self._leave(ended)
        for number in ended:
            del self._requests[number]
        self._load.note(self.running)

    def generate(self, requests: Sequence[Request], done: dict[int, Completion] | None = None) -> list[Completion]:
        """Complete every request and return completions in the order given: `add_request` and `step` until none runs.

        Args:
            requests: what to complete.
            done: completions by index in `requests`, which are not sampled again. The others are added as they stop, so that a
                sampler that takes the place of a failed one need not begin with the first.

        Raises ValueError: there are no weights, a request cannot be completed, or others are in flight; EngineError: the sampler
        failed; build another.
        """
        self._require_weights("generate")
        self._require_idle("generate")
        for index, request in enumerate(requests):
            if fault := self._any_fault(request):
                raise ValueError(f"generate: request {index} {fault}")
        done = {} if done is None else done
        self._finished = SimpleQueue()
        with aborting(self):
            index_of = {self._add(request): at for at, request in enumerate(requests) if at not in done}
            while self._requests:
                for number, completion in self.step():
                    at = index_of[number]
                    done[at], request = completion, requests[at]
                    if completion.finish_reason != "budget":
                        kept = request.prompt_ids[len(request.prompt_ids) - request.kept :]
                        self._finished.put((request.seed, [*kept, *completion.token_ids]))
        return [done[at] for at in range(len(requests))]

    def finished(self) -> list[tuple[int, list[int]]]:
        """Return seed and all tokens of what `generate` has completed since the last call, while it runs in another thread."""
        queue = self._finished
        return [queue.get() for _ in range(queue.qsize())]

    def take_load(self) -> dict[str, float]:
        """Return how busy the sampler was since the last call, see `SamplerLoad`; {} if it had no request."""
        load, self._load = self._load, SamplerLoad(self.max_num_seqs)
        self._load.note(self.running)
        return load.figures()

    def engine_loads(self) -> list[EngineLoad]:
        """Return the load of each engine now, in a fixed order; may be called during a `step`."""
        return [EngineLoad.of(self.running, self.max_num_seqs)]

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by `weights` (names as in the transformers model), asleep or not.

        The weights are those of the whole model, or the adapters' by the names of `rlx.models.lora.add_lora`. Raises ValueError:
        they do not fit the model, or requests are in flight: a completion has one policy.
        """

    @abstractmethod
    def probe(self) -> Tensor:
        """Return a sample (N,) of the weights in use in fp32 on the CPU, from the same elements at each call while awake."""

    def sleep(self) -> None:
        """Free the device memory that the sampler can take back at the next call; if weights are lost, `version` becomes None.

        Raises ValueError: requests are in flight.
        """
        self._require_idle("sleep")

    def wake(self) -> None:  # noqa: B027
        """Take back the device memory that `update_weights` writes to, which it otherwise does itself."""

    @abstractmethod
    def close(self) -> None:
        """End the sampler and free everything it holds; requests in flight are lost."""

    @abstractmethod
    def _fault(self, request: Request) -> str | None:
        """Return why the request cannot be completed, as a continuation of "the request …"; None if it can."""

    @abstractmethod
    def _advance(self, requests: Mapping[int, Request]) -> list[tuple[int, Completion]]:
        """Do one step on the requests in flight, at least one; see `step`."""

    def _enter(self, number: int, request: Request) -> None:  # noqa: B027
        """Register a new request; the sampler has weights."""

    def _leave(self, numbers: Sequence[int]) -> None:  # noqa: B027
        """Free all that requests hold, because they are aborted."""

    def _any_fault(self, request: Request) -> str | None:
        if request.room < 1:
            return f"has {request.kept} of {request.sampling.max_tokens} tokens and a budget of {request.budget}; expected room for one"
        return self._fault(request)

    def _add(self, request: Request) -> int:
        number = next(self._numbers)
        self._enter(number, request)
        self._requests[number] = request
        self._load.note(self.running)
        return number

    def _require_weights(self, method: str) -> None:
        if self.version is None:
            raise ValueError(f"{method}: no complete set of weights has arrived; call update_weights first")

    def _require_idle(self, method: str) -> None:
        if self._requests:
            raise ValueError(
                f"{method}: got {self.running} requests in flight, expected none; call step until they have stopped, or abort them"
            )


@contextlib.contextmanager
def aborting(rollout: Rollout) -> Iterator[None]:
    """Abort what is still in flight at the end, also after an error: a sampler with requests neither sleeps nor takes weights."""
    try:
        yield
    finally:
        if rollout.running:
            rollout.abort()


class SamplerLoad:
    """How busy a sampler was, from the times at which the number of its requests in flight changed.

    Requests beyond `max_num_seqs` wait and are not counted as running.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._places = max_num_seqs
        self._running = self._most = 0
        self._request_seconds = 0.0
        self._start: float | None = None  # of the first request
        self._last = 0.0
        self._stops: tuple[float, float] | None = None  # the first and the last

    def note(self, in_flight: int, has_stopped: bool = False) -> None:
        """Note the number of requests in flight from now on, and whether one of them has just been completed."""
        now = time.monotonic()
        if self._start is None:
            if not in_flight:
                return
            self._start = self._last = now
        self._request_seconds += self._running * (now - self._last)
        self._running, self._last = min(in_flight, self._places), now
        self._most = max(self._most, self._running)
        if has_stopped:
            self._stops = (self._stops[0] if self._stops else now, now)

    def figures(self) -> dict[str, float]:
        """Return the load from the first request to the last change; {} without requests.

        Returns:
            running_mean: requests that were decoded, averaged over time; running_max: the most at any time; busy_share:
            running_mean / max_num_seqs; tail_s: from the first completion to the last [s].
        """
        if self._start is None:
            return {}
        mean = self._request_seconds / max(self._last - self._start, 1e-9)
        first, last = self._stops or (0.0, 0.0)
        return {
            "running_mean": mean,
            "running_max": float(self._most),
            "busy_share": mean / self._places,
            "tail_s": last - first,
        }


def joined_loads(loads: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return one load for several calls or processes: means of running_mean and busy_share, the largest of the others."""
    known = [load for load in loads if load]
    columns = {name: [load[name] for load in known] for name in (known[0] if known else ())}
    means = ("running_mean", "busy_share")
    return {name: sum(each) / len(each) if name in means else max(each) for name, each in columns.items()}


class FirstRank:
    """Lets the ranks of a tensor-parallel group see one order of events; `size` neighbours are a group.

    The ranks run the same program, but an event outside, such as a tool's answer, comes at other times on each. So the first
    rank alone looks at the outside, and the others take over what it saw:

        arrived = first_rank.decide(lambda: pool.poll(0.1))
    """

    def __init__(self, size: int = 1) -> None:
        self._group = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None

    @property
    def is_this(self) -> bool:
        """Whether this process decides; the others need nothing that only `function` uses."""
        return self._group is None or dist.get_rank(self._group) == 0

    def decide(self, function: Callable[[], T]) -> T:
        """Call a function on the first rank and return its result on all of them; it is sent pickled.

        Raises Exception: the function's error, on all ranks: RuntimeError with its class and message on the others.
        """
        if self._group is None:
            return function()
        answer: list[Any] = [None, None]
        error: Exception | None = None
        if self.is_this:
            try:
                answer[0] = function()
            except Exception as raised:
                error, answer[1] = raised, f"{type(raised).__name__}: {raised}"
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        if error is not None:
            raise error
        if answer[1] is not None:
            raise RuntimeError(f"on the first rank of the group: {answer[1]}")
        return cast(T, answer[0])


def evenly_spaced(tensor: Tensor) -> Tensor:
    """Return at most SAMPLED_PER_TENSOR elements of a tensor in fp32, on its device."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-len(flat) // SAMPLED_PER_TENSOR))].to(torch.float32, copy=True)


def on_cpu(samples: Sequence[Tensor]) -> Tensor:
    """Return samples as one tensor (N,) on the CPU: one copy from the device, because each waits for it."""
    return torch.cat(list(samples)).cpu() if samples else torch.empty(0)
