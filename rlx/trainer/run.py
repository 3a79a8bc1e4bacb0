"""One run from a checked configuration to its report; `rlx.trainer.launch` calls it when Ray and the processes have started."""

import shlex
import time
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from threading import Thread

from rlx.cluster.group import WorkerGroup
from rlx.config.forecast.forecast_text import seldom_saved
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import TINY, critic_settings, has_critic, is_tiny, roles_of
from rlx.config.schema.tree import LEAVES, value_at, with_value
from rlx.data.prompts import PromptSampler
from rlx.program import program
from rlx.supervisor import link
from rlx.supervisor.link import Stopping
from rlx.trainer import environment_rows
from rlx.trainer.checkpoints import SUPERSEDED, is_evaluation, newest_whole, require_step, run_folder, set_aside_later
from rlx.trainer.loop import Trainer
from rlx.trainer.progress import Progress
from rlx.trainer.resume_config import ChangedKey, changes, keep, longer
from rlx.trainer.run_lock import RunLock
from rlx.trainer.run_state import Run
from rlx.trainer.saver import RemoteRun, Saver
from rlx.trainer.start import Prepared, prepare
from rlx.trainer.timeline import costliest
from rlx.trainer.tracking import METRICS_FILE, VAL_ONLY_FILE, Tracker, read_metrics
from rlx.trainer.transcripts import keeps_transcripts
from rlx.trainer.warm_start import warm_start

ENDING_S = 20.0  # for the end of workers and of Ray
LONG_START_S = 10.0  # of the workers, from which on the screen says what took it
OF_WORKERS = ("actor_rollout_ref.", "critic.", "reward_model.", "environment.")


def run(config: PPOConfig, yaml: str, workers: WorkerGroup) -> Path:
    """Train as configured and return the folder of the run; `yaml` is the configuration as text without secrets, to be kept there.

    The workers are closed at the end. Raises the errors of `prepare`; StorageError, RewardError or WorkerFailure.
    """
    config = continued(config)
    # `prepare` finds mistakes in the command. It comes before the warm start and the folder, so that a mistake costs no time
    # and leaves no folder.
    prepared = prepare(config, yaml)
    with prepared.held:
        config = with_steps(with_models(config), prepared.sampler)
        folder = _folder_of(config, prepared.checkpoint)
        trainer, view = config.trainer, program("view")
        answers = f"set trainer.transcripts=True, and later run `{view}` with the run's folder"
        if keeps_transcripts(config):
            answers = f"run `{view} {shlex.quote(str(folder))}`"
        steps, console = trainer.total_training_steps or 0, "console" in trainer.logger
        progress = Progress(steps, console, verbose=trainer.verbose, where_answers_are=answers)
        _tell_beginning(config, yaml, prepared, folder, progress)
        trained = _train(config, yaml, prepared, folder, progress, workers)
        if is_evaluation(config):
            return folder
        picture = _picture(folder, progress)
        if (remote := RemoteRun.of(config, folder)) is not None:  # the picture was not there at the last copy
            remote.send(None, [])
            remote.wait()
        validations = trained.run.first_validation, trained.validation.last
        most = costliest(trained.run.timeline.costs, config, progress.start_s)
        progress.summary(*validations, folder, picture, link.restarts(), most)
    return folder


def _folder_to_continue(config: PPOConfig) -> Path | None:
    """Return the folder of a restarted run. A validation alone writes no checkpoint, so its restart begins as it did."""
    folder = link.folder_to_continue()
    return None if folder is None or config.trainer.val_only else Path(folder)


def continued(config: PPOConfig) -> PPOConfig:
    """Return the configuration of a restart: resume from the run's newest intact checkpoint, or start from scratch without any.

    Raises ResumeError if none can be used, but not because all are damaged.
    """
    folder = _folder_to_continue(config)
    if folder is None:
        return config
    saved = newest_whole(folder / "checkpoints").checkpoint
    resume = {"resume_mode": "resume_path", "resume_from_path": str(saved)} if saved else {"resume_mode": "disable"}
    return replace(config, trainer=replace(config.trainer, **resume))


def _folder_of(config: PPOConfig, checkpoint: Path | None) -> Path:
    """Return the folder of the run; a restarted run stays in its own, also without a checkpoint."""
    if checkpoint is not None:
        return run_folder(config, checkpoint)
    folder = _folder_to_continue(config) or run_folder(config, None)
    link.tell(folder=str(folder))
    return folder


def _tell_beginning(config: PPOConfig, yaml: str, prepared: Prepared, folder: Path, progress: Progress) -> None:
    """Tell how the run begins; keep the settings of a new run, and set its damaged checkpoints aside."""
    for notice in prepared.notices(config):
        progress.notice(notice)
    progress.remark(f"run {folder}")
    if prepared.checkpoint is not None:
        progress.remark(f"resuming from step {require_step(prepared.checkpoint)}: {prepared.checkpoint}")
    else:
        damaged = _set_aside_damaged(folder, config.trainer.default_local_dir)
        for notice in (*damaged, *keep(folder, yaml, 0, changes(folder, 0, yaml))):
            progress.notice(notice)
        if config.trainer.resume_mode == "auto":
            progress.remark(f"no checkpoint to resume from in {folder.parent}: a new run")
    if "console" in config.trainer.logger:
        policy = config.actor_rollout_ref
        vllm = "; then vLLM starts" if policy.rollout.name == "vllm" else ""
        progress.remark(f"loading {', '.join(roles_of(config))} from {policy.model.path}{vllm}")
        if told := seldom_saved(config):
            progress.remark(told)


def _train(
    config: PPOConfig, yaml: str, prepared: Prepared, folder: Path, progress: Progress, workers: WorkerGroup
) -> Trainer:
    """Build the workers, resume if there is a checkpoint, and train to the end; return the trainer."""
    checkpoint = prepared.checkpoint
    lock = prepared.lock or prepared.held.enter_context(RunLock(folder))
    names = config.trainer.project_name, config.trainer.experiment_name
    rows = VAL_ONLY_FILE if checkpoint is not None and config.trainer.val_only else METRICS_FILE
    with ExitStack() as until_the_end:
        until_the_end.enter_context(progress)
        tracking = Tracker(config.trainer.logger, folder, yaml, *names, rows, lock.check, progress.notice)
        tracker = until_the_end.enter_context(tracking)
        # For batches; it takes two seconds, in which this process would wait for the workers.
        Thread(target=import_module, args=("tensordict",), daemon=True).start()
        until_the_end.enter_context(workers.build(config, roles_of(config)))
        if "console" in config.trainer.logger and (started := _long_start(workers)):
            progress.remark(started)
        data = prepared.train, prepared.sampler, prepared.val
        run = Run(config, workers, prepared.tokenizer, *data, prepared.rewards, folder, progress, tracker)
        trainer = Trainer(run)
        if checkpoint is not None:
            _resume(run, trainer.saver, yaml, prepared.changed, checkpoint)
        else:
            tracker.rewind(-1)  # a restart may find rows
        save_s = 0.0 if config.trainer.val_only else config.trainer.save_on_sigterm_s
        stopping = prepared.held.enter_context(Stopping(save_s))  # until the picture is drawn
        link.tell(grace_s=save_s + ENDING_S)
        trainer.fit(stopping)
    return trainer


def _resume(run: Run, saver: Saver, yaml: str, changed: list[ChangedKey], checkpoint: Path) -> None:
    """Load a checkpoint, keep the settings that changed since, and show them."""
    trainer, began = run.config.trainer, time.monotonic()
    falls_back = trainer.resume_mode == "auto" or _folder_to_continue(run.config) is not None
    run.load(checkpoint, saver, falls_back)
    if "console" in trainer.logger:
        run.progress.remark(f"loaded in {time.monotonic() - began:.1f} s")
    # Only now are later checkpoints set aside; a restart before this begins as this driver did.
    link.tell(folder=str(run.folder))
    if trainer.val_only:
        return  # the run's own settings stay
    if (found := run.finished_steps) != require_step(checkpoint):  # it fell back
        changed = changes(run.folder, found, yaml, "rows" in run.sampler.state_dict())
    for notice in keep(run.folder, yaml, found, changed):
        run.progress.notice(notice)
    for remark in longer(changed, yaml).values():
        run.progress.remark(remark)
    metrics = run.folder / METRICS_FILE
    if metrics.exists() and (doubt := environment_rows.doubt(read_metrics(metrics))):
        run.progress.notice(doubt)


def _long_start(workers: WorkerGroup) -> str:
    """Say what the start of the workers took its time for; empty if it was short."""
    each = workers.call("process", "start_s")
    names = dict.fromkeys(chain(*each))
    seconds = {name: max(of_rank.get(name, 0.0) for of_rank in each) for name in names}
    if sum(seconds.values()) < LONG_START_S:
        return ""
    return f"ready: {', '.join(f'{name} in {taken:.1f} s' for name, taken in seconds.items())}"


def _picture(folder: Path, progress: Progress) -> Path | None:
    """Draw the run's report. A picture that cannot be drawn does not fail a run that is done."""
    try:
        from rlx.trainer.report import write_report  # matplotlib takes half a second, for which no step need wait

        return write_report(folder / METRICS_FILE, folder / "report.png")
    except Exception as error:
        progress.notice(
            f"report.png was not drawn ({type(error).__name__}: {error}); to try again: {program('report')} {folder}"
        )
        return None


def _set_aside_damaged(folder: Path, runs: str | None) -> list[str]:
    """Set the checkpoints of a restarted run aside, all of which are damaged; return what to tell the user."""
    checkpoints = folder / "checkpoints"
    whole, passed_over = newest_whole(checkpoints)
    if whole is not None:
        raise OSError(f"{whole}: can be read now, but could not when this run began; start it again")
    set_aside_later(checkpoints, 0, runs)
    if passed_over:
        passed_over.append(
            f"all checkpoints of this run are damaged: it starts from scratch; they are now in {SUPERSEDED}"
        )
    return passed_over


def with_models(config: PPOConfig) -> PPOConfig:
    """Return the configuration for workers in other folders: `builtin:tiny` warm-started, the critic's nulls set, paths absolute."""
    config = replace(config, critic=critic_settings(config))
    policy = str(warm_start(config)) if is_tiny(config) else config.actor_rollout_ref.model.path
    for key in (key for key, leaf in LEAVES.items() if leaf.info.is_path and key.startswith(OF_WORKERS)):
        name = policy if value_at(config, key) == TINY else value_at(config, key)
        path = Path(name or "").expanduser()
        is_here = path.exists() or key.endswith("directory")  # which workers make; else it is a name of the hub
        config = with_value(config, key, str(path.absolute()) if name and is_here else name)
    return config


def with_steps(config: PPOConfig, sampler: PromptSampler) -> PPOConfig:
    """Return the configuration with the numbers of steps that schedules need; without a critic its warm-up is 0."""
    steps = config.trainer.total_training_steps or sampler.batches_per_epoch * config.trainer.total_epochs
    warmup = config.trainer.critic_warmup if has_critic(config) else 0
    return replace(config, trainer=replace(config.trainer, total_training_steps=steps, critic_warmup=warmup))
