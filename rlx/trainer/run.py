"""One run from a checked configuration to its report: what `rlx.main_ppo` calls."""

from dataclasses import replace
from pathlib import Path

from rlx.cluster.group import WorkerGroup
from rlx.cluster.mesh import Mesh
from rlx.cluster.placement import Placement
from rlx.cluster.runtime import accelerator, session
from rlx.config.schema import ModelConfig, PPOConfig
from rlx.config.schema.roles import TINY, critic_settings, has_critic, sharded_roles
from rlx.data.sampler import PromptSampler
from rlx.trainer.checkpoints import read_driver_state, run_folder
from rlx.trainer.loop import Trainer, roles_of
from rlx.trainer.progress import Progress
from rlx.trainer.report import write_report
from rlx.trainer.start import Prepared, prepare
from rlx.trainer.tracking import Tracker
from rlx.trainer.warm_start import warm_start
from rlx.workers.worker import Worker


def run(config: PPOConfig, yaml: str) -> Path:
    """Trains as configured and returns the folder of the run.

    Args:
        config: composed and checked.
        yaml: the same as text, kept in the run's folder.

    Raises:
        what `prepare` raises; RewardError, WorkerFailure: each says what to do about it.
    """
    # The warm start and the folder come after all that can fail for a mistake in the command: it costs no time, and a run
    # that never began leaves no folder.
    prepared = prepare(config)
    with prepared.rewards:
        return _run(with_steps(with_models(config), prepared.sampler), yaml, prepared)


def _run(config: PPOConfig, yaml: str, prepared: Prepared) -> Path:
    checkpoint, tokenizer, train, val, sampler, rewards = prepared
    folder = run_folder(config, checkpoint)
    (folder / "config.yaml").write_text(yaml)
    step = read_driver_state(checkpoint).step if checkpoint else 0
    progress = Progress(config.trainer.total_training_steps or 0, console="console" in config.trainer.logger)
    for notice in prepared.notices(config):
        progress.notice(notice)
    if checkpoint is not None:
        progress.remark(f"resuming from step {step}: {checkpoint}")
    elif config.trainer.resume_mode == "auto":
        progress.remark(f"no checkpoint to resume from in {folder.parent}: a new run")
    names = config.trainer.project_name, config.trainer.experiment_name
    with (
        progress,
        Tracker(config.trainer.logger, folder, yaml, *names, resume_step=step if checkpoint else None) as tracker,
        session(config),
        start_workers(config) as workers,
    ):
        trainer = Trainer(config, workers, tokenizer, train, sampler, val, rewards, folder, progress, tracker)
        if checkpoint is not None:
            trainer.load(checkpoint)
        trainer.fit()
    picture = write_report(folder / "metrics.jsonl", folder / "report.png")
    progress.summary(trainer.first_validation, trainer.last_validation, folder, picture)
    return folder


def start_workers(config: PPOConfig) -> WorkerGroup:
    """The processes of the run, each hosting every role that the run needs."""
    trainer = config.trainer
    device = accelerator() if trainer.device == "auto" else trainer.device
    pool = Placement.reserve(trainer.nnodes, trainer.n_gpus_per_node, device)
    # The processes of a tensor-parallel group generate the same samples, those of a sequence-parallel one get the same rows.
    together = {role.name: role.together for role in sharded_roles(config)}
    together["rollout"] = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    meshes = {role: Mesh.of(len(pool.slots), ranks) for role, ranks in together.items()}
    return WorkerGroup(pool, Worker, config, roles_of(config), meshes=meshes)


def with_models(config: PPOConfig) -> PPOConfig:
    """The configuration as workers take it: `builtin:tiny` warm-started, the critic's nulls set, paths absolute."""
    policy, critic, judge = config.actor_rollout_ref, critic_settings(config), config.reward_model
    loss = replace(policy.actor.policy_loss, path=absolute(policy.actor.policy_loss.path))
    policy_path = str(warm_start(config)) if policy.model.path == TINY else absolute(policy.model.path)
    critic_path = policy_path if critic.model.path == TINY else absolute(critic.model.path)
    return replace(
        config,
        actor_rollout_ref=replace(
            policy, model=located(policy.model, policy_path), actor=replace(policy.actor, policy_loss=loss)
        ),
        critic=replace(critic, model=located(critic.model, critic_path)),
        reward_model=replace(judge, model=replace(judge.model, path=absolute(judge.model.path))),
    )


def located(model: ModelConfig, path: str | None) -> ModelConfig:
    """The model at `path`, and the folder that its activations may go to by its path from the root."""
    offload = model.activation_offload
    if offload.directory is not None:
        offload = replace(offload, directory=str(Path(offload.directory).expanduser().absolute()))
    return replace(model, path=path, activation_offload=offload)


def absolute(path: str | None) -> str | None:
    """A folder's path from the root, as workers run in folders of their own; a hub name as it is."""
    folder = Path(path or "").expanduser()
    return str(folder.absolute()) if path and folder.exists() else path


def with_steps(config: PPOConfig, sampler: PromptSampler) -> PPOConfig:
    """The configuration with the numbers of steps set, which the optimizers' schedules need.

    Without a critic there is none to warm up: the actor would wait for nothing.
    """
    steps = config.trainer.total_training_steps or sampler.batches_per_epoch * config.trainer.total_epochs
    warmup = config.trainer.critic_warmup if has_critic(config) else 0
    return replace(config, trainer=replace(config.trainer, total_training_steps=steps, critic_warmup=warmup))
