"""Keys of generation and of conversations: `actor_rollout_ref.rollout` and `environment`. See docs/environments.md."""

from dataclasses import dataclass
from typing import Any

from rlx.config.schema.keys import Unused, group, in_state, is_above, key, needs, while_is, without

WATCHES_ROUTERS = (
    needs("routers cannot be watched in compiled layers", "actor_rollout_ref.actor.use_torch_compile", False),
    needs("routers see parts of shared sequences", "actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1),
)
NO_OLD_LOG_PROBS = in_state("no pass for old log-probs")


TOOL_FORMATS = ("tags", "hermes", "llama3_json", "mistral", "qwen3_coder")


@dataclass(frozen=True)
class MultiTurnConfig:
    max_assistant_turns: int | None = key(None, "Most turns of the model; null: no limit.", minimum=1)
    max_user_turns: int | None = key(None, "Most answers of the environment; null: no limit.", minimum=1)
    max_turn_tokens: int | None = key(
        None,
        "Longest turn of the model [tokens], then cut; null: what data.max_response_length leaves.",
        minimum=1,
        at_most="data.max_response_length",
    )
    max_tool_response_length: int = key(256, "Longer outputs of tools (role tool) are cut [characters].", minimum=1)
    tool_response_truncate_side: str = key("middle", "Side kept; middle: both.", choices=("left", "middle", "right"))
    format: str = key("tags", "How the model writes calls of tools. See docs/environments.md.", choices=TOOL_FORMATS)
    on_rewritten_history: str = key(
        "refuse",
        "When the template rewrites earlier turns: refuse ends the row, keep keeps the turns as sampled, fork continues in another row.",
        choices=("refuse", "keep", "fork"),
    )


@dataclass(frozen=True)
class EnvironmentConfig:
    """The other side of conversations; with neither `name` nor `path` each sample is a single turn. See docs/environments.md."""

    name: str | None = key(None, "One of rlx's own; with `path` a class, tool or list of tools.")
    path: str | None = key(None, "Python file with an environment or tools of your own.", is_path=True)
    kwargs: dict[str, Any] = key({}, "Arguments of the class, by name.")
    processes: int = key(4, "Processes with environments, beside each process that samples.", minimum=1)
    max_parallel: int | None = key(None, "Conversations at a time of each sampling process; null: all.", minimum=1)
    timeout_s: float = key(60.0, "Longest reset or step [seconds].", above=0)
    memory_limit_gb: float | None = key(8.0, "Memory per process [10^9 bytes]; null: no limit.", above=0)
    address: str = key(
        "loopback",
        "Where agents call the policy; `node`: at the machine's own address.",
        Unused("{key} names no agents", "name", lambda name: name not in ("endpoint", "verifiers")),
        choices=("loopback", "node"),
    )
    on_failure: str = key("end_row", "When an environment fails or hangs.", choices=("end_row", "end_run"))
    failure_reward: float = key(0.0, "Reward of the turn at which it fails.")
    rewards: str = key(
        "add",
        "How its rewards join the reward functions' score.",
        needs(
            "the environment's rewards replace those of the reward model",
            "reward_model.enable",
            False,
            when=lambda rewards: rewards == "replace",
        ),
        choices=("add", "replace"),
    )


@dataclass(frozen=True)
class ValKwargsConfig:
    temperature: float = key(0.0, "0: greedy.", without("do_sample"), minimum=0)
    top_p: float = key(1.0, "Nucleus.", without("do_sample"), above=0, maximum=1)
    top_k: int = key(-1, "Most likely tokens considered; -1 or 0: all.", without("do_sample"), minimum=-1)
    n: int = key(1, "Responses per validation prompt.", without("do_sample"), minimum=1)
    do_sample: bool = key(
        False,
        "False: greedy at any temperature.",
        needs("validation samples at temperature 0", "temperature", expected=" > 0", example=1.0),
    )
    min_p: float = key(0.0, "Drop tokens below this share of the best one.", without("do_sample"), minimum=0, maximum=1)
    repetition_penalty: float = key(1.0, "Divides logits of tokens in prompt or response.", above=0)
    presence_penalty: float = key(0.0, "Off the logit of a token that the response has.", minimum=-2, maximum=2)
    frequency_penalty: float = key(0.0, "Off a token's logit for each time in the response.", minimum=-2, maximum=2)
    bad_words: tuple[str, ...] = key((), "Texts that are not sampled.")
    logit_bias: dict[str, Any] = key({}, "Added to logits: numbers from -100 to 100 by token id.")


@dataclass(frozen=True)
class EngineKwargsConfig:
    vllm: dict[str, Any] = key({}, "Passed to vLLM unchanged.")


ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class PartialConfig:
    """Samples that go on in later steps, so that no step waits for the longest one. See docs/async.md."""

    max_staleness: int = key(
        0,
        "Most steps for which samples of later prompts go on; 0: each step samples its own prompts to their end.",
        needs(
            "tokens of older weights are trained on without a correction",
            "algorithm.rollout_correction.rollout_is",
            "token",
            "sequence",
        ),
        needs("the correction needs old log-probs", "algorithm.rollout_correction.bypass_mode", False),
        needs("greedy responses of remax would wait for their longest", "algorithm.adv_estimator", when=bool)._replace(
            met=lambda name: name != "remax", expected=" other than remax", example="grpo"
        ),
        needs("a stop string may lie across two rounds", f"{ROLLOUT}.stop", (), expected="=[]", example="[]"),
        needs("experts of kept tokens are lost", f"{ROLLOUT}.enable_rollout_routing_replay", False),
        needs("the calls of agents cannot be kept", "environment.name")._replace(
            met=lambda name: name not in ("endpoint", "verifiers"),
            expected=" other than endpoint or verifiers",
            example="null",
        ),
        minimum=0,
    )
    round_tokens: int | None = key(
        None,
        "Most tokens that a later prompt's sample gets in a step; null: data.max_response_length / (max_staleness + 1), with "
        "trainer.n_rollout_gpus / max_staleness.",
        without("max_staleness"),
        minimum=1,
        at_most="data.max_response_length",
    )


POLICY, RATIOS = "actor_rollout_ref", "algorithm.rollout_correction"
SAME = "log-probs are equal only if sampler and trainer run the same kernels on whole sequences of the same weights"
EQUAL: dict[str, tuple[Any, ...]] = {
    **{"name": ("vllm",), "dtype": ("auto", "bf16"), "calculate_log_probs": (True,), "partial.max_staleness": (0,)},
    **{"tensor_model_parallel_size": (1,), f"{POLICY}.model.lora_rank": (0,), f"{POLICY}.model.use_liger": (False,)},
    **{f"{POLICY}.model.use_remove_padding": (True,), f"{POLICY}.model.attn_implementation": ("sdpa",)},
    **{f"{POLICY}.model.use_shared_prefix": ("auto", False), f"{POLICY}.actor.use_torch_compile": (False,)},
    **{f"{POLICY}.actor.strategy": ("fsdp2",), f"{POLICY}.actor.ulysses_sequence_parallel_size": (1,)},
    f"{POLICY}.actor.fsdp_config.model_dtype": ("fp32", "bf16"),
    f"{POLICY}.actor.fsdp_config.mixed_precision.param_dtype": ("auto", "bf16"),
    **{f"{RATIOS}.{name}": (None,) for name in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")},
}
"""The values with which `exact` can be."""


@dataclass(frozen=True)
class RolloutConfig:
    name: str = key("vllm", "Generation engine: transformers (`hf`) or `vllm`.", choices=("hf", "vllm"))
    temperature: float = key(1.0, "Sampling temperature; the trainer's log-probs use the same.", above=0)
    top_p: float = key(1.0, "Nucleus.", above=0, maximum=1)
    top_k: int = key(-1, "Most likely tokens considered; -1 or 0: all.", minimum=-1)
    n: int = key(1, "Responses per prompt.", minimum=1)
    stop: tuple[str, ...] = key((), "Strings that end a response; their tokens are trained on.")
    include_stop_str_in_output: bool = key(False, "Keep the stop string in the text that is scored.", without("stop"))
    ignore_eos: bool = key(False, "Only stop strings and max_response_length end a response.")
    dtype: str = key("auto", "Type of weights; auto: bf16, on CPU fp32.", choices=("auto", "bf16", "fp16", "fp32"))
    max_num_seqs: int = key(1024, "Sequences decoded at once.", minimum=1)
    exact: bool = key(
        False,
        "vLLM: the trainer computes with the sampler's kernels, so that log-probs are equal to the bit.",
        *(needs(SAME, other, *values) for other, values in EQUAL.items()),
    )
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
        0.5, "vLLM: share of the device's memory.", while_is("name", "hf"), above=0, maximum=1
    )
    tensor_model_parallel_size: int = key(
        1,
        "vLLM: processes that share a copy of the model.",
        needs("the hf sampler keeps the whole model in each process", "name", "vllm", when=is_above(1)),
        minimum=1,
        divides="sampling processes",
    )
    engines_per_gpu: int | str = key(
        "auto",
        "vLLM: engines on one GPU, each a process; auto: as many as keep it busy.",
        while_is("name", "hf"),
        needs(
            "an engine has several GPUs", "tensor_model_parallel_size", 1, when=lambda count: count not in (1, "auto")
        ),
        minimum=1,
        words=("auto",),
    )
    assign_late: bool = key(
        False,
        "vLLM: several engines get prompts as they have places, so timing decides which are decoded together.",
        while_is("name", "hf"),
        while_is("engines_per_gpu", 1),
    )
    max_num_batched_tokens: int = key(8192, "vLLM: tokens per scheduling step.", while_is("name", "hf"), minimum=1)
    enforce_eager: bool = key(False, "vLLM: no CUDA graphs.", while_is("name", "hf"))
    free_cache_engine: bool = key(
        True,
        "vLLM: give the KV cache back during updates.",
        while_is("name", "hf"),
        Unused("with {key} the sampler shares no GPU", "trainer.n_rollout_gpus"),
    )
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
    partial: PartialConfig = group(PartialConfig, "Samples that go on in later steps.")
    engine_kwargs: EngineKwargsConfig = group(EngineKwargsConfig, "Options passed through.", while_is("name", "hf"))
