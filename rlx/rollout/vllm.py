"""Sample with vLLM in the process that trains and on the same device. This file and `vllm_exact.py` alone import vLLM and know its versions.

Importing this module imports vLLM, with the settings that let it run in a process that trains.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import itertools
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from rlx.config.schema import ModelConfig, RolloutConfig
from rlx.config.vllm_range import supported_vllm
from rlx.errors import did_you_mean, storing
from rlx.heartbeat import beat
from rlx.models.exact import rotary_table
from rlx.models.loading import load_config, load_skeleton
from rlx.models.lora import AdapterKind, peft_name, write_config
from rlx.rollout import vllm_support as support
from rlx.rollout.protocol import Completion, EngineError, Request, Rollout, Sampling
from rlx.rollout.vllm_draws import DrawsByPosition, hand_over
from rlx.rollout.vllm_support import USE_HF, DeviceMemory, restored_process_state
from rlx.scratch import scratch_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_version = supported_vllm()
# In this process instead of one of its own, because the weights come from here.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# On CPU vLLM would pin its threads, and these are the threads that train too.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
if "PYTORCH_ALLOC_CONF" in os.environ:
    # vLLM switches expandable segments off round the memory that sleeps, but reads only the name of old.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", os.environ["PYTORCH_ALLOC_CONF"])

with restored_process_state():
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm.distributed import destroy_model_parallel, get_tp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import tokens_input
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

logger = logging.getLogger(__name__)
_MERGE = "actor_rollout_ref.model.lora.merge=True to send merged weights, or actor_rollout_ref.rollout.name=hf"
# On a GPU a step that reads a prompt takes longer, because attention is then in no graph. So the engine gets requests after so many
# steps, or when there are as many as this share of its places.
ADMIT_STEPS, ADMIT_SHARE = 8, 1 / 16
_PROCESS = uuid.uuid4().hex
_ADAPTER_OPTIONS = inspect.signature(LoRAModel.from_lora_tensors).parameters
support.hush()


def unknown_options(names: Iterable[str]) -> list[str]:
    """Return one line for each name that is no option of this version's engine."""
    known = sorted(field.name for field in dataclasses.fields(EngineArgs))
    near = {name: did_you_mean(name, known, "remove it", most=3) for name in names if name not in known}
    return [f"{name} is not an option of vLLM {_version}; {remedy}" for name, remedy in near.items()]


def models_of(architectures: Sequence[str]) -> list[type]:
    """Import and return the models that this version has for these architectures; raises ImportError.

    They are registered as imported. Else vLLM would start a process that imports vLLM again, which takes 8 s on 2 cores: a
    model's module might initialize CUDA, which matters only to engines that fork their workers.
    """
    found = []
    with restored_process_state():  # modules of models set environment variables
        for name in ModelRegistry.get_supported_archs() & set(architectures):
            found.append(ModelRegistry.models[name].load_model_cls())
            ModelRegistry.register_model(name, found[-1])
    return found


class VLLMEngine:
    """One vLLM engine in this process, with random weights until `load` brings real ones.

    All processes of the run build theirs together, because vLLM makes its groups from all of them.

    Args:
        options: vLLM's engine arguments.
        on_cpu: run functions uncompiled, because a compiler may be missing and takes longer than it saves.
        sampling: of most requests. Kernels for it are compiled now, those of others at their first request. Log-probs are those
            at its temperature.

    Raises ValueError: vLLM refuses the options or the model; the message holds its reason.
    """

    def __init__(self, options: Mapping[str, Any], on_cpu: bool, sampling: Sampling) -> None:
        self._stance = "force_eager" if on_cpu else "default"
        self._temperature = sampling.temperature
        self._adapters: LoRARequest | None = None
        self._numbers = itertools.count(1)  # of sets of adapters
        self._random, self._has_unseeded = support.OwnRandomState(), False
        shares_memory = on_cpu and options["tensor_parallel_size"] > 1
        memory = support.shared_memory() if shares_memory else contextlib.nullcontext()
        with restored_process_state(), memory, _warming_up(sampling):
            try:
                self._llm: LLM | None = LLM(**options)
            except Exception as error:
                raise ValueError(
                    f"vLLM {_version} could not start: {_reason(error)}. Its options were {dict(options)}. Change them by engine_kwargs.vllm, "
                    "or set actor_rollout_ref.rollout.name=hf"
                ) from error
            if options["tensor_parallel_size"] > 1:
                support.remove_names(get_tp_group().mq_broadcaster)
            if self._temperature != 1.0:
                self._llm.collective_rpc(support.divide_logits, args=(self._temperature,))
        # Newer versions destroy the default process group, which is the trainer's, together with the engine.
        if (finalizer := getattr(self._client, "_finalizer", None)) is not None:
            finalizer.detach()
        self._hashes = support.ContinuedHashes(getattr(self._client, "engine_core", None))
        if not self.has_free_seeds:
            self._llm.collective_rpc(support.add_logits_processor, args=(DrawsByPosition(process_dict_updates),))

    @property
    def max_model_len(self) -> int:
        """Longest prompt and response together [tokens]."""
        return int(self._engine.model_config.max_model_len)

    @property
    def dtype(self) -> torch.dtype:
        return cast(torch.dtype, self._engine.model_config.dtype)

    @property
    def has_free_seeds(self) -> bool:
        """Return whether one kernel draws for all requests from a hash of seed and position: vLLM's second model runner.

        The first one has a generator for each request with a seed, and calls one after the other for each token.
        """
        return bool(getattr(self._engine.llm_engine.vllm_config, "use_v2_model_runner", False))

    @property
    def _client(self) -> Any:
        return self._engine.llm_engine.engine_core

    @property
    def _engine(self) -> LLM:
        if self._llm is None:
            raise EngineError("vLLM: the engine has been closed")
        return self._llm

    def seed(self, seed: int) -> None:
        """Seed the stream that requests without a seed of their own draw from.

        It must be the same in all processes of a tensor-parallel group: if samples differ, one process finishes while the
        others wait for it.
        """
        self._random.seed(seed)

    def add(self, number: int, request: Request, seeded: bool, version: int | None = None) -> None:
        """Take a request, which draws from its own seed or from the stream of all; raises EngineError if the engine fails.

        With a version vLLM finds only what weights of this version have read, even in a cache that outlives the process.
        """
        by_position = request.sampling.by_position or request.kept > 0
        seeded |= by_position
        self._has_unseeded |= not seeded
        params = _sampling_params(request, seeded, self._temperature)
        if by_position and not self.has_free_seeds:
            hand_over(params, request)
        salt = None if version is None else f"{_PROCESS} {version}"
        # vLLM would render a `TokensPrompt` to it, at a cost
        prompt = tokens_input(list(request.prompt_ids), cache_salt=salt)
        self._hashes.expect(request.memory)
        with _failing():
            self._engine.llm_engine.add_request(str(number), prompt, params, lora_request=self._adapters)

    def step(self, requests: Mapping[int, Request]) -> list[tuple[int, Completion]]:
        """Decode a token of each request that has a place, and return those that stopped; raises EngineError."""
        beat()
        # The second model runner draws seeds for requests that have none from numpy; nothing else in a step uses it.
        own = self._random.in_use(with_numpy=self._has_unseeded)
        with _failing(), own, torch.compiler.set_stance(self._stance):
            answers: list[Any] = self._engine.llm_engine.step()
        stopped = {int(answer.request_id): answer.outputs[0] for answer in answers if answer.finished}
        return [(number, support.completion_of(requests[number], output)) for number, output in stopped.items()]

    def abort(self, numbers: Iterable[int]) -> None:
        """End requests and free their cache."""
        with _failing():
            self._engine.llm_engine.abort_request([str(number) for number in numbers])

    def ask(self, function: Callable[..., T]) -> T:
        """Return what a function of vLLM's worker finds in this process."""
        return cast(T, self._engine.collective_rpc(function)[0])

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a complete set of weights as from a checkpoint, and drop cached prefixes; ValueError: they are of another model."""
        source_faults = list[Exception]()

        def arriving() -> Iterator[tuple[str, Tensor]]:
            try:
                yield from weights
            except Exception as fault:
                source_faults.append(fault)
                raise

        with restored_process_state():
            try:
                self._engine.collective_rpc(support.reload, args=(arriving(),))
            except Exception as error:
                if source_faults or isinstance(error, EngineError | torch.OutOfMemoryError):
                    raise
                raise ValueError(
                    f"vLLM {_version} cannot take this model's weights ({_reason(error)[:300]}); set actor_rollout_ref.rollout.name=hf"
                ) from error
        self._drop_prefixes()

    def _drop_prefixes(self) -> None:
        self._hashes.forget()
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM kept the prefix cache of the old weights because requests are still running")

    def load_adapters(self, tensors: dict[str, Tensor], folder: str) -> int:
        """Load adapters in place of those before, and return how many layers have one now.

        Each set has a name of its own, because vLLM's prefix cache tells adapters apart by their names.

        Args:
            tensors: by peft's names; vLLM overwrites them.
            folder: with peft's configuration of these adapters.

        Raises ValueError: vLLM cannot take these adapters.
        """
        number = next(self._numbers)
        request = LoRARequest(f"version {number}", number, folder)
        with restored_process_state(), _adapters_in_memory(tensors):
            try:
                self._engine.llm_engine.add_lora(request)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise ValueError(
                    f"vLLM {_version} cannot take these adapters ({_reason(error)}); set actor_rollout_ref.model.lora.merge=True"
                ) from error
        self._adapters = request
        self._drop_prefixes()
        return self.ask(support.count_adapters)

    def sleep(self, keeps_weights: bool) -> None:
        """Free the device memory of weights and cache; the weights are moved to host memory, or lost."""
        self._drop_prefixes()
        self._engine.sleep(level=1 if keeps_weights else 2)

    def wake(self, part: str) -> None:
        """Allocate the device memory of `weights` or `kv_cache` again, with the weights that `sleep` kept."""
        self._engine.wake_up(tags=[part])

    def close(self) -> None:
        """End an awake engine and free its memory, without destroying the process group as vLLM's own shutdown does."""
        if self._llm is not None:
            core, self._llm = self._client.engine_core, None
            # vLLM's outer objects hold the model and must go first: when the engine ends, so does the allocator that frees
            # the model's memory.
            _collect()
            _end(core)
            del core
        _collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


@contextlib.contextmanager
def _warming_up(sampling: Sampling) -> Iterator[None]:
    """Let vLLM warm up for this sampling alone.

    Its own warm-up takes penalties, forbidden words, min_p and more besides, which no request here has, and compiles kernels for
    each. All of it took 15 s on an H200 whose caches were empty.
    """
    name = "for_sampler_warmup"  # of the second model runner
    everything = vars(SamplingParams).get(name)
    if everything is None:
        yield
        return
    request = Request((0,), seed=0, sampling=sampling)
    setattr(SamplingParams, name, staticmethod(lambda: _sampling_params(request, True, sampling.temperature)))
    try:
        yield
    finally:
        setattr(SamplingParams, name, everything)


@contextlib.contextmanager
def _adapters_in_memory(tensors: dict[str, Tensor]) -> Iterator[None]:
    """Let vLLM take adapters from here in place of a file, which it would read into page-locked memory, tensor by tensor.

    Afterwards the layers have them in slots, and vLLM's own copy is dropped. It would read that one again for another request's
    adapters alone, and there are no others.
    """
    from_file, made = vars(LoRAModel)["from_local_checkpoint"], []

    def from_memory(_folder: str, known: set[str], weights_mapper: Any = None, **options: Any) -> LoRAModel:
        layers = {parse_fine_tuned_lora_name(name, weights_mapper)[0] for name in tensors}
        if unknown := sorted(layer for layer in layers if layer.rpartition(".")[2] not in known):
            raise ValueError(f"got adapters of {unknown}, expected those of {sorted(known)} alone")
        taken = {name: value for name, value in options.items() if name in _ADAPTER_OPTIONS}
        taken |= {"device": next(iter(tensors.values())).device, "weights_mapper": weights_mapper}
        made.append(LoRAModel.from_lora_tensors(tensors=tensors, **taken))
        return made[0]

    LoRAModel.from_local_checkpoint = from_memory
    try:
        yield
    finally:
        LoRAModel.from_local_checkpoint = from_file
        for layer in (layer for model in made for layer in model.loras.values()):
            layer.lora_a = layer.lora_b = None


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Raise EngineError in place of any error."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"vLLM failed while generating: {type(error).__name__}: {error}") from error


def _end(core: Any) -> None:
    """End the parts of an engine. If a part of a failed engine raises, the other parts are still ended."""
    executor = core.model_executor
    give_back = functools.update_wrapper(functools.partial(executor.collective_rpc, _give_back), _give_back)
    # The last one, because another engine makes groups of its own.
    for part in (give_back, executor.shutdown, core.scheduler.shutdown, destroy_model_parallel):
        try:
            part()
        except Exception as error:
            what = part.__qualname__, type(error).__name__, error
            logger.warning("vLLM: %s failed while the engine shut down: %s: %s", *what)


def _give_back(worker: Any) -> None:
    """Empty weights and cache even if others refer to them: compiled code keeps its examples, an error its frames.

    vLLM cannot start a second engine in a process while a byte of them is left.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    _ROPE_DICT.clear()  # else the next engine would reuse its rotary tables, which are now empty
    layers = list(worker.get_model().modules())
    for layer in layers:
        LAYERWISE_INFO.pop(layer, None)  # kept for reloading, and refers to the layer
    of_layers = (tensor for layer in layers for value in vars(layer).values() for tensor in support.tensors_of(value))
    for tensor in (*of_layers, *_in_sleep_pool()):
        storage = tensor.untyped_storage()
        if storage.resizable():
            storage.resize_(0)


def _in_sleep_pool() -> Iterator[Tensor]:
    """Yield the tensors in the pool that sleeps, also those that no layer holds, such as the index buffers of adapters."""
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.instance is None:
        return
    segments = [range(start, start + kept.handle[1]) for start, kept in CuMemAllocator.instance.pointer_to_data.items()]
    gc.unfreeze()  # vLLM freezes all objects that exist at its start, and the collector does not list frozen ones
    for tensor in gc.get_objects():
        # What compilation leaves has no memory: torch warns of a FakeTensor's address, and others raise.
        if issubclass(type(tensor), Tensor) and type(tensor).__name__ != "FakeTensor" and tensor.is_cuda:
            with contextlib.suppress(RuntimeError):
                address = tensor.untyped_storage().data_ptr()
                if any(address in segment for segment in segments):
                    yield tensor


def _collect() -> None:
    gc.unfreeze()  # vLLM freezes all objects that exist at its start, including its own
    gc.collect()


def _sampling_params(request: Request, seeded: bool, divided_by: float) -> SamplingParams:
    """Return parameters of the request's own, because vLLM changes them; the model divides its logits by `divided_by`."""
    usual, changeable = _usual_params(request.sampling, divided_by)
    params = copy.copy(usual)  # 0.3 µs; making them takes 6, most of it for checks
    for name in changeable:
        setattr(params, name, getattr(usual, name).copy())
    params.seed = request.seed if seeded else None
    params.max_tokens = request.room
    return params


@functools.lru_cache(maxsize=256)
def _usual_params(sampling: Sampling, divided_by: float) -> tuple[SamplingParams, list[str]]:
    """Return parameters to be copied, without a seed, and the names of their lists and sets."""
    params = SamplingParams(
        temperature=1.0 if sampling.temperature else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids holds it already, if it is to end responses
        stop=list(sampling.stop),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=False,  # a stop string may have some
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        bad_words=list(sampling.bad_words),
        max_tokens=sampling.max_tokens,
        logprobs=0 if sampling.with_log_probs else None,  # only that of the chosen token
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # each request has a copy
    )
    # Set afterwards, because vLLM's limits are those of values that nothing was divided by.
    params.temperature = sampling.temperature / divided_by
    params.presence_penalty = sampling.presence_penalty / divided_by
    params.frequency_penalty = sampling.frequency_penalty / divided_by
    params.logit_bias = {token: bias / divided_by for token, bias in sampling.logit_bias} or None
    names = params.__struct_fields__
    return params, [name for name in names if isinstance(getattr(params, name), list | set | dict)]


class VLLMRollout(Rollout):
    """A `Rollout` on a vLLM engine in this process; arguments are those of `build_rollout`.

    `sleep` frees the device memory of weights and cache, and both are lost; on CPU vLLM keeps the memory. With
    `ModelConfig.sends_adapters` vLLM reads the base from the model's folder, and weights that sleep wait in host memory.

    Attributes:
        engine: vLLM's engine, public for benchmarks.
        has_seeds: whether each request draws from a seed of its own.

    Raises ValueError: vLLM does not know or rejects an option, lacks the architecture, or finds too little free memory.
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
        if unknown := unknown_options(rollout.engine_kwargs.vllm):
            raise ValueError(f"actor_rollout_ref.rollout.engine_kwargs.vllm: {'; '.join(unknown)}")
        config = load_config(model)
        if fault := support.fault_of(config, models_of, device):
            raise ValueError(f"{model.path}: {fault}")
        options = support.engine_options(rollout, model, device, context_length, seed)
        options = support.with_needs(options, config, device)
        self._has_texts = tokenizer is not None and bool(rollout.stop or rollout.val_kwargs.bad_words)
        if tokenizer is not None and self._has_texts:
            options |= {"skip_tokenizer_init": False, "tokenizer": tokenizer.name_or_path}
        super().__init__(options["max_num_seqs"])
        self._aliases: dict[str, list[str]] = {}
        parameters: dict[str, Tensor] = {}
        self._adapters, self._base = AdapterKind.of(model) if model.sends_adapters else None, model.path
        if self._adapters is not None:
            self._folder = scratch_folder("adapters")  # vLLM wants peft's configuration as a file
        if device.type == "cpu" and self._adapters is None:
            parameters = load_skeleton(model, "lm", torch.float32).state_dict(keep_vars=True)
            if any(".experts." in name for name in parameters):
                raise ValueError(
                    f"{model.path}: on CPU vLLM keeps the experts of its first weights and ignores later ones; set "
                    "actor_rollout_ref.rollout.name=hf for a mixture of experts"
                )
            # On CPU vLLM packs the head's weight into a copy of its own, which new weights of the embedding do not reach.
            self._aliases = support.tied_names(parameters)
            if self._aliases:
                options["hf_overrides"] = {**options["hf_overrides"], "tie_word_embeddings": False}
        models = models_of(config.architectures or ())
        has_states = any(getattr(each, "has_inner_state", False) for each in models)  # as Mamba's and Falcon-H1's
        if has_states and not options["enable_chunked_prefill"]:
            options["enable_prefix_caching"] = False  # vLLM caches states at the ends of chunks
        if models and all(".transformers" in each.__module__ for each in models):  # such as OLMo 2 since 0.32
            options["hf_overrides"] = functools.partial(support.with_own_class, options["hf_overrides"])
        if device.type != "cpu":
            DeviceMemory.of(device).require(options["gpu_memory_utilization"])
        self._device = device
        self._temperature = rollout.temperature
        self._asleep: set[str] = set()  # parts whose memory is free
        self._waiting: dict[int, None] = {}  # requests that the engine has not got yet, oldest first
        self._steps = 0  # since it got some
        if rollout.exact:
            from rlx.rollout import vllm_exact

            vllm_exact.require_device(device)
            vllm_exact.use_in_engine(functools.partial(rotary_table, config))
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
            if rollout.exact and not self.engine.has_free_seeds:
                got = f"vLLM {_version} runs it with its first runner"
                raise ValueError(f"rollout.exact=True: {got}, expected its second; {USE_HF}")
            self._check_model(parameters)
        except ValueError as error:
            self.engine.close()
            raise ValueError(f"{model.path}: {error}") from error

    def _check_model(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise ValueError if vLLM's model would not use the trainer's weights, whose ties may be undone, as they are."""
        if self._aliases and not self.engine.ask(support.has_head):
            raise ValueError(
                "on CPU vLLM keeps the first values of a head that is tied to the embedding, and its model of this type has no "
                f"other head (Gemma's, for example); {USE_HF}"
            )
        if rounded := self.engine.ask(support.rounded_parameters):
            raise ValueError(
                f"vLLM rounds {rounded[0]} and {len(rounded) - 1} other parameters to fewer bits than {self.engine.dtype}, expected "
                f"all weights in it; set actor_rollout_ref.rollout.dtype=bf16, or {USE_HF}"
            )
        if self._aliases:  # some models, such as Bloom's, refuse a head of their own
            zeros: dict[int, tuple[str, Tensor]] = {}  # for each weight once; they take no memory
            for name, each in parameters.items():
                zeros.setdefault(id(each), (name, torch.zeros(()).expand(each.shape)))
            self.update_weights(zeros.values(), version=0)
            self.version = None

    def _fault(self, request: Request) -> str | None:
        return support.request_fault(request, self.engine.max_model_len, self._has_texts, self._temperature)

    def _enter(self, number: int, request: Request) -> None:
        self._wake("weights", "kv_cache")
        if not self.running:
            self.engine.seed(request.seed)
        if self._device.type == "cpu":
            self.engine.add(number, request, self.has_seeds, self.version)
        else:
            self._waiting[number] = None

    def _advance(self, requests: Mapping[int, Request]) -> list[tuple[int, Completion]]:
        try:
            self._admit(requests)
            return self.engine.step(requests)
        except EngineError:
            self._waiting.clear()
            raise

    def _admit(self, requests: Mapping[int, Request]) -> None:
        """Hand waiting requests to the engine, several at once: see `ADMIT_STEPS`."""
        inside = len(requests) - len(self._waiting)
        most = min(len(self._waiting), self.max_num_seqs - inside)
        self._steps += 1
        is_due = not inside or self._steps >= ADMIT_STEPS or most >= ADMIT_SHARE * self.max_num_seqs
        if most > 0 and is_due:
            self._steps = 0
            for number in list(itertools.islice(self._waiting, most)):
                del self._waiting[number]
                self.engine.add(number, requests[number], self.has_seeds, self.version)

    def _leave(self, numbers: Sequence[int]) -> None:
        self.engine.abort([number for number in numbers if number not in self._waiting])
        for number in numbers:
            self._waiting.pop(number, None)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See Rollout. Whole weights are loaded layer by layer, and only the weights are woken."""
        self._require_idle("update_weights")
        self.version = None
        self._wake("weights")
        if self._adapters is None:
            self.engine.load((name, tensor) for first, tensor in weights for name in self._aliases.get(first, [first]))
        else:
            self._load_adapters(self._adapters, weights)
        self.version = version

    def _load_adapters(self, kind: AdapterKind, weights: Iterable[tuple[str, Tensor]]) -> None:
        # Copies, because vLLM multiplies with the scale in place.
        tensors = {name: tensor.to(self.engine.dtype, copy=True) for name, tensor in weights}
        with storing(self._folder.name):
            write_config(Path(self._folder.name), tensors, kind, self._base)
        wanted = sum(".lora_A." in name for name in tensors)
        found = self.engine.load_adapters({peft_name(name): each for name, each in tensors.items()}, self._folder.name)
        if found != wanted:
            raise ValueError(f"vLLM uses {found} of {wanted} adapters, expected all of them; set {_MERGE}")

    def probe(self) -> Tensor:
        return self.engine.ask(support.probe)

    def sleep(self) -> None:
        """See Rollout: weights and cache are lost, except weights that take adapters."""
        self._require_idle("sleep")
        if self._device.type == "cpu" or self._asleep:
            return
        if self._adapters is None:
            self.version = None
        self.engine.sleep(keeps_weights=self._adapters is not None)
        self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        self._wake("weights")

    def close(self) -> None:
        """End the engine."""
        self.version = None
        self._requests.clear()
        self._waiting.clear()
        try:
            self._wake("weights", "kv_cache")  # memory that sleeps cannot be freed and would count as used
        except EngineError as error:
            logger.warning("%s. The engine shuts down, and this process cannot start another", error)
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
                        f"vLLM could not allocate its {part} again ({error}); {DeviceMemory.of(self._device)}. Lower "
                        "actor_rollout_ref.rollout.gpu_memory_utilization, or set fsdp_config.param_offload and "
                        "optimizer_offload"
                    ) from error
                self._asleep.discard(part)
