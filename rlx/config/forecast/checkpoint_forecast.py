"""Forecast what checkpoints take of the disk and of host memory, for `--check`."""

import shutil
from pathlib import Path
from typing import NamedTuple

from rlx.config.forecast.forecast_text import gb
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import processes
from rlx.config.schema import CheckpointConfig, PPOConfig
from rlx.config.schema.roles import ModelRole, has_critic, may_save, saves
from rlx.offload.plan.run_memory import ModelMemory

NOT_SAVED = "no checkpoint will be written; trainer.save_freq=20 writes one every 20 steps and after the last"
SAVED_AT_END = (
    "one checkpoint will be written, after the last step and without the optimizer's state; trainer.save_freq=20 writes a whole one "
    "every 20 steps and after the last"
)


def seldom_saved(config: PPOConfig) -> str | None:
    """Return what to tell of a run that trains without regular checkpoints; None of others."""
    if saves(config) or config.trainer.val_only:
        return None
    return SAVED_AT_END if config.trainer.save_last else NOT_SAVED


class RoleCheckpoint(NamedTuple):
    """The checkpoints of one role [bytes]."""

    nbytes: float  # of one
    staged: float  # of it, copied to the host memory of all processes while a thread writes it
    kept: int | None  # number; None: all


def role_checkpoints(forecast: MemoryForecast) -> dict[str, RoleCheckpoint]:
    """Return the checkpoints of the trained roles whose models are known; none if the run saves nothing."""
    config, trainer = forecast.config, forecast.config.trainer
    if not may_save(config):
        return {}
    actor = config.actor_rollout_ref.actor
    settings = {"actor": (actor.checkpoint, trainer.max_actor_ckpt_to_keep)}
    if has_critic(config):
        settings["critic"] = config.critic.checkpoint, trainer.max_critic_ckpt_to_keep
    models, with_state = forecast.run.models, saves(config) or trainer.save_on_sigterm_s > 0
    return {
        name: _role_checkpoint(models[name], forecast.roles[name], saved, kept, with_state)
        for name, (saved, kept) in settings.items()
        if name in models
    }


def _role_checkpoint(
    own: ModelMemory, role: ModelRole, saved: CheckpointConfig, kept: int | None, with_state: bool
) -> RoleCheckpoint:
    shards = own.shards
    weights = own.update.weights * shards * ("model" in saved.save_contents)
    state = own.update.optimizer * shards * ("optimizer" in saved.save_contents and with_state)
    exported = own.decoder.parameters * own.stored * ("hf_model" in saved.save_contents)
    staged = 0.0
    if saved.async_save:
        in_place = role.strategy == "fsdp2" and not exported
        weights_on_host = in_place and (own.steps_on_host or own.weights_rest_on_host)
        moving = in_place * min(state, own.moving_state * shards)
        state_on_host = state if in_place and own.steps_on_host else moving
        staged = weights * (not weights_on_host) + state - state_on_host
    return RoleCheckpoint(weights + state + exported, staged, kept)


def checkpoint_text(forecast: MemoryForecast, folder: Path | None) -> list[str]:
    """Return lines about disk and host memory, or that the run saves nothing; none if its models are not known.

    Args:
        forecast: of the run.
        folder: of its runs; None: it is on another machine.
    """
    roles = role_checkpoints(forecast)
    told = seldom_saved(forecast.config)
    if not roles:
        return [told] if told else []
    trainer = forecast.config.trainer
    room = ""
    if folder is not None:
        free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.is_dir())).free
        room = f"; {gb(free)} GB are free for {folder}"
    by_role = ", ".join(f"{name} {gb(role.nbytes)}" for name, role in roles.items())
    keeps = "all are kept"
    if all(role.kept is not None for role in roles.values()):
        # An old one is removed when the new one is whole.
        most = sum(role.nbytes * ((role.kept or 0) + 1) for role in roles.values())
        keeps = f"up to {gb(most)} GB with the one that is written"
    copied = f"; copies go to {trainer.default_local_dir}" if "://" in (trainer.default_local_dir or "") else ""
    each = gb(sum(role.nbytes for role in roles.values()))
    lines = [told] if told else []
    lines.append(f"checkpoints: {each} GB each ({by_role}), {keeps}{room}{copied}")
    on_machine = trainer.n_gpus_per_node / processes(forecast.config)
    if staged := on_machine * sum(role.staged for role in roles.values()):
        where = "the host memory of each machine, from where a thread writes them"
        lines.append(f"a save copies {gb(staged)} GB to {where}")
    return lines
