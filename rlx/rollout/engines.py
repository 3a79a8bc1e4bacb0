"""Several vLLM engines for one GPU, each a process with a scheduler of its own. This process imports no vLLM.

vLLM's scheduler is one thread of Python, and while it works the GPU waits. With several engines the GPU decodes for one while
the schedulers of the others work. See docs/rollout.md, "Several engines for one GPU".
"""

import contextlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.config.vllm_range import ENGINE_BYTES
from rlx.heartbeat import beat
from rlx.models.loading import load_skeleton
from rlx.processes import child
from rlx.rollout import wire
from rlx.rollout.protocol import Completion, EngineError, EngineLoad, Request, Rollout
from rlx.rollout.vllm_support import DeviceMemory, request_fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOK_S = 0.005
"""A step returns after this time without completions, because the caller may have requests for other engines."""
QUEUE_SHARE = 1.25  # of `max_num_seqs`: with `assign_late` engines have at most so many requests
END_S = 3.0  # for a process to write its stack, or to end
CHECKED_SHARE = 0.02  # vLLM checks that so much is free; the cache has a size of its own
# Of the worker's process group and launcher; an engine has a group of its own.
_GROUP = ("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "MASTER_", "NODE_RANK", "ROLE_", "TORCHELASTIC_")


class EngineProcess:
    """One process for an engine. It begins at once to import what the engine needs.

    It ends with the thread that starts it, so this must be the thread of all the worker's calls.

    Attributes:
        connection: messages, see `rlx.rollout.engine_process`.
        lost: why the process is gone; None while it lives.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.lost: EngineError | None = None
        self.connection, theirs = Pipe()
        self._crash, self._shared = os.memfd_create("rlx-crash"), os.memfd_create("rlx-weights")
        os.ftruncate(self._shared, wire.BUCKET_BYTES)
        inherited = theirs.fileno(), self._crash, self._shared
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_GROUP)}
        with theirs:
            self._process = child.start("rlx.rollout.engine_process", inherited, [name], environment)
        self._bucket = torch.empty(0)
        self._heard = time.monotonic()

    def __str__(self) -> str:
        return f"{self._name} (process {self._process.pid})"

    def open_bucket(self, handle: str | None, device: torch.device) -> None:
        """Open the memory through which weights go: the engine's by its handle, or shared memory."""
        self._bucket = wire.mapped_bucket(handle, device) if handle else wire.shared_bucket(self._shared)

    def fill(self, piece: Sequence[tuple[wire.Part, Tensor]]) -> None:
        """Write a piece of the weights to the engine's bucket."""
        for part, source in piece:
            self._bucket[part.offset : part.offset + part.size].copy_(source)
        wire.synchronize(self._bucket)

    def tell(self, method: str, *arguments: Any) -> bool:
        """Send a message; return False if the process is lost."""
        self._heard = time.monotonic()
        try:
            if self.lost is None:
                self.connection.send((method, arguments))
        except OSError:
            self._lose()
        return self.lost is None

    def hear(self) -> wire.Answer | None:
        """Return the next message, which is there; None for a sign of life, or if the process turns out to be lost."""
        try:
            message = self.connection.recv_bytes()
        except (EOFError, OSError):
            self._lose()
            return None
        beat()
        self._heard = time.monotonic()
        return wire.unpacked(message) if message else None

    def require_signs(self, silence_s: float) -> None:
        """Kill a process that owes an answer and was silent for so long, after it has written its stack."""
        if time.monotonic() - self._heard > silence_s:
            self._process.send_signal(signal.SIGUSR1)
            self._lose(f"sent nothing for {silence_s:.0f} s and was killed")

    def close(self) -> None:
        """Close the connection, upon which the process ends."""
        if self._bucket.is_cuda:
            with contextlib.suppress(RuntimeError):  # the process may have ended already
                wire.unmap(self._bucket)
        del self._bucket
        self.connection.close()
        child.end(self._process, END_S)
        os.close(self._shared)
        os.close(self._crash)

    def _lose(self, how: str | None = None) -> None:
        code = child.end(self._process, END_S)
        how = how or f"ended ({child.in_words(code)})"
        stack = os.pread(self._crash, 1 << 16, 0).decode(errors="replace").strip()
        self.lost = EngineError(f"{self} {how}. " + (f"Its stack:\n{stack}" if stack else "It left no stack"))


def start_engines(rollout: RolloutConfig) -> list[EngineProcess]:
    """Start the processes for several engines; none if one is enough, which needs no process. The driver has decided `auto`."""
    number = 1 if rollout.engines_per_gpu == "auto" else int(rollout.engines_per_gpu)
    return [EngineProcess(f"engine {1 + index} of {number}") for index in range(number)] if number > 1 else []


def assign(groups: Sequence[tuple[int, int | None]], loads: Sequence[int]) -> list[int]:
    """Return the engine of each group, which is its expected tokens and the engine that it must go to, if any."""
    loads, chosen = list(loads), [0] * len(groups)
    for index in sorted(range(len(groups)), key=lambda index: -groups[index][0]):
        tokens, known = groups[index]
        chosen[index] = loads.index(min(loads)) if known is None else known
        loads[chosen[index]] += tokens
    return chosen


def _conversation(request: Request) -> int | None:
    """Return `PrefixMemory.era`, the number of a request's conversation; modulo the engines it is its engine's."""
    era = request.memory and request.memory.era
    return era if isinstance(era, int) else None


class EngineRollout(Rollout):
    """A `Rollout` on several vLLM engines of one device, each in a process; arguments are those of `build_rollout`.

    Requests with the same prompt go to one engine, which has it in its prefix cache, and so do the turns of a conversation.

    An engine that is lost while nothing is in flight is reported at the next request: the other processes of the run are in the
    collectives that gather weights, which all have to finish. An update of weights that fails ends all engines.

    Args:
        engines: the processes, see `start_engines`.
        silence_s: an engine that owes an answer and sends nothing for so long counts as hung, once it has started.

    Raises ValueError: an engine rejects the model or the options; EngineError: an engine ended at its start.
    """

    def __init__(
        self,
        engines: Sequence[EngineProcess],
        rollout: RolloutConfig,
        model: ModelConfig,
        device: torch.device,
        context_length: int,
        seed: int,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        silence_s: float = math.inf,
    ):
        super().__init__(rollout.max_num_seqs)
        self._engines, self._device, self._silence_s = list(engines), device, math.inf
        self._keeps_weights = device.type == "cpu" or model.sends_adapters  # while it sleeps
        self._pending: dict[int, Request] = {}  # not yet with an engine
        # The load of an engine: the expected tokens of its requests, or with `assign_late` their number
        self._loads = [0] * len(engines)
        self._shares: dict[int, tuple[int, int]] = {}  # engine of each of these requests, and its part of the load
        self._keys = count()  # of conversations
        self._has_texts = tokenizer is not None and bool(rollout.stop or rollout.val_kwargs.bad_words)
        self._temperature = rollout.temperature
        self._is_late, self._places = rollout.assign_late, -(-rollout.max_num_seqs // len(engines))
        named = None if tokenizer is None else SimpleNamespace(name_or_path=tokenizer.name_or_path)
        try:
            own = share_of(rollout, model, device, len(engines))
            built = self._ask("build", device, (own, model, context_length, seed, named))
            self._require_engines()
            for engine, answer in built.items():
                self._longest, handle = answer.value
                engine.open_bucket(handle, device)
        except BaseException:
            self.close()
            raise
        self._silence_s = silence_s

    def _fault(self, request: Request) -> str | None:
        return request_fault(request, self._longest, self._has_texts, self._temperature)

    def _enter(self, number: int, request: Request) -> None:
        self._require_engines()
        self._pending[number] = request

    def _require_engines(self) -> None:
        for engine in self._engines:
            if engine.lost is not None:
                raise engine.lost

    def _advance(self, requests: Mapping[int, Request]) -> list[tuple[int, Completion]]:
        found = list[tuple[int, Completion]]()
        try:
            self._hand_out()
            until = time.monotonic() + LOOK_S
            while not found and (left := until - time.monotonic()) > 0:
                busy = [engine for engine, load in zip(self._engines, self._loads, strict=True) if load]
                for engine, answer in self._receive(busy, left):
                    if answer.error is not None:
                        raise EngineError(str(_error(engine, answer.error)))
                    found += answer.stopped or []
                self._require_engines()
        except EngineError:
            self._leave(list(requests))  # all are lost, also those of the other engines
            raise
        return [(number, each) for number, each in found if self._forget(number)]

    def engine_loads(self) -> list[EngineLoad]:
        """See Rollout. Requests that no engine has count as waiting for all alike."""
        held = Counter(engine for engine, _ in self._shares.values())
        each, rest = divmod(len(self._pending), len(self._loads))
        loads = (EngineLoad.of(held[engine], self._places) for engine in range(len(self._loads)))
        return [load._replace(waiting=load.waiting + each + (engine < rest)) for engine, load in enumerate(loads)]

    def _leave(self, numbers: Sequence[int]) -> None:
        ended = [number for number in numbers if self._pending.pop(number, None) is None and self._forget(number)]
        if ended:
            self._tell(self._engines, "abort", ended)

    def _forget(self, number: int) -> bool:
        """Return whether an engine has a request, and forget it; not if it was aborted before its completion arrived."""
        if number not in self._shares:
            return False
        engine, tokens = self._shares.pop(number)
        self._loads[engine] -= tokens
        return True

    def _hand_out(self) -> None:
        """Send the requests that wait to engines, group by group."""
        if not self._pending or (self._is_late and min(self._loads) >= self._places):
            return
        if not self._shares:  # engines may sleep
            self._free_cache()
        groups: dict[Any, list[tuple[int, Request]]] = {}
        room = QUEUE_SHARE * self.max_num_seqs - sum(self._loads) if self._is_late else math.inf
        for number, request in list(self._pending.items()):
            key = request.prompt if (known := _conversation(request)) is None else known
            if room > 0 or key in groups or known is not None:  # turns of conversations do not wait
                groups.setdefault(key, []).append((number, self._pending.pop(number)))
                room -= 1
        # The prompt of a group is read once.
        tokens = [
            [r.room + len(r.prompt_ids) // len(group) if not self._is_late else 1 for _, r in group]
            for group in groups.values()
        ]
        fixed = [key % len(self._engines) if isinstance(key, int) else None for key in groups]
        chosen = assign(list(zip(map(sum, tokens), fixed, strict=True)), self._loads)
        sent: list[list[tuple[int, Request, int | None]]] = [[] for _ in self._engines]
        for engine, group, expected in zip(chosen, groups.values(), tokens, strict=True):
            for (number, request), each in zip(group, expected, strict=True):
                if request.memory is not None and _conversation(request) is None:
                    request.memory.era = next(self._keys) * len(self._engines) + engine
                sent[engine].append((number, replace(request, memory=None), _conversation(request)))
                self._shares[number] = engine, each
                self._loads[engine] += each
        for process, own in zip(self._engines, sent, strict=True):
            if own:
                process.tell("add", own)

    def take_load(self) -> dict[str, float]:
        """See Rollout; `engines` is their number."""
        return (load := super().take_load()) and {**load, "engines": float(len(self._engines))}

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See Rollout. Each piece goes to all engines before the next is gathered."""
        self._require_idle("update_weights")
        self.version = None
        self._free_cache()
        try:
            taking = self._tell(self._engines, "update", version)
            for piece in wire.pieces(weights):
                for engine in taking:
                    engine.fill(piece)
                taking = list(self._answers(self._tell(taking, "piece", [part for part, _ in piece])))
            self._answers(self._tell(taking, "end"))
        except BaseException:
            self.close()
            raise
        self.version = version

    def probe(self) -> Tensor:
        """See Rollout. Raises EngineError if engines have different weights."""
        found = [answer.tensor for answer in self._ask("probe").values() if answer.tensor is not None]
        if any(not torch.equal(found[0], each) for each in found[1:]):
            raise EngineError("the engines of one GPU have different weights after a sync; set engines_per_gpu=1")
        return found[0] if found else torch.empty(0)

    def sleep(self) -> None:
        """See Rollout. The version depends on no engine's answer, because one may be lost, and all processes must agree on it."""
        self._require_idle("sleep")
        self._ask("sleep")
        self.version = self.version if self._keeps_weights else None

    def wake(self) -> None:
        self._free_cache()
        self._ask("wake")

    def close(self) -> None:
        """End the engines."""
        self.version = None
        self._requests.clear()
        self._pending.clear()
        self._shares.clear()
        engines, self._engines, self._loads = self._engines, [], [0] * len(self._loads)
        for engine in engines:
            engine.close()

    def _free_cache(self) -> None:
        """Give engines the memory that torch's allocator keeps in this process; they cannot see it."""
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    def _ask(self, method: str, *arguments: Any) -> dict[EngineProcess, wire.Answer]:
        return self._answers(self._tell(self._engines, method, *arguments))

    def _tell(self, engines: Iterable[EngineProcess], method: str, *arguments: Any) -> list[EngineProcess]:
        """Send a message to engines and return those that are there to answer."""
        return [engine for engine in engines if engine.tell(method, *arguments)]

    def _answers(self, engines: Sequence[EngineProcess]) -> dict[EngineProcess, wire.Answer]:
        """Return the answers of engines, but of those that are lost before they answer.

        Raises ValueError, EngineError: an engine answered with an error; the others have answered too.
        """
        answers: dict[EngineProcess, wire.Answer] = {}
        while waiting := [engine for engine in engines if engine not in answers and engine.lost is None]:
            # Completions may still come for requests that were aborted
            answers |= {engine: answer for engine, answer in self._receive(waiting, 1.0) if answer.stopped is None}
        for engine, answer in answers.items():
            if answer.error is not None:
                raise _error(engine, answer.error)
        return answers

    def _receive(
        self, engines: Sequence[EngineProcess], timeout_s: float
    ) -> Iterator[tuple[EngineProcess, wire.Answer]]:
        """Yield what these engines have sent, or send within this time."""
        ready = wait([engine.connection for engine in engines], timeout_s)
        for engine in engines:
            if engine.connection not in ready:
                engine.require_signs(self._silence_s)
            elif (answer := engine.hear()) is not None:
                yield engine, answer


def _error(engine: EngineProcess, error: tuple[str, str, str]) -> Exception:
    """Return the error that an engine reports: a ValueError as it is, others with their traceback."""
    name, text, trace = error
    return ValueError(text) if name == "ValueError" else EngineError(f"{engine}: {name}: {text}\n{trace}")


def share_of(rollout: RolloutConfig, model: ModelConfig, device: torch.device, engines: int) -> RolloutConfig:
    """Return the configuration of one of several engines on a device. Raises ValueError if less memory is free than configured."""
    places, options, share = -(-rollout.max_num_seqs // engines), dict[str, Any](), rollout.gpu_memory_utilization
    if device.type != "cpu":
        memory = DeviceMemory.of(device)
        memory.require(share)
        weights = load_skeleton(model, "lm", torch.bfloat16).parameters()
        weight_bytes = sum(each.numel() for each in weights) * (4 if rollout.dtype == "fp32" else 2)
        # They start side by side, so none can measure how much is free.
        options["kv_cache_memory_bytes"] = int(share * memory.total / engines) - weight_bytes - ENGINE_BYTES
        share = CHECKED_SHARE
    kwargs = replace(rollout.engine_kwargs, vllm={**options, **rollout.engine_kwargs.vllm})
    changes: dict[str, Any] = {"max_num_seqs": places, "gpu_memory_utilization": share, "engine_kwargs": kwargs}
    return replace(rollout, engines_per_gpu=1, **changes)
