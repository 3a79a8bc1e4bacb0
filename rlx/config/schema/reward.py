"""Keys of reward functions and reward models: `reward`, `custom_reward_function`, `reward_model`."""

from dataclasses import dataclass
from typing import Any

from rlx.config.schema.algorithm import OverlongBufferConfig
from rlx.config.schema.keys import group, in_state, key, needs, never, while_is, without
from rlx.config.schema.model import STREAMS
from rlx.config.schema.training import FSDPConfig

FORMS = ("tags", "hashes", "boxed")
NOT_CALLED = (in_state("the environment scores"), in_state("the model scores"))  # reward functions


@dataclass(frozen=True)
class CustomRewardConfig:
    path: str | None = key(None, "Python file with a reward function of your own.", is_path=True)
    name: str = key(
        "compute_score",
        "Its name: f(data_source, solution_str, ground_truth, extra_info=None), see docs/rewards.md.",
        without("path"),
    )
    reward_kwargs: dict[str, Any] = key({}, "Further arguments of the function, by name.", without("path"))
    data_sources: tuple[str, ...] = key((), "Data sources that it scores; empty: all.", without("path"))


@dataclass(frozen=True)
class RewardManagerConfig:
    name: str = key(
        "naive",
        "Calls of a function of your own: naive, one for each sample; batch, one for all.",
        without("custom_reward_function.path"),
        choices=("naive", "batch"),
    )


@dataclass(frozen=True)
class RewardConfig:
    reward_manager: RewardManagerConfig = group(RewardManagerConfig, "How reward functions are called.", *NOT_CALLED)
    format_score: float = key(
        0.0,
        "Score of a wrong answer in GSM8K's form.",
        *NOT_CALLED,
        in_state("own function scores all"),
        minimum=0,
        maximum=1,
    )
    overlong_buffer: OverlongBufferConfig = group(OverlongBufferConfig, "Length penalty.", without("enable"))
    format: str | None = key(None, "Form that earns format_weight: tags, hashes, boxed or an expression.", *NOT_CALLED)
    format_weight: float = key(0.1, "Bonus for a response of that form.", *NOT_CALLED, without("format"), minimum=0)
    num_workers: int | None = key(None, "Their processes; null: one per core, at most 16.", *NOT_CALLED, minimum=1)
    timeout_s: float = key(60.0, "Longest call of a reward function [seconds].", *NOT_CALLED, above=0)
    max_concurrent: int = key(
        64,
        "Calls of an async function at a time, of each process.",
        *NOT_CALLED,
        without("custom_reward_function.path"),
        minimum=1,
    )
    memory_limit_gb: float | None = key(8.0, "Memory per process [10^9 bytes]; null: no limit.", *NOT_CALLED, above=0)
    on_error: str = key("stop", "When a function raises: stop, or score 0.", *NOT_CALLED, choices=("stop", "zero"))
    on_crash: str = key("zero", "When a call hangs or kills its process twice.", *NOT_CALLED, choices=("stop", "zero"))


@dataclass(frozen=True)
class RewardModelSourceConfig:
    path: str | None = key(None, "Folder or hub name of a classifier with one label.", is_path=True)
    trust_remote_code: bool = key(False, "Run code from the model folder.")
    override_config: dict[str, Any] = key({}, "Values to set in the model's config.json.")
    attn_implementation: str = key(
        "sdpa", "Attention kernel, as transformers names it.", package="flash-attn", package_for=("flash_attention_2",)
    )
    layer_offload: bool = key(False, "As `actor_rollout_ref.model.layer_offload`.", STREAMS)
    layer_offload_directory: str | None = key(None, "As the actor's.", is_path=True)
    fsdp_config: FSDPConfig = group(FSDPConfig, "Sharding and precision.")


@dataclass(frozen=True)
class RewardModelConfig:
    """A model that scores whole conversations, instead of reward functions or in addition to them."""

    enable: bool = key(
        False,
        "Score responses with a reward model.",
        needs("there is no reward model", "model.path", expected="=<a folder or hub name>"),
    )
    rule_weight: float = key(0.0, "Weight of the reward functions' score; 0: they are not called.", minimum=0)
    strategy: str | None = key(None, "Sharding; null: the actor's.", choices=(None, "fsdp", "fsdp2"))
    model: RewardModelSourceConfig = group(
        RewardModelSourceConfig,
        "The model.",
        below=dict.fromkeys(
            ("fsdp_config.optimizer_offload", "fsdp_config.optimizer_state"),
            (never("a reward model has no optimizer"),),
        ),
    )
    micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward and process; null: the actor's.", while_is("use_dynamic_bsz", True), minimum=1
    )
    use_dynamic_bsz: bool = key(False, "Cut by tokens instead.")
    forward_max_token_len_per_gpu: int = key(32768, "Tokens per forward.", without("use_dynamic_bsz"), minimum=1)
