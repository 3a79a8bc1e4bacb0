"""Keys of the loop, of the warm start and of Ray: `trainer`, `warm_start`, `ray_kwargs`."""

from dataclasses import dataclass
from typing import Any

from rlx.config.schema.keys import beside, in_state, key, needs, unless
from rlx.config.schema.model import LARGEST_SEED

MEMORY_CHECKS = ("refuse", "warn", "off")
RESUME = ("auto", "disable", "resume_path")
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
        choices=RESUME,
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
