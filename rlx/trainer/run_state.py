"""A run in the driver: its parts, and what a checkpoint keeps of its position."""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlx.algorithms.kl import KLController
from rlx.cluster.group import WorkerGroup
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import trained_roles
from rlx.data.prompts import PromptDataset, PromptSampler
from rlx.rewards.manager import RewardManager
from rlx.trainer import checkpoints
from rlx.trainer.checkpoints import SUPERSEDED, DriverState, read_driver_state, require_step
from rlx.trainer.progress import Progress
from rlx.trainer.prompt_queue import Draw, as_data, environment_digest, from_data
from rlx.trainer.saver import Saver
from rlx.trainer.timeline import Timeline
from rlx.trainer.tracking import Tracker, TrackingError

Metrics = dict[str, float]


@dataclass
class Run:
    """The parts of a run, and its position; a resumed run keeps its own seed."""

    config: PPOConfig  # with total_training_steps and the critic's nulls set, and folders or hub names as model paths
    workers: WorkerGroup  # hosts the roles that `roles_of(config)` names
    tokenizer: PreTrainedTokenizerBase  # of the actor's model
    train: PromptDataset
    sampler: PromptSampler  # chooses the next prompts of `train`
    val: PromptDataset | None  # for validations
    rewards: RewardManager
    folder: Path  # for validations, transcripts and checkpoints
    progress: Progress
    tracker: Tracker
    finished_steps: int = 0
    policy_version: int = 0  # updates that the sampler has received
    skipped_steps: int = 0  # optimizer steps without a finite gradient
    first_validation: Metrics = field(default_factory=dict)
    queue: list[Draw] = field(default_factory=list)  # prompts drawn before their step, the oldest first
    has_stale_tokens: bool = False  # whether some that are trained on may be of older weights
    sampler_lost: bool = False  # whether a sampler in processes of its own has begun anew and has no weights

    def __post_init__(self) -> None:
        control = self.config.algorithm.kl_ctrl
        target = control.target_kl if control.type == "adaptive" else None
        self.kl_controller = KLController(control.kl_coef, target, control.horizon)
        self.seed = self.config.trainer.seed
        self.last_step = self.config.trainer.total_training_steps or 0
        self.has_stale_tokens = self.config.actor_rollout_ref.rollout.partial.max_staleness > 0
        self.timeline = Timeline(self.folder)
        self.environment = environment_digest(self.config)

    def load(self, checkpoint: Path, saver: Saver, falls_back: bool = False) -> None:
        """Continue from a checkpoint that `Saver` wrote; a run that does so equals one that never stopped.

        The workers check its tensors before they read them. With `falls_back` take an older one of the run instead of a damaged
        one, and start from scratch if all are damaged. Raises ResumeError: it is damaged.
        """
        trainer, notice = self.config.trainer, self.progress.notice
        whole, passed_over = saver.undamaged(checkpoint, falls_back)
        for line in passed_over:
            notice(line)
        step = require_step(whole) if whole else 0
        state = read_driver_state(whole) if whole else None
        for role in trained_roles(self.config) if whole else ():
            self.workers.call(role.name, "load", str(whole / role.name), not trainer.val_only)
        if not trainer.val_only:  # only now, so that a run that cannot start leaves them
            if later := checkpoints.set_aside_later(checkpoint.parent, step, trainer.default_local_dir):
                notice(f"checkpoints of later steps are now in {checkpoint.parent / SUPERSEDED}: {', '.join(later)}")
            self.tracker.rewind(step if whole else -1)
            try:
                self.timeline.rewind(step)
            except TrackingError as fault:
                notice(f"{fault}. It begins anew")
        if state is None:
            notice("all checkpoints of this run are damaged: it starts from scratch")
            return
        if not trainer.val_only:  # it trains on nothing, and may have other rows
            self.sampler.load_state_dict(state.sampler)
            self.has_stale_tokens |= bool(state.queue)
            begun = self.config, self.train, state.seed, self.environment
            self.queue = [from_data(each, *begun) for each in state.queue]
            if any(each.get("environment", self.environment) != self.environment for each in state.queue):
                notice("the environment has changed: samples of later steps that had begun begin again")
        self.kl_controller.load_state_dict(state.kl_controller)
        self.finished_steps, self.seed = state.step, state.seed
        self.policy_version, self.skipped_steps = state.policy_version, state.skipped_steps
        self.first_validation = state.first_validation
        if state.seed != trainer.seed:
            notice(f"trainer.seed={trainer.seed} has no effect: the resumed run keeps its seed {state.seed}")
        if self.finished_steps >= self.last_step and not trainer.val_only:
            notice(checkpoints.nothing_to_train(self.finished_steps, self.last_step, trainer))

    def send_weights(self, updates: int) -> None:
        """Send the actor's weights to the sampler, `updates` after those that it has."""
        version, workers, self.sampler_lost = self.policy_version + updates, self.workers, True
        while self.sampler_lost:  # again if a sampler in processes of its own failed meanwhile
            sends = workers.begin("actor", "send") if self.config.trainer.n_rollout_gpus else None
            self.sampler_lost = False in workers.results(workers.begin("rollout", "sync", version), beside=sends)
        self.policy_version = version

    def of_driver(self) -> DriverState:
        """Return what a checkpoint keeps."""
        return DriverState(
            step=self.finished_steps,
            seed=self.seed,
            policy_version=self.policy_version,
            sampler=self.sampler.state_dict(),
            kl_controller=self.kl_controller.state_dict(),
            skipped_steps=self.skipped_steps,
            first_validation=self.first_validation,
            queue=[as_data(draw, self.environment) for draw in self.queue],
        )
