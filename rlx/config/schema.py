"""The typed configuration tree: every key, its type, default, range and meaning.

A leaf: it imports only the standard library, `keys.py` and the groups written in files of their own, so every
package may read it. Reading YAML, applying overrides and cross-field rules live beside it. Keys keep verl's names and
meanings where both have the feature.
"""

from dataclasses import dataclass
from typing import Any

from rlx.config.keys import group, key
from rlx.config.schema_algorithm import ADV_ESTIMATORS as ADV_ESTIMATORS
from rlx.config.schema_algorithm import CRITIC as CRITIC
from rlx.config.schema_algorithm import GREEDY as GREEDY
from rlx.config.schema_algorithm import GROUPS as GROUPS
from rlx.config.schema_algorithm import KL_ESTIMATORS as KL_ESTIMATORS
from rlx.config.schema_algorithm import KL_LOSS_ESTIMATORS as KL_LOSS_ESTIMATORS
from rlx.config.schema_algorithm import LOSS_MODES as LOSS_MODES
from rlx.config.schema_algorithm import AlgorithmConfig as AlgorithmConfig
from rlx.config.schema_algorithm import FilterGroupsConfig as FilterGroupsConfig
from rlx.config.schema_algorithm import KLControlConfig as KLControlConfig
from rlx.config.schema_algorithm import OverlongBufferConfig as OverlongBufferConfig
from rlx.config.schema_algorithm import PolicyLossConfig as PolicyLossConfig
from rlx.config.schema_algorithm import RolloutCorrectionConfig as RolloutCorrectionConfig
from rlx.config.schema_data import ARITHMETIC as ARITHMETIC
from rlx.config.schema_data import ArithmeticConfig as ArithmeticConfig
from rlx.config.schema_data import CustomClassConfig as CustomClassConfig
from rlx.config.schema_data import DataConfig as DataConfig
from rlx.config.schema_reward import FORMS as FORMS
from rlx.config.schema_reward import CustomRewardConfig as CustomRewardConfig
from rlx.config.schema_reward import RewardConfig as RewardConfig
from rlx.config.schema_reward import RewardManagerConfig as RewardManagerConfig
from rlx.config.schema_rollout import EngineKwargsConfig as EngineKwargsConfig
from rlx.config.schema_rollout import RolloutConfig as RolloutConfig
from rlx.config.schema_rollout import ValKwargsConfig as ValKwargsConfig

# --------------------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class ActivationOffloadConfig:
    """Options of the activation engine (`rlx.offload.OffloadOptions`), read when `enable_activation_offload` is set."""

    save: str | None = key(
        None,
        "What leaves the device: `boundary` (layer inputs; the rest is recomputed), `attention` (also the results of "
        "attention and its projections), `auto` (planned from measurements), `all` (every saved tensor); null: boundary with "
        "gradient checkpointing, else all.",
        choices=(None, "boundary", "attention", "all", "auto"),
    )
    tier: str = key("cpu", "Where it goes: host memory or disk.", choices=("cpu", "disk"))
    directory: str | None = key(None, "Folder of the disk tier, or with tier cpu for what exceeds `max_host_bytes`.")
    prefetch_layers: int | None = key(None, "Layers fetched ahead in backward; null: as fits; 0: none.", minimum=0)
    max_inflight_bytes: int | None = key(None, "Bytes on the way before forward waits; null: as fits.", minimum=0)
    min_bytes: int = key(1 << 20, "Smaller tensors stay on the device [bytes].", minimum=0)
    pin_memory: bool = key(True, "Page-locked host memory, for copies that overlap compute.")
    use_streams: bool = key(True, "Copy on streams of their own.")
    max_host_bytes: int | None = key(None, "Limit of host memory per process [bytes]; null: none.", minimum=0)
    max_device_bytes: int | str = key(
        "auto",
        "What `save=auto` may hold on the device for backward [bytes]; auto: what weights, states and a margin leave.",
        minimum=0,
        words=("auto",),
    )
    cache_directory: str | None = key(
        "auto",
        "Folder in which `save=auto` keeps measurements for later runs; auto: rlx/measurements in $XDG_CACHE_HOME or ~/.cache; "
        "null: nothing is kept.",
    )


TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model"),
)
"""A folder with any of these has a tokenizer."""

LARGEST_SEED = 2**32 - 1
"""What numpy's generator takes, which vLLM seeds; torch takes more."""


@dataclass(frozen=True)
class TinyModelConfig:
    """The transformer that `builtin:tiny` stands for: Qwen3 architecture over bytes."""

    hidden_size: int = key(128, "Width.", minimum=8)
    intermediate_size: int = key(384, "Width of the MLP.", minimum=8)
    num_hidden_layers: int = key(4, "Layers.", minimum=1)
    num_attention_heads: int = key(4, "Attention heads; each at least 32 wide, as vLLM asks.", minimum=1)
    num_key_value_heads: int = key(2, "Key/value heads.", minimum=1)
    seed: int = key(0, "Seed of the first weights.", minimum=0, maximum=LARGEST_SEED)

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return max(32, self.hidden_size // self.num_attention_heads)


@dataclass(frozen=True)
class ModelConfig:
    path: str | None = key(None, "Hugging Face folder, hub name, or `builtin:tiny`; null, critic only: the actor's.")
    trust_remote_code: bool = key(False, "Let the model folder bring its own code.")
    override_config: dict[str, Any] = key({}, "Values that replace those of the model's config.json.")
    attn_implementation: str = key("sdpa", "Attention kernel, as transformers names it.")
    use_liger: bool = key(False, "Fused norms, gated MLPs and rotary embeddings of liger-kernel, on GPUs.")
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in backward instead of keeping them.")
    enable_activation_offload: bool = key(False, "Move activations off the device until backward needs them.")
    activation_offload: ActivationOffloadConfig = group(ActivationOffloadConfig, "How, when the flag above is set.")
    use_remove_padding: bool = key(
        True, "Pack a micro-batch's sequences into one row without padding; else rows are padded to the longest."
    )
    tiled_mlp: int | str = key(
        0,
        "MLPs and norms computed so many tokens at a time, recomputed in backward; auto: chosen by length and width, with "
        "about 2^28 elements in the widest result of a tile; 0: off.",
        minimum=0,
        words=("auto",),
    )
    lora_rank: int = key(0, "Rank of LoRA adapters; 0 trains every weight.", minimum=0)
    lora_alpha: int = key(16, "Scale of the adapters: alpha / rank.", minimum=1)
    target_modules: str = key("all-linear", "Modules that get adapters: `all-linear` or names joined by commas.")
    tiny: TinyModelConfig = group(TinyModelConfig, "Shape of `builtin:tiny`.")


# ------------------------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = key(1e-6, "Peak learning rate.", minimum=0)
    lr_warmup_steps: int = key(-1, "Optimizer steps of linear warm-up; -1: from lr_warmup_steps_ratio.", minimum=-1)
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up as a share of all optimizer steps.", minimum=0, maximum=1)
    lr_scheduler_type: str = key("constant", "After warm-up.", choices=("constant", "cosine", "linear"))
    min_lr_ratio: float = key(0.0, "Where cosine and linear end, as a share of lr.", minimum=0, maximum=1)
    weight_decay: float = key(0.01, "Decoupled weight decay.", minimum=0)
    betas: tuple[float, ...] = key((0.9, 0.999), "AdamW's decay rates.")
    eps: float = key(1e-8, "AdamW's epsilon.", exclusive_minimum=0)


DTYPES = ("bf16", "fp32", "fp64")  # no fp16: nothing scales the loss


@dataclass(frozen=True)
class MixedPrecisionConfig:
    param_dtype: str = key(
        "auto",
        "Type of forward and backward; auto: bf16 on accelerators, model_dtype on CPU.",
        choices=("auto", *DTYPES),
    )
    reduce_dtype: str = key("fp32", "Type in which gradients are summed.", choices=DTYPES)


@dataclass(frozen=True)
class FSDPConfig:
    param_offload: bool = key(False, "Parameters wait in host memory while another role works.")
    optimizer_offload: bool = key(
        False, "Optimizer state waits in host memory; it comes to the device piece by piece, for the step alone."
    )
    offload_policy: bool = key(False, "FSDP's own CPU offload: parameters and the optimizer step live on the host.")
    reshard_after_forward: bool = key(True, "Free the gathered parameters after forward.")
    fsdp_size: int = key(-1, "Processes of one sharding group; -1: all; fewer replicate the groups (HSDP).", minimum=-1)
    forward_prefetch: bool = key(False, "Gather the next layer's parameters during the current one's forward.")
    model_dtype: str = key("fp32", "Type of stored parameters and optimizer state.", choices=DTYPES)
    mixed_precision: MixedPrecisionConfig = group(MixedPrecisionConfig, "Types while computing.")


CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass(frozen=True)
class CheckpointConfig:
    save_contents: tuple[str, ...] = key(
        ("model", "optimizer", "extra"),
        "Parts of a checkpoint; extra is the scheduler, hf_model a folder for from_pretrained.",
        choices=CHECKPOINT_CONTENTS,
    )


AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class ActorConfig:
    strategy: str = key("fsdp2", "Sharding: FSDP2 or FSDP1.", choices=("fsdp", "fsdp2"))
    ppo_mini_batch_size: int = key(256, "Prompts per optimizer step; divides data.train_batch_size.", minimum=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward and process; set this or use_dynamic_bsz.", minimum=1
    )
    use_dynamic_bsz: bool = key(False, "Cut micro-batches by tokens instead of samples.")
    ppo_max_token_len_per_gpu: int = key(16384, "Tokens per forward and process with use_dynamic_bsz.", minimum=1)
    ulysses_sequence_parallel_size: int = key(
        1, "Neighbouring processes that share each sequence; divides processes and attention heads.", minimum=1
    )
    ppo_epochs: int = key(1, "Passes over each batch.", minimum=1)
    shuffle: bool = key(False, "Shuffle the prompts of a batch before cutting mini-batches.")
    clip_ratio: float = key(0.2, "PPO's clip range.", minimum=0)
    clip_ratio_low: float | None = key(None, "Clip range below 1; null: clip_ratio.", minimum=0)
    clip_ratio_high: float | None = key(None, "Clip range above 1; null: clip_ratio.", minimum=0)
    clip_ratio_c: float = key(3.0, "Dual clip's bound for negative advantages.", exclusive_minimum=1)
    tau_pos: float = key(1.0, "SAPO's temperature of tokens with a positive advantage.", exclusive_minimum=0)
    tau_neg: float = key(1.05, "SAPO's temperature of the others.", exclusive_minimum=0)
    policy_loss: PolicyLossConfig = group(PolicyLossConfig, "Choice of policy loss.")
    loss_agg_mode: str = key("token-mean", "How the token losses of a mini-batch become one.", choices=AGGREGATIONS)
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.")
    use_kl_loss: bool = key(False, "Add the KL to the reference to the loss.")
    kl_loss_coef: float = key(0.001, "Its weight.", minimum=0)
    kl_loss_type: str = key("low_var_kl", "Its estimator.", choices=KL_LOSS_ESTIMATORS)
    grad_clip: float = key(1.0, "Largest gradient norm.", exclusive_minimum=0)
    use_torch_compile: bool = key(False, "Compile each layer; cannot be combined with activation offloading.")
    optim: OptimConfig = group(OptimConfig, "Optimizer.")
    fsdp_config: FSDPConfig = group(FSDPConfig, "Sharding and precision.")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "Contents of checkpoints.")


@dataclass(frozen=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = key(None, "Samples per forward; null: the actor's.", minimum=1)
    log_prob_use_dynamic_bsz: bool = key(False, "Cut by tokens instead.")
    log_prob_max_token_len_per_gpu: int = key(16384, "Tokens per forward with log_prob_use_dynamic_bsz.", minimum=1)
    ulysses_sequence_parallel_size: int | None = key(
        None, "Processes that share each sequence; null: the actor's.", minimum=1
    )
    fsdp_config: FSDPConfig = group(FSDPConfig, "Sharding and precision.")


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    model: ModelConfig = group(ModelConfig, "The policy; the reference starts as its copy.")
    actor: ActorConfig = group(ActorConfig, "Policy update.")
    rollout: RolloutConfig = group(RolloutConfig, "Generation.")
    ref: RefConfig = group(RefConfig, "Reference policy.")


@dataclass(frozen=True)
class CriticConfig:
    """The value model of GAE."""

    strategy: str | None = key(None, "Sharding; null: the actor's.", choices=(None, "fsdp", "fsdp2"))
    model: ModelConfig = group(ModelConfig, "The value model's backbone; without a path it is loaded as the actor's.")
    ppo_mini_batch_size: int | None = key(None, "Prompts per optimizer step; null: the actor's.", minimum=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward and process; null without use_dynamic_bsz: the actor's.", minimum=1
    )
    use_dynamic_bsz: bool = key(False, "Cut micro-batches by tokens instead.")
    ppo_max_token_len_per_gpu: int = key(32768, "Tokens per forward and process with use_dynamic_bsz.", minimum=1)
    ulysses_sequence_parallel_size: int | None = key(
        None, "Processes that share each sequence; null: the actor's.", minimum=1
    )
    ppo_epochs: int | None = key(None, "Passes over each batch; null: the actor's.", minimum=1)
    shuffle: bool | None = key(None, "Shuffle before cutting mini-batches; null: the actor's.")
    cliprange_value: float = key(0.5, "Clip range of the value update.", exclusive_minimum=0)
    loss_agg_mode: str | None = key(
        None, "How token losses become one number; null: the actor's.", choices=(None, *AGGREGATIONS)
    )
    grad_clip: float = key(1.0, "Largest gradient norm.", exclusive_minimum=0)
    optim: OptimConfig = group(OptimConfig, "Optimizer.", lr=1e-5)
    fsdp: FSDPConfig = group(FSDPConfig, "Sharding and precision.")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "Contents of checkpoints.")


# ---------------------------------------------------------------------------------------------------- reward model


@dataclass(frozen=True)
class RewardModelSourceConfig:
    path: str | None = key(None, "Folder or hub name of a model for sequence classification with one label.")
    trust_remote_code: bool = key(False, "Let the model folder bring its own code.")
    override_config: dict[str, Any] = key({}, "Values that replace those of the model's config.json.")
    attn_implementation: str = key("sdpa", "Attention kernel, as transformers names it.")
    fsdp_config: FSDPConfig = group(FSDPConfig, "Sharding and precision.")


@dataclass(frozen=True)
class RewardModelConfig:
    """A model that scores whole conversations, in the place of reward functions or beside them."""

    enable: bool = key(False, "Score responses with a reward model.")
    rule_weight: float = key(
        0.0, "What the reward functions' score is multiplied by and added with; 0: they are not asked.", minimum=0
    )
    strategy: str | None = key(None, "Sharding; null: the actor's.", choices=(None, "fsdp", "fsdp2"))
    model: RewardModelSourceConfig = group(RewardModelSourceConfig, "The model.")
    micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward and process; null without use_dynamic_bsz: the actor's.", minimum=1
    )
    use_dynamic_bsz: bool = key(False, "Cut by tokens instead.")
    forward_max_token_len_per_gpu: int = key(32768, "Tokens per forward and process with use_dynamic_bsz.", minimum=1)


# --------------------------------------------------------------------------------------------------------- trainer


MEMORY_CHECKS = ("refuse", "warn", "off")
RESUME = ("auto", "disable", "resume_path")
LOGGERS = ("console", "tensorboard", "jsonl", "wandb")


@dataclass(frozen=True)
class TrainerConfig:
    total_epochs: int = key(30, "Passes over the training prompts.", minimum=1)
    total_training_steps: int | None = key(None, "Steps; null: from total_epochs.", minimum=1)
    project_name: str = key("rlx", "First part of the run's folder; wandb's project.")
    experiment_name: str = key("run", "Second part of the run's folder.")
    logger: tuple[str, ...] = key(("console", "jsonl"), "Where metrics go.", choices=LOGGERS)
    nnodes: int = key(1, "Machines.", minimum=1)
    n_gpus_per_node: int = key(8, "Processes per machine, each with one GPU; on CPU the number is free.", minimum=1)
    device: str = key("auto", "auto: an accelerator if there is one.", choices=("auto", "cpu", "cuda"))
    seed: int = key(1, "Seed of sampling and of fresh weights.", minimum=0, maximum=LARGEST_SEED)
    memory_check: str = key("refuse", "If memory will not suffice; off: predict nothing.", choices=MEMORY_CHECKS)
    save_freq: int = key(-1, "Checkpoint every so many steps; -1: never.", minimum=-1)
    test_freq: int = key(-1, "Validate every so many steps; -1: never.", minimum=-1)
    val_before_train: bool = key(True, "Validate before the first step.")
    val_only: bool = key(False, "Validate and stop.")
    critic_warmup: int = key(0, "Steps in which only the critic learns.", minimum=0)
    balance_batch: bool = key(True, "Give each process about the same number of tokens.")
    resume_mode: str = key(
        "disable",
        "disable: start anew; auto: newest checkpoint of the experiment; resume_path: one named.",
        choices=RESUME,
    )
    resume_from_path: str | None = key(None, "Checkpoint folder (`.../global_step_N`) for resume_path.")
    default_local_dir: str | None = key(None, "Folder of run folders; null: outputs/<project_name>/<experiment_name>.")
    rollout_data_dir: str | None = key(None, "Dump training generations as JSONL here.")
    validation_data_dir: str | None = key(None, "Dump validation generations as JSONL here; null: in the run's folder.")
    log_val_generations: int = key(0, "Validation generations shown at the console and sent to trackers.", minimum=0)
    max_actor_ckpt_to_keep: int | None = key(None, "Keep so many checkpoints of the actor; null: all.", minimum=1)
    max_critic_ckpt_to_keep: int | None = key(None, "Keep so many checkpoints of the critic; null: all.", minimum=1)


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised start of `builtin:tiny`, so that reinforcement learning has something to reinforce."""

    target_accuracy: float = key(0.3, "Stop at this greedy held-out accuracy.", exclusive_minimum=0, maximum=1)
    max_steps: int = key(2000, "Stop here in any case.", minimum=1)
    batch_size: int = key(64, "Problems per step.", minimum=1)
    lr: float = key(1e-3, "Learning rate.", exclusive_minimum=0)
    eval_every: int = key(50, "Steps between accuracy checks.", minimum=1)
    cache_dir: str | None = key(None, "Folder of finished warm starts; null: ~/.cache/rlx.")


@dataclass(frozen=True)
class RayConfig:
    ray_init: dict[str, Any] = key({}, "Passed to ray.init.")


@dataclass(frozen=True)
class PPOConfig:
    """The whole tree."""

    data: DataConfig = group(DataConfig, "Prompts.")
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig, "Policy, generation, reference.")
    critic: CriticConfig = group(CriticConfig, "Value model, used by gae.")
    reward: RewardConfig = group(RewardConfig, "Reward functions and the processes they run in.")
    custom_reward_function: CustomRewardConfig = group(CustomRewardConfig, "A reward function of your own.")
    reward_model: RewardModelConfig = group(RewardModelConfig, "A model that scores responses.")
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "Advantages, KL, the sampler's mismatch.")
    trainer: TrainerConfig = group(TrainerConfig, "The loop.")
    warm_start: WarmStartConfig = group(WarmStartConfig, "Making `builtin:tiny`.")
    ray_kwargs: RayConfig = group(RayConfig, "Ray.")
