"""The typed configuration tree: every key, its type, default, range and meaning.

It imports only the standard library, so every package may import it. `rlx.config.compose` reads YAML and applies overrides;
`rlx.config.check` holds cross-field rules. Keys that verl also has keep its names and meanings.
"""

from dataclasses import dataclass
from typing import Any

from rlx.config.schema.algorithm import (
    ADV_ESTIMATORS,
    CRITIC,
    GAMMA,
    GREEDY,
    GROUPS,
    KL_LOSS_ESTIMATORS,
    LAM,
    LOSS_MODES,
    NORM_BY_STD,
    REJECTIONS,
    AlgorithmConfig,
    FilterGroupsConfig,
    OverlongBufferConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    rejections,
)
from rlx.config.schema.keys import Unused, beside, group, in_state, key, needs, never, unless, while_is, without
from rlx.config.schema.model import (
    LARGEST_SEED,
    MODEL_JSON_FILES,
    STREAMS,
    TOKENIZER_FILES,
    ActivationOffloadConfig,
    LoraConfig,
    ModelConfig,
    TinyModelConfig,
)
from rlx.config.schema.rollout import EngineKwargsConfig, EnvironmentConfig, RolloutConfig, ValKwargsConfig
from rlx.config.schema.training import (
    AGGREGATIONS,
    ActorConfig,
    ActorRolloutRefConfig,
    CheckpointConfig,
    CriticConfig,
    FSDPConfig,
    MixedPrecisionConfig,
    OptimConfig,
    RefConfig,
)

ARITHMETIC = "builtin:arithmetic"
PLAIN_SOURCE = "answer"
"""The data source of rows with `data.answer_key` that name none."""


@dataclass(frozen=True)
class ArithmeticConfig:
    """The generated word problems that `builtin:arithmetic` names in a list of files."""

    difficulty: int = key(
        1,
        "1: a story with one sum or difference; 2: two; 3: also products; 4: bare numbers to 999.",
        choices=(1, 2, 3, 4),
    )
    train_size: int = key(8192, "Distinct training problems.", minimum=1)
    val_size: int = key(512, "Distinct held-out problems; none of them is a training problem.", minimum=1)
    seed: int = key(0, "Seed of the generator.", minimum=0)


@dataclass(frozen=True)
class CustomClassConfig:
    path: str | None = key(
        None,
        "Python file with the dataset class; null: rlx's own.",
        needs("a dataset class needs file and name", "name", expected="=<its name>"),
        is_path=True,
    )
    name: str | None = key(
        None,
        "Name of the class in that file.",
        needs("a dataset class needs file and name", "path", expected="=<its file>"),
    )


@dataclass(frozen=True)
class DataConfig:
    """The source of prompts and their lengths."""

    train_files: tuple[str, ...] = key((ARITHMETIC,), "Files of rows; see docs/data.md.", is_path=True)
    val_files: tuple[str, ...] = key((ARITHMETIC,), "The same, for validation.", is_path=True)
    train_max_samples: int = key(-1, "Use at most so many training rows, the first ones; -1: all.", minimum=-1)
    val_max_samples: int = key(-1, "The same of validation rows; -1: all.", minimum=-1)
    prompt_key: str = key("prompt", "Column with the chat messages (list of {role, content}) or plain text.")
    reward_fn_key: str = key("data_source", "Column that tells which reward function scores the row.")
    answer_key: str | None = key(None, "Column with the right answer, for rows without reward_model.")
    max_prompt_length: int = key(512, "Longest prompt [tokens].", minimum=1)
    max_response_length: int = key(512, "Longest response, or whole conversation after its prompt [tokens].", minimum=1)
    train_batch_size: int = key(1024, "Prompts per training step.", minimum=1)
    gen_batch_size: int | None = key(
        None,
        "Prompts per generation with filter_groups; null: train_batch_size.",
        without("algorithm.filter_groups.enable"),
        minimum=1,
    )
    val_batch_size: int | None = key(None, "Prompts per batch; null: all.", in_state("never validates"), minimum=1)
    shuffle: bool = key(True, "Shuffle the prompts of each epoch.")
    seed: int = key(1, "Seed of the shuffling.", without("shuffle"), minimum=0)
    filter_overlong_prompts: bool = key(False, "Drop prompts longer than max_prompt_length and report how many.")
    truncation: str = key(
        "error",
        "A longer prompt that is not dropped: error, or cut this side.",
        Unused("overlong prompts are dropped, not cut", "filter_overlong_prompts"),
        choices=("error", "left", "right", "middle"),
    )
    custom_cls: CustomClassConfig = group(CustomClassConfig, "A dataset class of your own.")
    arithmetic: ArithmeticConfig = group(ArithmeticConfig, "The generated task.", in_state("no arithmetic"))


FORMS = ("tags", "hashes", "boxed")
NOT_CALLED = (in_state("the environment scores"), in_state("the model scores"))  # reward functions


@dataclass(frozen=True)
class RewardPartConfig:
    """A part of the score: a function in `path`, a judge (`model`), or without both rlx's own function for the data source."""

    metric: str | None = key(None, "Its metric; null: `name`, judge or rule.")
    weight: float = key(1.0, "Factor of its score; 0: only a metric.")
    path: str | None = key(None, "Python file with a function.", is_path=True)
    name: str = key("compute_score", "The function's name.", without("path"))
    reward_kwargs: dict[str, Any] = key({}, "Its further arguments, by name.", without("path"))
    model: str | None = key(
        None,
        "Name of a judge's model.",
        needs("a judge has no address", "base_url", expected="=http://HOST:PORT/v1"),
        needs("a judge has no question", "template", expected="=<a text file>"),
        needs("a part is a function or a judge", "path", None),
    )
    base_url: str | None = key(None, "Its address, up to /v1.", without("model"))
    api_key_var: str | None = key(None, "Environment variable with the API key.", without("model"))
    template: str | None = key(None, "Text file with the question.", without("model"), is_path=True)
    scale: float = key(10.0, "Best number that it may answer, from 0.", without("model"), above=0)
    request: dict[str, Any] = key({"temperature": 0}, "Further fields of a request.", without("model"))

    @property
    def label(self) -> str:
        return self.metric or (self.name if self.path else "judge" if self.model else "rule")


@dataclass(frozen=True)
class CustomRewardConfig:
    path: str | None = key(
        None,
        "Python file with a reward function of your own.",
        needs("a function and a list of parts are both set", "parts", (), expected="=[]", example="[]"),
        is_path=True,
    )
    name: str = key(
        "compute_score",
        "Its name: f(data_source, solution_str, ground_truth, extra_info=None), see docs/rewards.md.",
        without("path"),
    )
    reward_kwargs: dict[str, Any] = key({}, "Further arguments of the function, by name.", without("path"))
    parts: tuple[RewardPartConfig, ...] = key((), "Instead of one function: a weighted sum; docs/rewards.md.")
    data_sources: tuple[str, ...] = key(
        (), "Data sources that it scores; empty: all.", in_state("no reward of your own")
    )

    @property
    def is_set(self) -> bool:
        return self.path is not None or bool(self.parts)

    @property
    def asks_rule(self) -> bool:
        """Whether rlx's own function scores a part."""
        return any(part.path is None and part.model is None for part in self.parts)


@dataclass(frozen=True)
class RewardManagerConfig:
    name: str = key(
        "naive",
        "Calls of a function of your own: naive, one for each sample; batch, one for all.",
        in_state("no reward of your own"),
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
    format: str | None = key(
        None, "Form that earns format_weight: tags, hashes, boxed or a regular expression.", *NOT_CALLED
    )
    format_weight: float = key(0.1, "Bonus for a response of that form.", *NOT_CALLED, without("format"), minimum=0)
    num_workers: int | None = key(
        None, "Their processes; null: one per core, at most 16, and fewer beside the sampler.", *NOT_CALLED, minimum=1
    )
    timeout_s: float = key(60.0, "Longest call of a reward function [seconds].", *NOT_CALLED, above=0)
    max_concurrent: int = key(
        64,
        "Calls of an async function at a time, of each process.",
        *NOT_CALLED,
        in_state("no reward of your own"),
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


MEMORY_CHECKS = ("refuse", "warn", "off")
LOGGERS = ("console", "tensorboard", "jsonl", "wandb")


@dataclass(frozen=True)
class TrainerConfig:
    total_epochs: int = key(30, "Passes over the training prompts.", beside("total_training_steps"), minimum=1)
    total_training_steps: int | None = key(None, "Steps; null: from total_epochs.", minimum=1)
    project_name: str = key("rlx", "First part of the run's folder; wandb's project.", is_path=True)
    experiment_name: str = key("run", "Second part of the run's folder.", is_path=True)
    logger: tuple[str, ...] = key(
        ("console", "jsonl"), "Where metrics go.", choices=LOGGERS, package="wandb", package_for=("wandb",)
    )
    verbose: bool = key(False, "Show the memory around each phase on the console, too.")
    nnodes: int = key(1, "Machines.", minimum=1)
    min_nodes: int | None = key(
        None, "Machines that suffice if others stay away for 2 minutes; null: nnodes.", minimum=1, at_most="nnodes"
    )
    n_gpus_per_node: int = key(8, "Processes per machine, each with one GPU; on CPU the number is free.", minimum=1)
    n_rollout_gpus: int = key(
        0,
        "Processes per machine beside n_gpus_per_node, each with one GPU, that only sample; 0: all train and sample.",
        minimum=0,
    )
    device: str = key("auto", "auto: an accelerator if there is one.", choices=("auto", "cpu", "cuda"))
    seed: int = key(1, "Seed of sampling and of fresh weights.", minimum=0, maximum=LARGEST_SEED)
    memory_check: str = key("refuse", "Action if memory will not suffice; off: predict nothing.", choices=MEMORY_CHECKS)
    save_freq: int = key(-1, "Steps between checkpoints; -1: never.", minimum=-1)
    save_every_minutes: float | None = key(None, "Also save this long after the last save.", above=0)
    save_last: bool = key(True, "Save the last step if no other save is due, without the optimizer's state.")
    test_freq: int = key(-1, "Steps between validations; -1: never.", minimum=-1)
    val_before_train: bool = key(True, "Validate before the first step.")
    val_only: bool = key(False, "Validate and stop.")
    critic_warmup: int = key(0, "Steps in which only the critic learns.", in_state("no critic"), minimum=0)
    balance_batch: bool = key(True, "Give each process about the same number of tokens.", in_state("one process"))
    resume_mode: str = key(
        "disable",
        "auto: the experiment's newest intact checkpoint; disable: a new run.",
        needs(
            "there is no checkpoint to resume from",
            "resume_from_path",
            when=lambda mode: mode == "resume_path",
            expected="=.../global_step_N",
        ),
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(
        None,
        "A folder or URL `.../global_step_N`.",
        unless("resume_mode", "resume_path", "resume_mode is not resume_path"),
        is_path=True,
    )
    default_local_dir: str | None = key(
        None,
        "Folder of runs; null: outputs/<project_name>/<experiment_name>; a URL: copies of checkpoints go there.",
        is_path=True,
    )
    max_restarts: int = key(3, "Restarts from the last checkpoint after something died or hung; 0: end.", minimum=0)
    hang_timeout_s: float = key(1800.0, "Seconds without progress after which a call counts as hung.", above=0)
    save_on_sigterm_s: float = key(0.0, "Seconds after SIGTERM for the step to end and to save; 0: none.", minimum=0)
    rollout_data_dir: str | None = key(None, "Dump training generations as JSONL here.", is_path=True)
    transcripts: bool | None = key(None, "Keep each training sample in the run's folder; null: with an environment.")
    validation_data_dir: str | None = key(
        None, "Dump validation generations here; null: in the run's folder.", in_state("never validates"), is_path=True
    )
    log_val_generations: int = key(0, "Validation generations to show.", in_state("never validates"), minimum=0)
    max_actor_ckpt_to_keep: int | None = key(None, "Checkpoints kept; null: all.", in_state("never saves"), minimum=1)
    max_critic_ckpt_to_keep: int | None = key(
        None, "Checkpoints kept; null: all.", in_state("no critic"), in_state("never saves"), minimum=1
    )

    @property
    def samplers_per_node(self) -> int:
        """The processes per machine that sample."""
        return self.n_rollout_gpus or self.n_gpus_per_node

    @property
    def processes_per_node(self) -> int:
        return self.n_gpus_per_node + self.n_rollout_gpus


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised training of `builtin:tiny` before reinforcement learning, which needs some right answers to reinforce."""

    target_accuracy: float = key(0.3, "Stop at this greedy held-out accuracy.", above=0, maximum=1)
    max_steps: int = key(2000, "Stop here in any case.", minimum=1)
    batch_size: int = key(64, "Problems per step.", minimum=1)
    lr: float = key(1e-3, "Learning rate.", above=0)
    eval_every: int = key(50, "Steps between accuracy checks.", minimum=1)
    cache_dir: str | None = key(None, "Folder of finished warm starts; null: ~/.cache/rlx.", is_path=True)


@dataclass(frozen=True)
class RayConfig:
    ray_init: dict[str, Any] = key({}, "Passed to ray.init.")


@dataclass(frozen=True)
class PPOConfig:
    """The whole tree."""

    data: DataConfig = group(DataConfig, "Prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig, "Policy, generation, reference.")
    critic: CriticConfig = group(CriticConfig, "Value model, used by gae.")
    environment: EnvironmentConfig = group(EnvironmentConfig, "Multi-turn conversations.", in_state("no environment"))
    reward: RewardConfig = group(RewardConfig, "Reward functions and the processes they run in.")
    custom_reward_function: CustomRewardConfig = group(CustomRewardConfig, "Your own reward function.", *NOT_CALLED)
    reward_model: RewardModelConfig = group(RewardModelConfig, "A model that scores responses.", without("enable"))
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "Advantages, KL, the sampler's mismatch.")
    trainer: TrainerConfig = group(TrainerConfig, "The loop.")
    warm_start: WarmStartConfig = group(WarmStartConfig, "Making `builtin:tiny`.", in_state("not tiny"))
    ray_kwargs: RayConfig = group(RayConfig, "Ray.")
