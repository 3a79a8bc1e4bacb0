"""What surrounds vLLM's engine: its log, shared memory, outputs, block hashes, and functions on its weights; imports no vLLM."""

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.rollout.change_check import sample_of
from rlx.rollout.protocol import Completion, EngineError, PrefixMemory, Request

# Parts of warnings, by the logger that writes them.
_NO_NEWS = {
    "v1.worker.cpu_worker": ("set_num_threads", "LD_PRELOAD"),
    "renderers.base": ("Chat template warmup failed", "because tokenizer is not initialized"),  # tokens go in and out
    "utils.jit_monitor": ("during inference",),  # kernels of the trainer and of rare sampling compile when used
    "v1.worker.gpu_model_runner": ("weights were not loaded",),  # `reload` raises if some did not arrive
    "model_executor.model_loader.reload.layerwise": ("RotaryEmbedding: Failed to load",),  # it has no weights
}


def hush() -> None:
    """Drop these warnings in this process."""
    for name, texts in _NO_NEWS.items():
        logging.getLogger(f"vllm.{name}").addFilter(_without(texts))


def _without(texts: Sequence[str]) -> Callable[[logging.LogRecord], bool]:
    return lambda record: not any(text in record.getMessage() for text in texts)


@contextlib.contextmanager
def shared_memory() -> Iterator[None]:
    """Start an engine whose processes exchange tensors through named shared memory; all of them enter.

    Every run on a machine uses the same names, and they remain when a process is killed. So one run of a user starts at a time.
    It unlinks the names before the start, and again as soon as all its processes have opened the memory.
    """
    with open(Path(tempfile.gettempdir()) / f"rlx-vllm-start-{os.getuid()}", "w") as lock:
        if int(os.environ["LOCAL_RANK"]) == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _unlink()
        dist.barrier()
        yield
        dist.barrier()
        _unlink()


def _unlink() -> None:
    for segment in Path("/dev/shm").glob("-tp:*-cpushm_*"):
        segment.unlink(missing_ok=True)


def remove_names(queue: Any) -> None:
    """Remove the files of a queue that all processes of a group have opened: the workers end by SIGKILL, which would leave them.

    Its writer has 25 MB in /dev/shm and two sockets. What the processes have opened stays until they end.
    """
    if queue is None or not queue._is_writer or queue.buffer is None:
        return
    queue.buffer.shared_memory.unlink()
    queue.buffer.is_creator = False  # else it would unlink the name again when it is closed
    for name in ("local_subscribe_addr", "local_notify_addr"):
        address = getattr(queue.handle, name, None)  # not every version has both
        if address is not None:
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def completion_of(request: Request, output: Any) -> Completion:
    """Return the completion of a request from vLLM's output. Raises EngineError if it did not come to its end, or lacks experts."""
    log_probs = list(output.logprobs.logprobs) if output.logprobs is not None else None
    reason = output.finish_reason
    if reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a request with {reason!r}, expected stop or length")
    experts = experts_of(request, output) if request.sampling.with_experts else None
    stop = output.stop_reason if isinstance(output.stop_reason, str) else None
    return Completion(list(output.token_ids), log_probs, reason, experts, stop)


def experts_of(request: Request, output: Any) -> Tensor:
    """Return the experts of a request's tokens, as in `Completion`. Raises EngineError if vLLM lacks some."""
    found, tokens = output.routed_experts, len(request.prompt_ids) + len(output.token_ids) - 1
    if found is None or len(found) != tokens:
        got = "none" if found is None else f"those of {len(found)} tokens"
        raise EngineError(f"vLLM returned experts: got {got}, expected those of {tokens} tokens")
    if not found.any() and found.shape[-1] > 1:  # no token has one expert twice
        raise EngineError(
            "vLLM recorded no experts, because its kernel does not report them; set another by "
            "engine_kwargs.vllm, or actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
        )
    # It counts in uint8, or uint16, which torch hardly computes with.
    return torch.from_numpy(found if found.dtype == "uint8" else found.astype("int16"))


class ContinuedHashes:
    """vLLM's hasher of new requests: takes over what a `PrefixMemory` knows, and lets vLLM's own hasher do the rest.

    vLLM finds a prompt in its prefix cache by the hashes of its blocks, which it computes in Python for each request. The prompt of
    a turn begins with prompt and completion of the turn before, whose blocks vLLM has hashed already.

    A hash depends on the tokens up to its block's end, and on the name of the adapters. So hashes are taken over if the prompt
    begins with all tokens that they belong to, and if `forget` was not called since.

    Args:
        plain: vLLM's own: it returns the hashes of a request's blocks that `request.block_hashes` lacks.
    """

    def __init__(self, plain: Any) -> None:
        self._plain, self._era = plain, object()
        self._memory: PrefixMemory | None = None

    @classmethod
    def of(cls, core: Any) -> "ContinuedHashes":
        """Let vLLM's engine core hash new requests by one, and return it. Nobody calls it if the core hashes none, or elsewhere."""
        plain = getattr(core, "request_block_hasher", None)
        hashes = cls(plain)
        if plain is not None:
            core.request_block_hasher = hashes
        return hashes

    def expect(self, memory: PrefixMemory | None) -> None:
        """Use this memory for the request that comes next, and keep its tokens and hashes there."""
        self._memory = memory

    def forget(self) -> None:
        """Use no hashes of the requests before: adapters change."""
        self._era = object()

    def __call__(self, request: Any) -> list[Any]:
        """Return the hashes of a new request's blocks that its `block_hashes` lacks; known ones are put there."""
        request._block_hasher = self._plain  # vLLM calls it for each token that it decodes
        memory, self._memory = self._memory, None
        if memory is not None:
            tokens, hashes = request.all_token_ids, request.block_hashes
            known = memory.tokens
            if memory.era is self._era and tokens[: len(known)] == known[:]:
                hashes.extend(memory.block_hashes)
            # vLLM appends what it decodes to both of these.
            memory.tokens, memory.block_hashes, memory.era = tokens, hashes, self._era
        return self._plain(request)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value that is a tensor or a collection."""
    members = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [member for member in members if isinstance(member, Tensor)]


def _slots(model: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model that hold adapters: A and B of each part of a fused layer."""
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            yield from tensors_of(vars(module).get(name, ()))


def count_adapters(worker: Any) -> int:
    """Return the number of layers with an adapter; in an adapter A is never 0."""
    modules = worker.get_model().modules()
    slots = [slot.any() for module in modules for slot in tensors_of(vars(module).get("lora_a_stacked", ()))]
    return int(torch.stack(slots).sum()) if slots else 0


def probe(worker: Any) -> Tensor:
    """Return a sample of the adapters if the model takes them, else of the weights; empty if vLLM has hidden some of these.

    On CPU it packs the weights of linear layers into memory of its own and leaves empty parameters.
    """
    model = worker.get_model()
    weights = list(_slots(model)) or list(model.parameters())
    return sample_of(weights if all(weight.numel() for weight in weights) else [])


def rounded_parameters(worker: Any) -> list[str]:
    """Return the parameters that the model keeps in fewer bits than it computes in, such as Apertus' scalars in bf16."""
    config = worker.vllm_config.model_config
    if config.quantization is not None:
        return []
    bits = torch.finfo(config.dtype).bits
    each = worker.get_model().named_parameters()
    return [name for name, p in each if p.is_floating_point() and torch.finfo(p.dtype).bits < bits]


def divide_logits(worker: Any, temperature: float) -> None:
    """Let the model return its logits in fp32 and divided by `temperature`.

    vLLM takes raw log-probs from what the model returns, before penalties, min_p, top_k and top_p. So they are log-probs at this
    temperature over the whole vocabulary.
    """
    model = worker.get_model()
    compute = model.compute_logits

    def compute_divided(*args: Any, **kwargs: Any) -> Tensor | None:
        logits = compute(*args, **kwargs)
        return None if logits is None else logits.float().div_(temperature)

    model.compute_logits = compute_divided


def has_head(worker: Any) -> bool:
    """Return whether the model has a head of its own, which may be tied to the embedding."""
    return any(name.rpartition(".")[2] == "lm_head" for name, _ in worker.get_model().named_modules())


def reload(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load a complete set of weights as from a checkpoint. Raises ValueError if the model has others."""
    model = worker.get_model()
    missing = {name for name, _ in model.named_parameters()}
    load = model.load_weights

    def load_and_note(pairs: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        arrived = load(pairs)
        # If a model does not return the names it loaded, assume that it loaded all.
        missing.difference_update(missing if arrived is None else named_among(missing, arrived))
        return arrived

    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=iter(weights))
    finally:
        del model.load_weights
    # Quantisation has parameters of its own, which no checkpoint holds.
    if missing and worker.vllm_config.model_config.quantization is None:
        some = ", ".join(sorted(missing)[:3])
        raise ValueError(f"{len(missing)} weights of vLLM's {type(model).__name__} did not arrive, among them {some}")


def named_among(parameters: Iterable[str], arrived: Iterable[str]) -> set[str]:
    """Return the parameters that a model reports as loaded.

    A module may report a parameter of a submodule as its own: vLLM 0.26 reports `experts.w2_weight` for
    `experts.routed_experts.w2_weight`.
    """
    parameters, arrived = set(parameters), set(arrived)
    named = parameters & arrived
    handed_on = [name.rpartition(".") for name in arrived - parameters]
    for module, _, leaf in handed_on:
        named.update(name for name in parameters if name.startswith(f"{module}.") and name.endswith(f".{leaf}"))
    return named


class Stream:
    """Weights on their way to vLLM; `has_failed` tells whether an error came from their source."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._weights = weights
        self.has_failed = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from self._weights
        except Exception:
            self.has_failed = True
            raise
