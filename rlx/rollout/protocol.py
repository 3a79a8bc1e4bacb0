"""The interface between trainer and sampler: requests, completions and weight updates."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to choose the tokens of a request.

    Args:
        max_tokens: longest completion [tokens], the stop token included.
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_p: keep the fewest most likely tokens whose probabilities reach this sum, in (0, 1]; 1 keeps all.
        top_k: keep this many most likely tokens; -1 keeps all.
        stop_token_ids: the first of these ends a completion and belongs to it.
        with_log_probs: whether to return the log-prob of each token.
        with_experts: whether to return the experts that process each token; the sampler must be built for it.
        stop: a completion ends with the token that completes one of these strings in its text, special tokens included.
        include_stop_str_in_output: whether `shown` keeps the stop string.
        min_p: drop tokens less likely than this share of the most likely one.
        repetition_penalty: divides positive logits of tokens in prompt or completion, multiplies negative ones.
        presence_penalty: subtracted from the logits of tokens in the completion.
        frequency_penalty: subtracted from a token's logit for each time that the completion has it.
        bad_words: texts that are not sampled: after all tokens of one but its last, the last is not.
        logit_bias: tokens, and what is added to their logits.

    Raises:
        ValueError: a value is out of its range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    with_log_probs: bool = True
    with_experts: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"sampling: max_tokens is {self.max_tokens}, expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"sampling: temperature is {self.temperature}, expected a finite number, 0 (greedy) or more"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling: top_p is {self.top_p}, expected more than 0 and at most 1; 1 keeps all tokens")
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"sampling: top_k is {self.top_k}, expected at least 1, or -1 to keep all tokens")

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


class PrefixMemory:
    """What a sampler knows of a conversation's tokens from one turn to the next. Only the sampler reads and fills it.

    The conversation holds it, so that it goes with the conversation. It decides how fast a prompt is read, never what is sampled.

    Attributes:
        tokens: prompt and completion of the last request that had it.
        block_hashes: of their whole blocks.
        era: the object that the sampler had then; its hashes hold as long as it has the same.
    """

    __slots__ = ("block_hashes", "era", "tokens")

    def __init__(self) -> None:
        self.tokens: Sequence[int] = ()
        self.block_hashes: Sequence[Any] = ()
        self.era: object = None


@dataclass(frozen=True)
class Request:
    """One prompt to complete once.

    Args:
        prompt_ids: its tokens, at least one.
        seed: in [0, 2**63); with the prompt and the weights it determines the completion.
        sampling: how to choose tokens.
        memory: the same for all turns of a conversation; a sampler may ignore it.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    memory: PrefixMemory | None = field(default=None, compare=False, repr=False)


class EngineError(RuntimeError):
    """The sampler failed and cannot be used any more; close it and build another."""


class Completion(NamedTuple):
    """One completion.

    Args:
        token_ids: at least one token. If `finish_reason` is "stop" the last is a stop token, or completes `stop_string`.
        log_probs: of each token, from log_softmax(logits / temperature) over the whole vocabulary, before penalties, biases and
            cuts: the trainer's definition. Greedy sampling uses temperature 1. None if they were not asked for.
        finish_reason: "stop", or "length" after `max_tokens`.
        experts: of prompt and completion without the last token, which the model does not read: (tokens, decoder layers, experts
            of a token) uint8, or int16 if a layer has more than 256; 0 in layers without experts. None if not asked for.
        stop_string: the one of `Sampling.stop` that ended it.
    """

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: Literal["stop", "length"]
    experts: Tensor | None = None
    stop_string: str | None = None


class Rollout(Protocol):
    """A sampler with its own copy of the weights, and the requests that it works on.

    A request is *in flight* from `add_request` until `step` returns its completion or `abort` ends it. More may be added
    between any two steps:

        number = rollout.add_request(request)
        while rollout.running:
            for number, completion in rollout.step():
                ...  # may add the next turn's request

    The processes of a tensor-parallel group call all methods with the same arguments in the same order; see
    `rlx.rollout.flight.FirstRank`. With `ModelConfig.sends_adapters` the sampler loads the base by itself, and
    `update_weights` brings the adapters alone.
    """

    @property
    def version(self) -> int | None:
        """Version of the weights in use; None until a complete set has arrived, and after a `sleep` that loses them."""
        ...

    @property
    def running(self) -> int:
        """Number of requests in flight, those that wait for a place among `max_num_seqs` included."""
        ...

    def add_request(self, request: Request) -> int:
        """Take a request and return its number, which no other request of this sampler has; wakes up if needed.

        Raises:
            ValueError: there are no weights, or the request cannot be completed.
            EngineError: the sampler failed; build another.
        """
        ...

    def step(self) -> list[tuple[int, Completion]]:
        """Work on the requests in flight and return those that stopped, by number; [] if none did or none is in flight.

        vLLM decodes one token of each request that has a place. The hf sampler completes up to `max_num_seqs` requests.

        Raises:
            EngineError: the sampler failed and all its requests are lost; build another.
        """
        ...

    def abort(self, numbers: Iterable[int] | None = None) -> None:
        """End requests in flight, all of them if no numbers are given, and free all that they hold; they get no completion.

        Raises:
            ValueError: a number is of no request in flight; none is ended then.
        """
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete every request and return completions in the order given: `add_request` and `step` until none runs.

        Raises:
            ValueError: there are no weights, a request cannot be completed, or others are in flight.
            EngineError: the sampler failed; build another.
        """
        ...

    def take_load(self) -> dict[str, float]:
        """Return how busy the sampler was since the last call, see `rlx.rollout.flight.SamplerLoad`; {} if it had no request."""
        ...

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by `weights` (names as in the transformers model), asleep or not.

        The weights are those of the whole model, or the adapters' by the names of `rlx.models.lora.add_lora`.

        Raises:
            ValueError: they do not fit the model, or requests are in flight: a completion has one policy.
        """
        ...

    def probe(self) -> Tensor:
        """Return a sample (N,) of the weights in use in fp32 on the CPU, from the same elements at each call while awake."""
        ...

    def sleep(self) -> None:
        """Free the device memory that the sampler can take back at the next call; if weights are lost, `version` becomes None.

        Raises:
            ValueError: requests are in flight.
        """
        ...

    def wake(self) -> None:
        """Take back the device memory that `update_weights` writes to, which it else does itself."""
        ...

    def close(self) -> None:
        """End the sampler and free everything it holds; requests in flight are lost."""
        ...
