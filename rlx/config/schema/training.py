"""Keys of the actor, the reference and the critic: optimizer, sharding, micro-batches, losses."""

import math
from dataclasses import dataclass
from typing import Any

from rlx.config.schema.algorithm import KL_LOSS_ESTIMATORS, PolicyLossConfig
from rlx.config.schema.keys import Need, beside, group, in_state, is_above, key, needs, never, unless, while_is, without
from rlx.config.schema.model import ModelConfig, packed
from rlx.config.schema.rollout import WATCHES_ROUTERS, RolloutConfig


def _torchao(other: str, *values: Any, of: tuple[str, ...] = ("_AdamW", "AdamW8bit"), **more: Any) -> Need:
    return needs("torchao's optimizers cannot be used here", other, *values, when=lambda name: name in of, **more)


# They step bf16 weights on the device; 8-bit moments fit neither FSDP2's DTensors nor a checkpoint.
TORCHAO_NEEDS = (
    _torchao("role.fsdp.model_dtype", "bf16"),
    _torchao("role.strategy", "fsdp2", of=("_AdamW",)),
    _torchao("role.strategy", "fsdp", of=("AdamW8bit",)),
    _torchao("role.model.lora_rank", 0),
    _torchao("role.fsdp.offload_policy", False),
    _torchao("role.fsdp.optimizer_offload", False),
    _torchao("role.fsdp.optimizer_state", "device", None),
    _torchao(
        "role.checkpoint.save_contents", expected=" without the optimizer", example="[model,extra]", of=("AdamW8bit",)
    )._replace(met=lambda saved: "optimizer" not in saved),
)


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning-rate schedule."""

    optimizer: str = key(
        "AdamW",
        "AdamW is torch's; _AdamW and AdamW8bit are torchao's, with stochastic rounding of bf16 weights.",
        *TORCHAO_NEEDS,
        choices=("AdamW", "_AdamW", "AdamW8bit"),
        package="torchao>=0.18",
    )
    lr: float = key(1e-6, "Peak learning rate.", minimum=0)
    lr_warmup_steps: int = key(-1, "Optimizer steps of linear warm-up; -1: from lr_warmup_steps_ratio.", minimum=-1)
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up, share of steps.", beside("lr_warmup_steps"), minimum=0, maximum=1)
    lr_scheduler_type: str = key("constant", "After warm-up.", choices=("constant", "cosine", "linear"))
    min_lr_ratio: float = key(
        0.0, "Last rate, as a share of lr.", while_is("lr_scheduler_type", "constant"), minimum=0, maximum=1
    )
    weight_decay: float = key(0.01, "Decoupled weight decay.", minimum=0)
    betas: tuple[float, ...] = key((0.9, 0.999), "AdamW's decay rates.", length=2, minimum=0, under=1)
    eps: float = key(1e-8, "AdamW's epsilon.", above=0)
    master_weights: bool = key(
        True,
        "With model_dtype=bf16: keep fp32 weights and moments beside.",
        unless("optimizer", "AdamW", "torchao's AdamW has no masters"),
    )
    allow_lossy_updates: bool = key(False, "Train bf16 weights although rounding hides most updates.")


TWO_WAYS = "parameters cannot be offloaded in two ways at once"
DTYPES = ("bf16", "fp32", "fp64")  # no fp16: nothing scales the loss


@dataclass(frozen=True)
class MixedPrecisionConfig:
    param_dtype: str = key("auto", "Type of computation; auto: bf16, on CPU model_dtype.", choices=("auto", *DTYPES))
    reduce_dtype: str = key("fp32", "Type of the sum of gradients.", choices=DTYPES)


@dataclass(frozen=True)
class FSDPConfig:
    param_offload: bool = key(False, "Keep parameters in host memory while another role works.", in_state("on a CPU"))
    optimizer_offload: bool = key(
        False,
        "The same as optimizer_state=host.",
        in_state("on a CPU"),
        needs("the optimizer's state has two places", "optimizer_state", "host", None),
    )
    optimizer_state: int | str | None = key(
        None,
        "device, host, or bytes per process that stay on the device; auto: what the forecast leaves there.",
        in_state("on a CPU"),
        minimum=0,
        words=("auto", "device", "host"),
    )
    offload_policy: bool = key(
        False,
        "FSDP's own CPU offload of parameters and optimizer.",
        in_state("on a CPU"),
        needs(TWO_WAYS, "param_offload", False),
        needs(TWO_WAYS, "optimizer_offload", False),
        needs(TWO_WAYS, "optimizer_state", None),
        needs("FSDP1 loses gradients with its CPU offload", "role.strategy", "fsdp2"),
    )
    reshard_after_forward: bool | str = key(
        "auto",
        "Free gathered parameters after forward, else after backward or, with never, after the update, whose gradients then are whole, too; "
        "auto: never for small models on several processes, and False for one process that has all parameters and offloads nothing.",
        needs(
            "FSDP1 frees gathered parameters after each backward",
            "role.strategy",
            "fsdp2",
            when=lambda value: value == "never",
        ),
        words=("auto", "never"),
    )
    fsdp_size: int = key(-1, "Processes of a sharding group (HSDP); -1: all.", minimum=-1, divides="processes")
    forward_prefetch: bool = key(
        False,
        "Gather the next layer's parameters ahead.",
        in_state("one process"),
        while_is("reshard_after_forward", "never")._replace(
            why="reshard_after_forward=never gathers all layers at once"
        ),
    )
    model_dtype: str = key("fp32", "Type of parameters and, without masters, of optimizer states.", choices=DTYPES)
    mixed_precision: MixedPrecisionConfig = group(MixedPrecisionConfig, "Types while computing.")

    def reshards(self, processes: int) -> bool:
        """Return whether parameters are freed layer by layer, so that few are gathered at a time."""
        if self.reshard_after_forward != "auto":
            return self.reshard_after_forward is True
        return processes > 1 or self.offload_policy or self.param_offload or self.device_state_bytes < math.inf

    @property
    def device_state_bytes(self) -> float:
        """Bytes of the optimizer's state that stay on the device, infinite if all do; none with `auto`, unless it was decided."""
        if self.optimizer_state is None:
            return 0.0 if self.optimizer_offload else math.inf
        if isinstance(self.optimizer_state, str):
            return math.inf if self.optimizer_state == "device" else 0.0
        return self.optimizer_state


CHECKPOINT_CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass(frozen=True)
class CheckpointConfig:
    save_contents: tuple[str, ...] = key(
        ("model", "optimizer", "extra"),
        "Parts of a checkpoint; extra: the scheduler; hf_model: for from_pretrained.",
        needs(
            "checkpoints would have no weights",
            "save_contents",
            expected=" with model or hf_model",
            when=lambda _: True,
            example="[model,optimizer,extra]",
        )._replace(met=lambda saved: not {"model", "hf_model"}.isdisjoint(saved)),
        choices=CHECKPOINT_CONTENTS,
    )
    async_save: bool = key(False, "Copy to host memory and write to disk during training.")


AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


SHARES_SEQUENCES = packed("sequences that processes share", when=is_above(1))
SHARING = "Processes that share each sequence; null: the actor's."


@dataclass(frozen=True)
class RouterReplayConfig:
    mode: str = key(
        "disabled",
        "R3: log-probs and updates use the sampler's experts.",
        needs(
            "the sampler does not return the experts to replay",
            "actor_rollout_ref.rollout.enable_rollout_routing_replay",
            True,
            when=lambda mode: mode == "R3",
        ),
        choices=("disabled", "R3"),
    )


@dataclass(frozen=True)
class ActorConfig:
    strategy: str = key("fsdp2", "Sharding: FSDP2 or FSDP1.", choices=("fsdp", "fsdp2"))
    ppo_mini_batch_size: int = key(256, "Prompts per optimizer step.", minimum=1, divides="data.train_batch_size")
    ppo_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per forward.",
        while_is("use_dynamic_bsz", True),
        needs("micro-batches have no size", "use_dynamic_bsz", True, when=lambda rows: rows is None),
        minimum=1,
    )
    use_dynamic_bsz: bool = key(False, "Cut micro-batches by tokens instead of samples.")
    ppo_max_token_len_per_gpu: int = key(16384, "Tokens per forward.", without("use_dynamic_bsz"), minimum=1)
    ulysses_sequence_parallel_size: int = key(
        1, "Neighbouring processes that share each sequence.", *SHARES_SEQUENCES, minimum=1, divides="processes"
    )
    ppo_epochs: int = key(1, "Passes over each batch.", minimum=1)
    shuffle: bool = key(False, "Shuffle the prompts of a batch before cutting mini-batches.")
    clip_ratio: float = key(0.2, "PPO's clip range.", in_state("both clips"), in_state("sapo"), minimum=0)
    clip_ratio_low: float | None = key(None, "Clip range below 1; null: clip_ratio.", in_state("sapo"), minimum=0)
    clip_ratio_high: float | None = key(None, "Clip range above 1; null: clip_ratio.", in_state("sapo"), minimum=0)
    clip_ratio_c: float = key(3.0, "Dual clip's bound.", in_state("not vanilla"), above=1)
    tau_pos: float = key(1.0, "SAPO's temperature of positive advantages.", in_state("not sapo"), above=0)
    tau_neg: float = key(1.05, "SAPO's temperature of the others.", in_state("not sapo"), above=0)
    policy_loss: PolicyLossConfig = group(PolicyLossConfig, "Choice of policy loss.")
    loss_agg_mode: str = key("token-mean", "How token losses are averaged.", choices=AGGREGATIONS)
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.")
    use_kl_loss: bool = key(False, "Add the KL to the reference to the loss.")
    kl_loss_coef: float = key(0.001, "Its weight.", without("use_kl_loss"), minimum=0)
    kl_loss_type: str = key("low_var_kl", "Its estimator.", without("use_kl_loss"), choices=KL_LOSS_ESTIMATORS)
    router_aux_loss_coef: float = key(0.0, "Weight of the load-balancing loss of experts.", *WATCHES_ROUTERS, minimum=0)
    router_replay: RouterReplayConfig = group(RouterReplayConfig, "Choice of experts in training.")
    grad_clip: float = key(1.0, "Largest gradient norm.", above=0)
    use_torch_compile: bool = key(
        False,
        "Compile each layer.",
        *(
            needs(f"{what} cannot be combined with compiled layers", f"actor_rollout_ref.model.{other}", off)
            for other, off, what in (
                ("enable_activation_offload", False, "activation offloading"),
                ("tiled_mlp", 0, "tiles"),
                ("layer_offload", False, "layer offloading"),
                ("quantization", None, "a quantised base"),
            )
        ),
    )
    optim: OptimConfig = group(OptimConfig, "Optimizer.")
    fsdp_config: FSDPConfig = group(FSDPConfig, "Sharding and precision.")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "Contents of checkpoints.", in_state("never saves"))


@dataclass(frozen=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward; null: the actor's.", while_is("log_prob_use_dynamic_bsz", True), minimum=1
    )
    log_prob_use_dynamic_bsz: bool = key(False, "Cut by tokens instead.")
    log_prob_max_token_len_per_gpu: int = key(
        16384, "Tokens per forward.", without("log_prob_use_dynamic_bsz"), minimum=1
    )
    ulysses_sequence_parallel_size: int | None = key(None, SHARING, *SHARES_SEQUENCES, minimum=1, divides="processes")
    fsdp_config: FSDPConfig = group(FSDPConfig, "Sharding and precision.")


@dataclass(frozen=True)
class ActorRolloutRefConfig:
    model: ModelConfig = group(ModelConfig, "The policy; the reference starts as its copy.")
    actor: ActorConfig = group(ActorConfig, "Policy update.")
    rollout: RolloutConfig = group(RolloutConfig, "Generation.")
    ref: RefConfig = group(
        RefConfig,
        "Reference policy.",
        in_state("no reference"),
        below={
            "fsdp_config": (in_state("reference is the actor"),),
            "ulysses_sequence_parallel_size": (in_state("reference is the actor"),),
            "fsdp_config.optimizer_offload": (never("the reference has no optimizer"),),
            "fsdp_config.optimizer_state": (never("the reference has no optimizer"),),
        },
    )


@dataclass(frozen=True)
class CriticConfig:
    """The value model of GAE."""

    strategy: str | None = key(None, "Sharding; null: the actor's.", choices=(None, "fsdp", "fsdp2"))
    model: ModelConfig = group(
        ModelConfig,
        "The value model; without a path it is loaded as the actor's.",
        below={
            "tiny": (never("the critic has the policy's shape, actor_rollout_ref.model.tiny"),),
            "lora.merge": (never("the critic has no sampler"),),
        },
    )
    ppo_mini_batch_size: int | None = key(
        None, "Prompts per optimizer step; null: the actor's.", minimum=1, divides="data.train_batch_size"
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward; null: the actor's.", while_is("use_dynamic_bsz", True), minimum=1
    )
    use_dynamic_bsz: bool = key(False, "Cut micro-batches by tokens instead.")
    ppo_max_token_len_per_gpu: int = key(32768, "Tokens per forward.", without("use_dynamic_bsz"), minimum=1)
    ulysses_sequence_parallel_size: int | None = key(None, SHARING, *SHARES_SEQUENCES, minimum=1, divides="processes")
    ppo_epochs: int | None = key(None, "Passes over each batch; null: the actor's.", minimum=1)
    shuffle: bool | None = key(None, "Shuffle before cutting mini-batches; null: the actor's.")
    cliprange_value: float = key(0.5, "Clip range of the value update.", above=0)
    loss_agg_mode: str | None = key(None, "Average of token losses; null: the actor's.", choices=(None, *AGGREGATIONS))
    grad_clip: float = key(1.0, "Largest gradient norm.", above=0)
    optim: OptimConfig = group(OptimConfig, "Optimizer.", lr=1e-5)
    fsdp: FSDPConfig = group(FSDPConfig, "Sharding and precision.")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "Contents of checkpoints.", in_state("never saves"))
