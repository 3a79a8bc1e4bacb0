"""Sample with vLLM in the process that trains and on the same device."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.config.vllm_range import LORA_RANKS
from rlx.errors import storing
from rlx.models.adapter_folder import AdapterKind, peft_name, write_config
from rlx.models.loading import load_config, load_skeleton
from rlx.rollout.flight import RequestsInFlight
from rlx.rollout.protocol import Completion, EngineError, Request, Sampling
from rlx.rollout.vllm_api import VLLMEngine, unknown_options
from rlx.rollout.vllm_models import (
    carries_states,
    fault_of,
    runs_on_transformers,
    with_needs,
    with_own_class,
    zeros_of,
)
from rlx.scratch import scratch_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
# On CPU vLLM would take a share of the whole machine's memory in each process.
CPU_KV_CACHE_BYTES = 1 << 30
_MERGE = "actor_rollout_ref.model.lora.merge=True to send merged weights, or actor_rollout_ref.rollout.name=hf"
VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class DeviceMemory(NamedTuple):
    """Bytes of a device: in total, free, and reserved by torch in this process."""

    total: int
    free: int
    held: int


def engine_options(
    rollout: RolloutConfig, model: ModelConfig, device: torch.device, context_length: int, seed: int
) -> dict[str, Any]:
    """Return vLLM's engine arguments for a configuration; those in `engine_kwargs.vllm` take precedence.

    Args:
        rollout, model: the configuration.
        device: where it decodes.
        context_length: longest prompt and response together [tokens].
        seed: of the engine; requests bring their own.
    """
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
    return {**own, **rollout.engine_kwargs.vllm}


class VLLMRollout(RequestsInFlight):
    """A `Rollout` on a vLLM engine in this process.

    Weights only come through `update_weights`. `sleep` frees the device memory of weights and cache, and both are lost; on CPU
    vLLM keeps the memory. With `ModelConfig.sends_adapters` vLLM reads the base from the model's folder, `update_weights`
    brings the adapters, and weights that sleep wait in host memory.

    Args:
        rollout, model: the configuration.
        device: where it decodes.
        context_length: longest prompt and response together [tokens].
        seed: of the engine.
        tokenizer: for stop strings and bad words; vLLM loads it from its folder, and only if the configuration has some.

    Attributes:
        engine: vLLM's engine, public for benchmarks.
        has_seeds: whether each request draws from a seed of its own.

    Raises:
        ValueError: vLLM does not know or refuses an option, lacks the architecture, or finds too little free memory.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        model: ModelConfig,
        device: torch.device,
        context_length: int,
        seed: int,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ):
        unknown = unknown_options(rollout.engine_kwargs.vllm)
        if unknown:
            raise ValueError(f"actor_rollout_ref.rollout.engine_kwargs.vllm: {'; '.join(unknown)}")
        config = load_config(model)
        architectures = config.architectures or ()
        if fault := fault_of(config, device):
            raise ValueError(f"{model.path}: {fault}")
        options = with_needs(engine_options(rollout, model, device, context_length, seed), config, device)
        self._has_texts = tokenizer is not None and bool(rollout.stop or rollout.val_kwargs.bad_words)
        if tokenizer is not None and self._has_texts:
            options |= {"skip_tokenizer_init": False, "tokenizer": tokenizer.name_or_path}
        super().__init__(options["max_num_seqs"])
        self._aliases: dict[str, list[str]] = {}
        parameters: dict[str, Tensor] = {}
        self._adapters = _Adapters(AdapterKind.of(model), model.path) if model.sends_adapters else None
        if device.type == "cpu" and self._adapters is None:
            parameters = load_skeleton(model, "lm", torch.float32).state_dict(keep_vars=True)
            if any(".experts." in name for name in parameters):
                raise ValueError(
                    f"{model.path}: on CPU vLLM keeps the experts of its first weights and ignores later ones; set "
                    "actor_rollout_ref.rollout.name=hf for a mixture of experts"
                )
            # On CPU vLLM packs the head's weight into a copy of its own, which new weights of the embedding do not reach.
            self._aliases = tied_names(parameters)
            if self._aliases:
                options["hf_overrides"] = {**options["hf_overrides"], "tie_word_embeddings": False}
        if carries_states(architectures) and not options["enable_chunked_prefill"]:
            options["enable_prefix_caching"] = False  # vLLM caches states at the ends of chunks
        if runs_on_transformers(architectures):
            options["hf_overrides"] = with_own_class(options["hf_overrides"])
        if device.type != "cpu":
            require_memory(memory_of(device), options["gpu_memory_utilization"])
            if options["enable_sleep_mode"]:
                refuse_expandable_segments()
        self._device = device
        self._temperature = rollout.temperature
        self._version: int | None = None
        self._asleep: set[str] = set()  # parts whose memory is free
        try:
            usual = Sampling(2, rollout.temperature, rollout.top_p, rollout.top_k or -1)
            self.engine = VLLMEngine(options, on_cpu=device.type == "cpu", sampling=usual)
        except ValueError as error:
            if self._adapters is None:
                raise
            raise ValueError(f"{error}. If it cannot take adapters, set {_MERGE}") from error
        free = device.type == "cpu" or self.engine.has_free_seeds
        self.has_seeds = free if rollout.seed_requests is None else rollout.seed_requests
        try:
            self._check_model(parameters)
        except ValueError as error:
            self.engine.close()
            raise ValueError(f"{model.path}: {error}") from error

    def _check_model(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise ValueError if vLLM's model would not use the trainer's weights as they are.

        Args:
            parameters: of the trainer's model, if ties have been undone.
        """
        hf = "set actor_rollout_ref.rollout.name=hf"
        if self._aliases and not self.engine.has_head():
            raise ValueError(
                "on CPU vLLM keeps the first values of a head that is tied to the embedding, and its model of this type has no "
                f"other head (Gemma's, for example); {hf}"
            )
        if rounded := self.engine.rounded_parameters():
            raise ValueError(
                f"vLLM rounds {rounded[0]} and {len(rounded) - 1} other parameters to fewer bits than {self.engine.dtype}, expected "
                f"all weights in it; set actor_rollout_ref.rollout.dtype=bf16, or {hf}"
            )
        if self._aliases:  # some models, such as Bloom's, refuse a head of their own
            self.update_weights(zeros_of(parameters), version=0)
            self._version = None

    @property
    def version(self) -> int | None:
        """Version of the weights in use; None until a complete set has arrived, and again after `sleep`."""
        return self._version

    def _fault(self, request: Request) -> str | None:
        prompt, sampling = len(request.prompt_ids), request.sampling
        longest = self.engine.max_model_len
        if not prompt:
            return "has an empty prompt; expected at least one token"
        if prompt + sampling.max_tokens > longest:
            return (
                f"has a prompt of {prompt} tokens and asks for {sampling.max_tokens} more, but vLLM's max_model_len is {longest}; "
                "raise data.max_prompt_length, or engine_kwargs.vllm.max_model_len if set"
            )
        if sampling.needs_tokenizer and not self._has_texts:
            return (
                "asks for stop strings or bad words, but vLLM was started without rollout.stop and val_kwargs.bad_words"
            )
        if sampling.with_log_probs and sampling.log_prob_temperature != self._temperature:
            return (
                f"asks for log-probs at temperature {sampling.log_prob_temperature:g}, but vLLM was started for those at "
                f"rollout.temperature={self._temperature:g}"
            )
        return None

    def _enter(self, number: int, request: Request) -> None:
        self._wake("weights", "kv_cache")
        if not self.running:
            self.engine.seed(request.seed)
        self.engine.add(number, request, self.has_seeds)

    def _advance(self, requests: Mapping[int, Request]) -> list[tuple[int, Completion]]:
        return self.engine.step(requests)

    def _leave(self, numbers: Sequence[int]) -> None:
        self.engine.abort(numbers)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load a complete set of weights, layer by layer, or the adapters; only the weights are woken.

        Raises:
            ValueError: vLLM's model lacks a weight, has it in another shape, or has no place for an adapter; or requests are
                in flight.
        """
        self._refuse_in_flight("update_weights")
        self._version = None
        self._wake("weights")
        if self._adapters is not None:
            self._adapters.load(self.engine, weights)
            self._version = version
            return
        self.engine.load((name, tensor) for first, tensor in weights for name in self._aliases.get(first, [first]))
        self._version = version

    def probe(self) -> Tensor:
        """See Rollout."""
        return self.engine.probe()

    def sleep(self) -> None:
        """Free the device memory of weights and cache. Their contents are lost, except weights that take adapters. Raises ValueError."""
        self._refuse_in_flight("sleep")
        if self._device.type == "cpu" or self._asleep:
            return
        if self._adapters is None:
            self._version = None
        self.engine.sleep(keeps_weights=self._adapters is not None)
        self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """See Rollout."""
        self._wake("weights")

    def close(self) -> None:
        """End the engine."""
        self._version = None
        self._requests.clear()
        try:
            self._wake("weights", "kv_cache")  # memory that sleeps cannot be freed and would count as used
        except EngineError as error:
            logger.warning("%s. The engine ends, and no other can be made in this process", error)
        self._asleep.clear()
        self.engine.close()

    def _wake(self, *parts: str) -> None:
        for part in parts:
            if part in self._asleep:
                try:
                    # vLLM's allocator cannot use memory that torch's keeps.
                    torch.accelerator.empty_cache()
                    self.engine.wake(part)
                except RuntimeError as error:
                    raise EngineError(
                        f"vLLM could not take its {part} back ({error}); {describe(memory_of(self._device))}. Lower "
                        "actor_rollout_ref.rollout.gpu_memory_utilization, or set fsdp_config.param_offload and "
                        "optimizer_offload"
                    ) from error
                self._asleep.discard(part)


class _Adapters:
    """Hands adapters to vLLM, each version under a name of its own: vLLM's prefix cache tells adapters apart by their names.

    vLLM wants peft's configuration as a file, in a folder that stays as long as this object.
    """

    def __init__(self, kind: AdapterKind, base: str | None) -> None:
        self._kind, self._base = kind, base
        self._count = 0
        self._folder = scratch_folder("adapters")

    def load(self, engine: VLLMEngine, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send adapters, by the names of `rlx.models.lora.add_lora`; raise ValueError if vLLM does not use all of them."""
        # Copies, because vLLM multiplies with the scale in place.
        tensors = {name: tensor.to(engine.dtype, copy=True) for name, tensor in weights}
        with storing(self._folder.name):
            write_config(Path(self._folder.name), tensors, self._kind, self._base)
        self._count += 1
        named = {peft_name(name): tensor for name, tensor in tensors.items()}
        wanted = sum(".lora_A." in name for name in tensors)
        found = engine.load_adapters(named, self._folder.name, self._count)
        if found != wanted:
            raise ValueError(f"vLLM uses {found} of {wanted} adapters, expected all of them; set {_MERGE}")


def tied_names(parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return for each name of a tied weight all of that weight's names."""
    names: dict[int, list[str]] = {}
    for name, tensor in parameters.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def memory_of(device: torch.device) -> DeviceMemory:
    """Return a device's memory as it is now."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.accelerator.memory_reserved(device))


def describe(memory: DeviceMemory) -> str:
    """Return who holds a device's memory, in words."""
    others = memory.total - memory.free - memory.held
    return (
        f"of {memory.total / 1e9:.1f} GB {memory.free / 1e9:.1f} are free, models and optimizers of this process hold "
        f"{memory.held / 1e9:.1f}, and other processes and CUDA itself {others / 1e9:.1f}"
    )


def require_memory(memory: DeviceMemory, utilization: float) -> None:
    """Raise ValueError if vLLM's share is not free: vLLM takes a share of all memory, however much is free."""
    wanted = utilization * memory.total
    if memory.free < wanted:
        raise ValueError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization={utilization} asks for {wanted / 1e9:.1f} GB of device memory, "
            f"but {describe(memory)}. Set it to at most {int(100 * memory.free / memory.total) / 100:.2f}, or set "
            "fsdp_config.param_offload and optimizer_offload of actor, critic and ref"
        )


def refuse_expandable_segments() -> None:
    """Raise ValueError if torch's allocator is in a mode in which vLLM cannot sleep."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise ValueError(
                f"{name}: got expandable_segments, with which vLLM's sleep mode does not work; unset it, or set "
                "actor_rollout_ref.rollout.free_cache_engine=False"
            )
