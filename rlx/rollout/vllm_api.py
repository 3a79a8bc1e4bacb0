"""The one file that imports vLLM and knows how its versions differ.

Importing this module imports vLLM, with the settings that let it run in a process that trains.
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import gc
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rlx.config.vllm_range import supported_vllm
from rlx.heartbeat import beat
from rlx.rollout.process_state import OwnRandomState, own_random_state, restored_process_state
from rlx.rollout.protocol import Completion, EngineError, Request, Sampling
from rlx.rollout.vllm_support import (
    ContinuedHashes,
    Stream,
    completion_of,
    count_adapters,
    divide_logits,
    has_head,
    hush,
    probe,
    reload,
    remove_names,
    rounded_parameters,
    shared_memory,
    tensors_of,
)

_version = supported_vllm()
# In this process instead of one of its own, because the weights come from here.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# On CPU vLLM would pin its threads, and these are the threads that train too.
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

with restored_process_state():
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm.distributed import destroy_model_parallel, get_tp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import TokensPrompt, tokens_input
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.utils import parse_fine_tuned_lora_name
    from vllm.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)
_ADAPTER_OPTIONS = inspect.signature(LoRAModel.from_lora_tensors).parameters
hush()


def unknown_options(names: Iterable[str]) -> list[str]:
    """Return one line for each name that is no option of this version's engine."""
    known = sorted(field.name for field in dataclasses.fields(EngineArgs))
    lines = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known)
            lines.append(
                f"{name} is no option of vLLM {_version}" + (f"; did you mean {' or '.join(near)}?" if near else "")
            )
    return lines


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

    Raises:
        ValueError: vLLM refuses the options or the model; the message holds its reason.
    """

    def __init__(self, options: Mapping[str, Any], on_cpu: bool, sampling: Sampling) -> None:
        self._stance = "force_eager" if on_cpu else "default"
        self._temperature = sampling.temperature
        self._adapters: LoRARequest | None = None
        self._random, self._has_unseeded = OwnRandomState(), False
        shares_memory = on_cpu and options["tensor_parallel_size"] > 1
        memory = shared_memory() if shares_memory else contextlib.nullcontext()
        with restored_process_state(), memory, _warming_up(sampling):
            try:
                self._llm: LLM | None = LLM(**options)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(
                    f"vLLM {_version} could not start: {reason}. Its options were {dict(options)}. Change them by engine_kwargs.vllm, "
                    "or set actor_rollout_ref.rollout.name=hf"
                ) from error
            if options["tensor_parallel_size"] > 1:
                remove_names(get_tp_group().mq_broadcaster)
            if self._temperature != 1.0:
                self._llm.collective_rpc(divide_logits, args=(self._temperature,))
        # Newer versions destroy the default process group, which is the trainer's, together with the engine.
        finalizer = getattr(self._client, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()
        self._hashes = ContinuedHashes.of(getattr(self._client, "engine_core", None))

    @property
    def max_model_len(self) -> int:
        """Longest prompt and response together [tokens]."""
        return int(self._engine.model_config.max_model_len)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
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

    def add(self, number: int, request: Request, seeded: bool) -> None:
        """Take a request; the next step works on it if there is room. Raises EngineError if the engine fails.

        Args:
            number: in digits, vLLM's name of it.
            request: to be completed.
            seeded: whether it draws from its own seed instead of the stream of all.
        """
        self._has_unseeded |= not seeded
        prompt = tokens_input(list(request.prompt_ids))  # vLLM would render a `TokensPrompt` to it, at a cost
        self._hashes.expect(request.memory)
        with _failing():
            self._engine.llm_engine.add_request(
                str(number), prompt, self._params(request, seeded), lora_request=self._adapters
            )

    def step(self, requests: Mapping[int, Request]) -> list[tuple[int, Completion]]:
        """Decode a token of each request that has a place, and return those that stopped; raises EngineError.

        Args:
            requests: those in flight by number.
        """
        beat()
        with self._at_work():
            answers: list[Any] = self._engine.llm_engine.step()
        stopped = {int(answer.request_id): answer.outputs[0] for answer in answers if answer.finished}
        return [(number, completion_of(requests[number], output)) for number, output in stopped.items()]

    def abort(self, numbers: Iterable[int]) -> None:
        """End requests and free their cache."""
        with _failing():
            self._engine.llm_engine.abort_request([str(number) for number in numbers])

    def _params(self, request: Request, seeded: bool) -> SamplingParams:
        return _sampling_params(request, seeded, self._temperature)

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        # The second model runner draws seeds for requests that have none from numpy; nothing else in a step uses it.
        own = self._random.in_use(with_numpy=self._has_unseeded)
        with _failing(), own, torch.compiler.set_stance(self._stance):
            yield

    def direct(self, requests: Sequence[Request], seeded: bool) -> Callable[[], list[Any]]:
        """Return a function that calls vLLM's own `generate` and returns its objects, to compare with; it may be called repeatedly."""
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        params = [self._params(request, seeded) for request in requests]

        def call() -> list[Any]:
            with own_random_state(requests[0].seed), torch.compiler.set_stance(self._stance):
                return self._engine.generate(prompts, params, use_tqdm=False, lora_request=self._adapters)

        return call

    def has_head(self) -> bool:
        """Return whether vLLM's model has a head of its own, which may be tied to the embedding."""
        return bool(self._engine.collective_rpc(has_head)[0])

    def rounded_parameters(self) -> list[str]:
        """See `rlx.rollout.vllm_support.rounded_parameters`."""
        return list(self._engine.collective_rpc(rounded_parameters)[0])

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a complete set of weights as from a checkpoint, and drop cached prefixes.

        Raises:
            ValueError: vLLM's model has other weights. The engine cannot be used any more.
        """
        engine, stream = self._engine, Stream(weights)
        with restored_process_state():
            try:
                engine.collective_rpc(reload, args=(stream,))
            except Exception as error:
                if stream.has_failed or isinstance(error, torch.OutOfMemoryError):
                    raise
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(
                    f"vLLM {_version} cannot take this model's weights ({reason[:300]}); set actor_rollout_ref.rollout.name=hf"
                ) from error
        self._drop_prefixes()

    def _drop_prefixes(self) -> None:
        self._hashes.forget()
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM kept the prefix cache of the old weights because requests are still running")

    def load_adapters(self, tensors: dict[str, Tensor], folder: str, number: int) -> int:
        """Load adapters in place of those before, and return how many layers have one now.

        Args:
            tensors: by peft's names; vLLM overwrites them.
            folder: with peft's configuration of these adapters.
            number: from 1, another for each set of adapters.

        Raises:
            ValueError: vLLM cannot take these adapters.
        """
        request = LoRARequest(f"version {number}", number, folder)
        with restored_process_state(), _adapters_in_memory(tensors):
            try:
                self._engine.llm_engine.add_lora(request)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(
                    f"vLLM {_version} cannot take these adapters ({reason}); set actor_rollout_ref.model.lora.merge=True"
                ) from error
        self._adapters = request
        self._drop_prefixes()
        return int(self._engine.collective_rpc(count_adapters)[0])

    def probe(self) -> Tensor:
        """Return a sample of this process's weights and adapters, see `sample_of`."""
        return cast(Tensor, self._engine.collective_rpc(probe)[0])

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
    setattr(
        SamplingParams,
        name,
        staticmethod(lambda: _sampling_params(request, seeded=True, divided_by=sampling.temperature)),
    )
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


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """Raise EngineError in place of any error."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"vLLM failed while generating: {type(error).__name__}: {error}") from error


def _end(core: Any) -> None:
    """End the parts of an engine. If a part of a failed engine raises, the other parts are still ended."""

    def give_back() -> None:
        core.model_executor.collective_rpc(_give_back)

    # The last one, because another engine makes groups of its own.
    for part in (give_back, core.model_executor.shutdown, core.scheduler.shutdown, destroy_model_parallel):
        try:
            part()
        except Exception as error:
            logger.warning("vLLM: %s of an engine that ends: %s: %s", part.__qualname__, type(error).__name__, error)


def _give_back(worker: Any) -> None:
    """Empty weights and cache even if others refer to them: compiled code keeps its examples, an error its frames.

    vLLM cannot start a second engine in a process while a byte of them is left.
    """
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    _ROPE_DICT.clear()  # else the next engine would reuse its rotary tables, which are now empty
    for layer in worker.get_model().modules():
        LAYERWISE_INFO.pop(layer, None)  # kept for reloading, and refers to the layer
        for value in vars(layer).values():
            for tensor in tensors_of(value):
                storage = tensor.untyped_storage()
                if storage.resizable():
                    storage.resize_(0)


def _collect() -> None:
    gc.unfreeze()  # vLLM freezes all objects that exist at its start, including its own
    gc.collect()


def _sampling_params(request: Request, seeded: bool, divided_by: float) -> SamplingParams:
    """Return parameters of the request's own: vLLM changes them when it takes the request.

    Args:
        request: to be completed.
        seeded: whether it draws from its own seed.
        divided_by: what the model divides its logits by, see `divide_logits`.
    """
    usual, changeable = _usual_params(request.sampling, divided_by)
    params = copy.copy(usual)  # 0.3 µs; making them takes 6, most of it for checks
    for name in changeable:
        setattr(params, name, getattr(usual, name).copy())
    params.seed = request.seed if seeded else None
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
