"""The keys of `actor_rollout_ref.rollout`: generation. The whole tree is in `rlx.config.schema`."""

from dataclasses import dataclass
from typing import Any

from rlx.config.schema.environment import MultiTurnConfig
from rlx.config.schema.keys import group, in_state, is_above, key, needs, while_is, without

WATCHES_ROUTERS = (
    needs("routers cannot be watched in compiled layers", "actor_rollout_ref.actor.use_torch_compile", False),
    needs("routers see parts of shared sequences", "actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1),
)
NO_OLD_LOG_PROBS = while_is("algorithm.rollout_correction.bypass_mode", True)


@dataclass(frozen=True)
class ValKwargsConfig:
    temperature: float = key(0.0, "0: greedy.", without("do_sample"), minimum=0)
    top_p: float = key(1.0, "Nucleus.", without("do_sample"), exclusive_minimum=0, maximum=1)
    top_k: int = key(-1, "Most likely tokens considered; -1 or 0: all.", without("do_sample"), minimum=-1)
    n: int = key(1, "Responses per validation prompt.", without("do_sample"), minimum=1)
    do_sample: bool = key(
        False,
        "False: greedy at any temperature.",
        needs("validation samples at temperature 0", "temperature", expected=" > 0", example=1.0),
    )
    min_p: float = key(
        0.0, "Drop tokens below this share of the most likely one.", without("do_sample"), minimum=0, maximum=1
    )
    repetition_penalty: float = key(1.0, "Divides logits of tokens in prompt or response.", exclusive_minimum=0)
    presence_penalty: float = key(0.0, "Off the logit of a token that the response has.", minimum=-2, maximum=2)
    frequency_penalty: float = key(0.0, "Off a token's logit for each time in the response.", minimum=-2, maximum=2)
    bad_words: tuple[str, ...] = key((), "Texts that are not sampled.")
    logit_bias: dict[str, Any] = key({}, "Added to logits: numbers from -100 to 100 by token id.")


@dataclass(frozen=True)
class EngineKwargsConfig:
    vllm: dict[str, Any] = key({}, "Passed to vLLM unchanged.")


@dataclass(frozen=True)
class RolloutConfig:
    name: str = key("vllm", "Generation engine: transformers (`hf`) or `vllm`.", choices=("hf", "vllm"))
    temperature: float = key(1.0, "Sampling temperature; the trainer's log-probs use the same.", exclusive_minimum=0)
    top_p: float = key(1.0, "Nucleus.", exclusive_minimum=0, maximum=1)
    top_k: int = key(-1, "Most likely tokens considered; -1 or 0: all.", minimum=-1)
    n: int = key(1, "Responses per prompt.", minimum=1)
    stop: tuple[str, ...] = key((), "Strings that end a response; their tokens are trained on.")
    include_stop_str_in_output: bool = key(False, "Keep the stop string in the text that is scored.", without("stop"))
    ignore_eos: bool = key(False, "Only stop strings and max_response_length end a response.")
    dtype: str = key(
        "auto", "Type of weights; auto: bf16 on accelerators, fp32 on CPU.", choices=("auto", "bf16", "fp16", "fp32")
    )
    max_num_seqs: int = key(1024, "Sequences decoded at once.", minimum=1)
    calculate_log_probs: bool = key(True, "Return the sampler's log-probs, which show its mismatch with the trainer.")
    enable_rollout_routing_replay: bool = key(
        False,
        "Return the experts that the sampler uses for each token.",
        in_state("experts are not used"),
        *WATCHES_ROUTERS,
        *(
            needs("the experts of conversations with an environment are not recorded", f"environment.{other}", None)
            for other in ("name", "path")
        ),
    )
    seed_requests: bool | None = key(
        None, "vLLM: a seed for each sample; null: if they cost nothing, and on CPU.", while_is("name", "hf")
    )
    gpu_memory_utilization: float = key(
        0.5, "vLLM: share of the device's memory.", while_is("name", "hf"), exclusive_minimum=0, maximum=1
    )
    tensor_model_parallel_size: int = key(
        1,
        "vLLM: processes that share a copy of the model.",
        needs("the hf sampler keeps the whole model in each process", "name", "vllm", when=is_above(1)),
        minimum=1,
        divides="processes",
    )
    max_num_batched_tokens: int = key(8192, "vLLM: tokens per scheduling step.", while_is("name", "hf"), minimum=1)
    enforce_eager: bool = key(False, "vLLM: no CUDA graphs.", while_is("name", "hf"))
    free_cache_engine: bool = key(True, "vLLM: give the KV cache back during updates.", while_is("name", "hf"))
    enable_chunked_prefill: bool = key(True, "vLLM: prefill in chunks.", while_is("name", "hf"))
    enable_prefix_caching: bool = key(
        True,
        "vLLM: share prefixes.",
        while_is("name", "hf"),
        needs(
            "vLLM returns experts from the blocks of its prefix cache",
            "enable_rollout_routing_replay",
            False,
            when=lambda caches: not caches,
        ),
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Old log-probs: samples per forward; null: the actor's.",
        NO_OLD_LOG_PROBS,
        while_is("log_prob_use_dynamic_bsz", True),
        minimum=1,
    )
    log_prob_use_dynamic_bsz: bool = key(False, "Old log-probs: cut by tokens instead.", NO_OLD_LOG_PROBS)
    log_prob_max_token_len_per_gpu: int = key(
        16384, "Old log-probs: tokens per forward.", NO_OLD_LOG_PROBS, without("log_prob_use_dynamic_bsz"), minimum=1
    )
    val_kwargs: ValKwargsConfig = group(ValKwargsConfig, "Sampling in validation.", in_state("never validates"))
    multi_turn: MultiTurnConfig = group(MultiTurnConfig, "Turns of a conversation.", in_state("no environment"))
    engine_kwargs: EngineKwargsConfig = group(EngineKwargsConfig, "Options passed through.", while_is("name", "hf"))
