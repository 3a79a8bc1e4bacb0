"""What rlx's vLLM sampler needs besides vLLM itself, which this file does not import.

Its options, its faults by type of model, the device's memory, the state of the process, outputs, and functions on vLLM's worker.
"""

import contextlib
import fcntl
import logging
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.config.vllm_range import LORA_RANKS, supported_vllm
from rlx.rollout.protocol import Completion, EngineError, PrefixMemory, Request, evenly_spaced, on_cpu

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# On CPU vLLM would take a share of the whole machine's memory in each process.
CPU_KV_CACHE_BYTES = 1 << 30
GRAPH_PROMPT_TOKENS = 512  # that a step reads beside decoding
VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Types whose norm behind the state space is over all channels in transformers but over each group of them in vLLM, and the key of
# the number of groups.
_NORM_OVER_ALL_GROUPS = {"bamba": "mamba_n_groups", "granitemoehybrid": "mamba_n_groups", "mamba2": "n_groups"}
# What vLLM has no kernel for on CPU, by type.
_GPU_KERNELS = dict.fromkeys(("falcon_mamba", "jamba", "mamba"), "selective scan") | {"olmo_hybrid": "gated delta rule"}
# Types whose checkpoints join weights that transformers' model has apart; vLLM reads those of checkpoints.
_JOINED_WEIGHTS = ("hrm_text",)
USE_HF = "set actor_rollout_ref.rollout.name=hf"
# Parts of warnings, by the logger that writes them.
_NO_NEWS = {
    "v1.worker.cpu_worker": ("set_num_threads", "LD_PRELOAD"),
    "renderers.base": ("Chat template warmup failed", "because tokenizer is not initialized"),  # tokens go in and out
    "utils.jit_monitor": ("during inference",),  # kernels of the trainer and of rare sampling compile when used
    "v1.worker.gpu_model_runner": ("weights were not loaded",),  # `reload` raises if some did not arrive
    "model_executor.model_loader.reload.layerwise": ("RotaryEmbedding: Failed to load",),  # it has no weights
}


def engine_options(
    rollout: RolloutConfig, model: ModelConfig, device: torch.device, context_length: int, seed: int
) -> dict[str, Any]:
    """Return vLLM's engine arguments for a configuration; those in `engine_kwargs.vllm` take precedence."""
    on_cpu = device.type == "cpu"
    # vLLM draws a request's random numbers again if its prompt comes in chunks, and cannot rewind a generator on CPU.
    is_chunked = rollout.enable_chunked_prefill and (not on_cpu or rollout.seed_requests is False)
    own: dict[str, Any] = {
        "model": model.path,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "load_format": "dummy",  # weights come from the trainer
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "model_impl": "vllm",  # the alternative patches transformers' model class, which the trainer uses too
        "dtype": VLLM_DTYPES.get(rollout.dtype, "float32" if on_cpu else "bfloat16"),
        "max_model_len": context_length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, rollout.max_num_seqs),
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        # Each process runs an engine of its own in the trainer's process group.
        "distributed_executor_backend": "external_launcher",
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "enable_chunked_prefill": is_chunked,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        # Before top_k and top_p; the model divides its logits by the temperature, see `divide_logits`.
        "logprobs_mode": "raw_logprobs",
        "enable_return_routed_experts": rollout.enable_rollout_routing_replay,
        "disable_log_stats": True,
        "seed": seed,
    }
    if not is_chunked:
        own["max_num_batched_tokens"] = max(own["max_num_batched_tokens"], context_length)
    if model.sends_adapters:
        rank = min((rank for rank in LORA_RANKS if rank >= model.lora_rank), default=max(LORA_RANKS))
        own |= {"load_format": "auto", "enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
    if on_cpu:
        own["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
    else:
        own["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        own["enable_sleep_mode"] = rollout.free_cache_engine
        # It would look up the devices of other ranks, which a process under Ray does not see. NCCL does not need them.
        own["disable_custom_all_reduce"] = True
        if rollout.exact:
            # Compiled code rounds otherwise. Graphs hold the same kernels as steps that launch them one by one.
            own["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            own |= {"attention_backend": "FLASH_ATTN", "disable_cascade_attn": True}
        graphs = {"compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"}
        if not rollout.enforce_eager and not graphs & rollout.engine_kwargs.vllm.keys():
            own["cudagraph_capture_sizes"] = graph_sizes(rollout.max_num_seqs)
    return {**own, **rollout.engine_kwargs.vllm}


def graph_sizes(places: int) -> list[int]:
    """Return the numbers of tokens for which vLLM captures CUDA graphs, so that a step pads its tokens by an eighth at most.

    vLLM's own end at 512. A step of more tokens than the last launches each kernel from Python, which takes it twice as long; so
    there are some for steps that read prompts beside decoding in all places.
    """
    sizes = {1, 2, 4, places}
    size = 8
    while size <= places + GRAPH_PROMPT_TOKENS:
        sizes.add(size)
        size += max(8, 1 << (size.bit_length() - 4))
    return sorted(sizes)


def with_needs(options: dict[str, Any], config: "PreTrainedConfig", device: torch.device) -> dict[str, Any]:
    """Return engine arguments with those added without which vLLM does not run a model, or runs it wrongly."""
    # As the trainer's head: see Note [logits in fp32] in rlx.models.log_probs. vLLM cannot do that to a head that it may quantise.
    if not (options.get("quantization") or getattr(config, "quantization_config", None)):
        options = {**options, "hf_overrides": {"head_dtype": "float32", **options["hf_overrides"]}}
    if config.model_type != "lfm2":
        return options
    # Keys of transformers' former configuration, which vLLM still reads.
    widths = {name: config.hidden_size for name in ("block_dim", "conv_dim") if not hasattr(config, name)}
    # This model passes a rotation its heads in a dimension of their own, which vLLM's kernel for CPU takes for one head.
    # vLLM refuses it beside a "+rotary_embedding" of the user.
    plain = {}
    if device.type == "cpu":
        given = options.get("compilation_config")
        given = {"mode": given} if isinstance(given, int) else given or {}  # vLLM takes a number as the mode
        operators = list(dict.fromkeys([*given.get("custom_ops", ()), "-rotary_embedding"]))
        plain = {"compilation_config": {**given, "custom_ops": operators}}
    return {**options, **plain, "hf_overrides": {**widths, **options["hf_overrides"]}}


def fault_of(
    config: "PreTrainedConfig", models_of: Callable[[Sequence[str]], list[type]], device: torch.device
) -> str | None:
    """Return an error message if this vLLM cannot sample from a model, or computes it differently from transformers; else None."""
    version, architectures = supported_vllm(), config.architectures or ()
    try:
        found = models_of(architectures)
    except ImportError as error:  # vLLM itself would only say that it failed
        return f"vLLM {version} cannot import its model: {error}; install the missing package, or {USE_HF}"
    if architectures and not found:
        return f"vLLM {version} has no model {' or '.join(architectures)}; {USE_HF}"
    key, limit = _NORM_OVER_ALL_GROUPS.get(config.model_type), getattr(config, "time_step_limit", None)
    if key and (groups := getattr(config, key)) > 1:
        return f"{key}: got {groups} groups, which vLLM normalises separately and transformers together, expected 1; {USE_HF}"
    if limit is not None and tuple(limit) != (0.0, math.inf):
        return f"time_step_limit: got {tuple(limit)}, which vLLM does not apply, expected (0.0, inf); {USE_HF}"
    if config.model_type in _JOINED_WEIGHTS:
        return f"vLLM reads the checkpoints' fused weights, which the trainer's model keeps separate; {USE_HF}"
    if device.type == "cpu" and (kernel := _GPU_KERNELS.get(config.model_type)):
        return f"on CPU vLLM has no kernel for its {kernel}; {USE_HF}"
    return None


def with_own_class(overrides: Mapping[str, Any], config: "PreTrainedConfig") -> "PreTrainedConfig":
    """Do what vLLM does with `hf_overrides`, for a model that it builds from transformers' class.

    vLLM changes the class of such a model so that it only works in vLLM. The trainer has a model of this class in the same
    process, so vLLM gets a subclass.
    """
    from transformers import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        return config  # vLLM calls the function with an empty config first
    for name, value in overrides.items():
        part = getattr(config, name, None)
        if isinstance(value, Mapping) and hasattr(part, "to_dict"):
            part.update(value)
        else:
            setattr(config, name, value)
    config.__class__ = _own_config(type(config))
    return config


@cache
def _own_config(kind: type["PreTrainedConfig"]) -> type["PreTrainedConfig"]:
    """Return a subclass of a config's class for which transformers makes a model of a class of its own."""
    from transformers import MODEL_MAPPING, AutoModel

    model = MODEL_MAPPING[kind]
    # Of the same name, or from a module of transformers, it would count as the original.
    own = type(f"VLLM{kind.__name__}", (kind,), {"__module__": __name__})
    AutoModel.register(own, type(model.__name__, (model,), {"__module__": model.__module__, "config_class": own}))
    return own


def tied_names(parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return for each name of a tied weight all of that weight's names."""
    names: dict[int, list[str]] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


class DeviceMemory(NamedTuple):
    """Bytes of a device: in total, free, and reserved by torch in this process."""

    total: int
    free: int
    held: int

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """Return a device's current memory."""
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.accelerator.memory_reserved(device))

    def __str__(self) -> str:
        others = self.total - self.free - self.held
        return (
            f"{self.free / 1e9:.1f} of {self.total / 1e9:.1f} GB are free, models and optimizers of this process hold "
            f"{self.held / 1e9:.1f}, and other processes and CUDA itself {others / 1e9:.1f}"
        )

    def require(self, utilization: float) -> None:
        """Raise ValueError if vLLM's share is not free: vLLM takes a share of all memory, however much is free."""
        wanted = utilization * self.total
        if self.free < wanted:
            raise ValueError(
                f"actor_rollout_ref.rollout.gpu_memory_utilization={utilization} asks for {wanted / 1e9:.1f} GB of device memory, "
                f"but {self}. Set it to at most {int(100 * self.free / self.total) / 100:.2f}, or set "
                "fsdp_config.param_offload and optimizer_offload of actor, critic and ref"
            )


@contextlib.contextmanager
def restored_process_state() -> Iterator[None]:
    """Restore the process state afterwards, because vLLM seeds every generator and changes settings of torch.

    Restored are the states of random generators, the environment except vLLM's own variables, `torch.set_num_threads` and the
    number of threads, the choice of attention kernels and the precision of matrix products.
    """
    environment, python_state = dict(os.environ), random.getstate()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    attention, precision = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    with own_random_state():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(threads)
            torch.backends.cuda.enable_cudnn_sdp(attention)
            torch.set_float32_matmul_precision(precision)
            random.setstate(python_state)
            for name in [each for each in os.environ if each not in environment and not each.startswith("VLLM_")]:
                del os.environ[name]
            os.environ |= {name: value for name, value in environment.items() if not name.startswith("VLLM_")}


@contextlib.contextmanager
def own_random_state(with_numpy: bool = True) -> Iterator[None]:
    """Run with separate states of torch's generators on host and device and of numpy's.

    `with_numpy=False` leaves numpy's generator alone: changing its state and changing it back takes 0.3 ms.
    """
    devices = [torch.accelerator.current_device_index()] if torch.accelerator.is_available() else []
    numpy_state = numpy.random.get_state() if with_numpy else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        if numpy_state is not None:
            numpy.random.set_state(numpy_state)


class OwnRandomState:
    """States of torch's and numpy's generators that continue where they ended, whatever the process draws between uses."""

    def __init__(self, seed: int = 0) -> None:
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin the next use with this seed."""
        self._seed = seed
        self._states: list[Tensor] | None = None  # not drawn from yet
        self._numpy_state: Any = None

    @contextlib.contextmanager
    def in_use(self, with_numpy: bool = True) -> Iterator[None]:
        """Use these states in place of the process's own, which are restored; see `own_random_state`."""
        modules = [torch.random, *([torch.get_device_module()] if torch.accelerator.is_available() else [])]
        with own_random_state(with_numpy):
            if self._states is None:
                torch.manual_seed(self._seed)
            else:
                for module, state in zip(modules, self._states, strict=True):
                    module.set_rng_state(state)
            if with_numpy and self._numpy_state is None:
                numpy.random.seed(self._seed % 2**32)
            elif with_numpy:
                numpy.random.set_state(self._numpy_state)
            try:
                yield
            finally:
                self._states = [module.get_rng_state() for module in modules]
                if with_numpy:
                    self._numpy_state = numpy.random.get_state()


def hush() -> None:
    """Drop known warnings of vLLM."""

    def is_news(record: logging.LogRecord) -> bool:
        texts = _NO_NEWS[record.name.removeprefix("vllm.")]
        return not any(text in record.getMessage() for text in texts)

    for name in _NO_NEWS:
        logging.getLogger(f"vllm.{name}").addFilter(is_news)


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


def request_fault(request: Request, longest: int, has_texts: bool, temperature: float) -> str | None:
    """Return why an engine of this context length, with a tokenizer or without, cannot complete a request; see `Rollout._fault`."""
    prompt, sampling = len(request.prompt_ids), request.sampling
    if not prompt:
        return "has an empty prompt; expected at least one token"
    if prompt + request.room > longest:
        return (
            f"has a prompt of {prompt} tokens and asks for {request.room} more, but vLLM's max_model_len is {longest}; "
            "raise data.max_prompt_length, or engine_kwargs.vllm.max_model_len if set"
        )
    if sampling.needs_tokenizer and not has_texts:
        return "asks for stop strings or bad words, but vLLM was started without rollout.stop and val_kwargs.bad_words"
    if sampling.with_log_probs and sampling.log_prob_temperature != temperature:
        return (
            f"asks for log-probs at temperature {sampling.log_prob_temperature:g}, but vLLM was started for those at "
            f"rollout.temperature={temperature:g}"
        )
    return None


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
    """vLLM's hasher of new requests: takes over the hashes that are known, and lets vLLM's own hasher do the rest.

    vLLM finds a prompt in its prefix cache by the hashes of its blocks, which it computes in Python for each request. Known are those
    of the turn before, with which the prompt of a turn begins, from its `PrefixMemory`; and those of the request before, which
    has the same prompt in a group.

    A hash depends on the tokens up to its block's end, on the salt, and on the name of the adapters. So hashes are taken over if the
    prompt begins with all tokens that they belong to, the salt is the same, and `forget` was not called since.

    Args:
        core: vLLM's engine core, whose hasher this object replaces. If the core hashes none, or elsewhere, nothing calls it.
    """

    def __init__(self, core: Any) -> None:
        self._plain, self._era = getattr(core, "request_block_hasher", None), object()
        self._memory: PrefixMemory | None = None
        self._last = PrefixMemory()  # the prompt of the request before
        if self._plain is not None:
            core.request_block_hasher = self

    def expect(self, memory: PrefixMemory | None) -> None:
        """Use this memory for the request that comes next, and keep its tokens and hashes there."""
        self._memory = memory

    def forget(self) -> None:
        """Use no hashes of the requests before: adapters change."""
        self._era = object()

    def __call__(self, request: Any) -> list[Any]:
        """Return the hashes of a new request's blocks that its `block_hashes` lacks; known ones are put there."""
        request._block_hasher = self._plain  # vLLM calls it for each token that it decodes
        memory, self._memory = self._memory or PrefixMemory(), None
        tokens, hashes, era = request.all_token_ids, request.block_hashes, (self._era, request.cache_salt)
        for known in (memory, self._last):
            if known.era == era and tokens[: len(known.tokens)] == known.tokens[:]:
                hashes.extend(known.block_hashes)
                break
        # vLLM appends what it decodes to both of these.
        memory.tokens, memory.block_hashes, memory.era = tokens, hashes, era
        missing: list[Any] = self._plain(request)
        self._last = PrefixMemory(tokens[:], [*hashes, *missing], era)
        return missing


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value that is a tensor or a collection."""
    members = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [member for member in members if isinstance(member, Tensor)]


def _slots(worker: Any, *names: str) -> list[Tensor]:
    """Return the tensors of the model that hold adapters: A and B of each part of a fused layer, or one of them."""
    parts, modules = names or ("lora_a_stacked", "lora_b_stacked"), worker.get_model().modules()
    return [slot for module in modules for name in parts for slot in tensors_of(vars(module).get(name, ()))]


def count_adapters(worker: Any) -> int:
    """Return the number of layers with an adapter; in an adapter A is never 0."""
    slots = _slots(worker, "lora_a_stacked")
    return int(torch.stack([slot.any() for slot in slots]).sum()) if slots else 0


def probe(worker: Any) -> Tensor:
    """Return a sample of the adapters if the model takes them, else of the weights; empty if vLLM has hidden some of these.

    On CPU it packs the weights of linear layers into memory of its own and leaves empty parameters.
    """
    weights = _slots(worker) or list(worker.get_model().parameters())
    return on_cpu([evenly_spaced(weight) for weight in weights] if all(weight.numel() for weight in weights) else [])


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


def add_logits_processor(worker: Any, processor: Any) -> None:
    """Let the first model runner apply a logits processor to what it samples, after all others."""
    worker.model_runner.input_batch.logitsprocs.argmax_invariant.append(processor)


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
