"""Print the forecast of memory, in short at the start of a run and in full for `rlx check`, and what checkpoints take."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rlx.config.forecast.decoders import fewest_positions
from rlx.config.forecast.memory_forecast import ENGINES, LENGTH_STEP, REFUSED_FROM, MemoryForecast
from rlx.config.machine import processes
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import has_critic, log_prob_pass, may_save, saves
from rlx.config.schema.tree import with_value
from rlx.offload.plan.run_memory import Phase
from rlx.offload.plan.text_table import aligned

PARTS = ("others", "weights", "gradients", "optimizer", "gathered", "working", "sampler")
LONGEST_COLUMN = "longest that fits"
COLUMNS = (
    "others: models that wait on the device; gathered: weights that FSDP collects while a layer runs; full beyond: what ends "
    "longer sequences, the device, the host or the model's positions"
)


def short_text(forecast: MemoryForecast) -> str:
    """Return the text that a run prints at its start: one line without an accelerator, empty if nothing is known."""
    lines = _unknown(forecast)
    phases = forecast.phases()
    if phases and not forecast.on_device:
        trainer = forecast.config.trainer
        apart = [phase for phase in phases if phase.name == "rollout" and trainer.n_rollout_gpus]  # beside the others
        largest = max((phase for phase in phases if phase not in apart), key=lambda phase: phase.peak)
        whole = trainer.n_gpus_per_node * largest.peak + trainer.n_rollout_gpus * sum(phase.peak for phase in apart)
        of = "" if forecast.machine.host_bytes is None else f" of {gb(forecast.machine.host_bytes)}"
        lines.append(
            f"memory: computed on the CPU; up to {gb(whole)}{of} GB of host memory in {trainer.processes_per_node} process(es), in "
            f"{' and '.join(phase.name for phase in (largest, *apart))}, in addition to the memory of Python and torch"
        )
    elif phases:
        rows = [("memory by phase", "peak GB", "of", LONGEST_COLUMN)]
        for phase in phases:
            rows.append((phase.name, gb(phase.peak), _limit(phase), _longest(forecast, phase)[0]))
        lines += [*aligned(rows, texts=1), _legend(forecast), *_states(forecast), *_host(forecast, phases)]
        lines += [*_streams(forecast), *(_engines(forecast) if _best_engines(forecast) > 1 else [])]
    return "\n".join(lines)


def long_text(forecast: MemoryForecast) -> str:
    phases = forecast.phases()
    parts: list[tuple[str, ...]] = [("parts in GB", *PARTS)]
    names = ("peak", "of", LONGEST_COLUMN, "full beyond", "host", "disk", "peak in")
    peaks: list[tuple[str, ...]] = [("peaks in GB", *names)]
    for phase in phases:
        parts.append((phase.name, *(_cell(phase.parts.get(part, 0.0)) for part in PARTS)))
        lengths, others = _longest(forecast, phase), (_cell(phase.host), _cell(phase.disk), phase.where or "-")
        peaks.append((phase.name, gb(phase.peak), _limit(phase), *lengths, *others))
    old, size = log_prob_pass(forecast.config), forecast.config.data.train_batch_size
    below = [COLUMNS, _legend(forecast)]
    if old.prompts:
        below.append(f"old log-probs of {old.prompts} of {size} prompts take a pass of their own: {old.why}")
    tables = [*aligned(parts), "", *aligned(peaks), *below] if phases else []
    lines = [*_engines(forecast), *_states(forecast), *_host(forecast, phases), *_streams(forecast)]
    return "\n".join([*_unknown(forecast), *tables, *lines])


def verdict_text(forecast: MemoryForecast) -> str:
    """Return the last line of `rlx check`: the processes, and the largest phase that does not fit, or the one nearest to its limit."""
    trainer, machine = forecast.config.trainer, forecast.machine
    each = trainer.processes_per_node
    where = f"{each * trainer.nnodes} {'GPU(s)' if forecast.on_device else 'CPU process(es)'}"
    if forecast.on_device and machine.cluster is None and machine.gpus < each:
        where += f" ({machine.label} has {machine.gpus})"
    limited = [phase for phase in forecast.phases() if phase.limit]
    if not limited or forecast.unknown:
        return f"the memory of {where} cannot be predicted here"
    refused = forecast.oversized(is_least=True, margin=REFUSED_FROM) if trainer.memory_check == "refuse" else []
    over, margin = refused or forecast.oversized(), REFUSED_FROM if refused else 1.0
    verb = "does not fit" if refused else "may not fit" if over else "fits"
    if on_device := [phase for phase in over if not phase.fits_device(margin)]:
        shown = max(on_device, key=lambda phase: phase.peak)  # the one that the fault names first
    elif over:
        most = max(over, key=lambda phase: phase.host)
        return f"{verb} {where}: {most.name} takes {gb(most.host * trainer.n_gpus_per_node)} GB of host memory"
    else:
        shown = max(limited, key=lambda phase: phase.peak / (phase.limit or 1))
    return f"{verb} {where}: {shown.name} takes {gb(shown.peak)} of {gb(shown.limit or 0)} GB"


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f}" if nbytes >= 1e10 else f"{nbytes / 1e9:.2f}"


def _limit(phase: Phase) -> str:
    return "?" if phase.limit is None else gb(phase.limit)


def _cell(nbytes: float) -> str:
    return gb(nbytes) if nbytes else "-"


def _longest(forecast: MemoryForecast, phase: Phase) -> tuple[str, str]:
    """Return the longest sequences that fit, and what is full beyond: `device`, `host` or the model's `positions`."""
    if phase.limit is None:
        return "?", "-"
    longest, positions = forecast.longest(phase.name), fewest_positions(forecast.config)
    if longest is None:
        return "any", "-"
    if positions is not None and positions <= longest:
        # A table of positions ends there, and rotary embeddings were not trained beyond.
        return f"{positions:,}", "positions"
    full = "host" if forecast.phase(phase.name, longest + LENGTH_STEP).fits_device() else "device"
    return f"{longest:,}" if longest else "none", full


def _legend(forecast: MemoryForecast) -> str:
    what = "a device" if forecast.on_device else "the host for each process"
    whole = "not known here" if forecast.memory_bytes is None else f"{gb(forecast.memory_bytes)} GB, less a reserve"
    return (
        f"memory of {what}: {whole}; predicted for sequences of {forecast.length:,} tokens, the longest that the "
        "configuration allows (docs/planning.md)"
    )


def _engines(forecast: MemoryForecast) -> list[str]:
    """Return a line about vLLM's engines on a GPU, and why there are so many, or that more would be faster."""
    if forecast.config.actor_rollout_ref.rollout.name != "vllm" or not forecast.on_device:
        return []
    own, best = forecast.engines, _best_engines(forecast)
    reason = own.reason
    if own.per_gpu == 1 < best:
        reason = f"a model so small keeps the GPU waiting for one: {ENGINES}=auto starts {best} (docs/rollout.md)"
    return [f"vLLM: {own.per_gpu} engine(s) for each GPU; {reason}"]


def _best_engines(forecast: MemoryForecast) -> int:
    """Return the number of engines on a GPU, or where it is 1 that which `auto` would choose."""
    own = forecast.engines.per_gpu
    return own if own > 1 else replace(forecast, config=with_value(forecast.config, ENGINES, "auto")).engines.per_gpu


def _states(forecast: MemoryForecast) -> list[str]:
    """Return a line for each role whose optimizer state is split over device and host."""
    return [
        f"optimizer state: of the {name}'s {gb(staying + moving)} GB in each process {gb(staying)} stay on the device and "
        f"{gb(moving)} are in host memory"
        for name, staying, moving in forecast.decided().split_states()
    ]


def _host(forecast: MemoryForecast, phases: list[Phase]) -> list[str]:
    most = max(phases, key=lambda phase: phase.host, default=None)
    if most is None or not most.host:
        return []
    count, whole = forecast.config.trainer.n_gpus_per_node, forecast.machine.host_bytes
    of_machine = "memory" if whole is None else f"{gb(whole)} GB"
    return [
        f"host memory: in {most.name}, the fullest phase, {count} process(es) keep {gb(count * most.host)} GB of weights, states "
        f"and activations in the {of_machine} of their machine; Python, torch and CUDA take more"
    ]


def _streams(forecast: MemoryForecast) -> list[str]:
    """Return a line for each role whose frozen layers stream: how much, and how long the link is busy if its rate is known."""
    lines, hardware = [], forecast.machine.hardware
    for role, memory in forecast.streaming:
        folder = role.model.layer_offload_directory
        passes = "twice in each micro-batch of an update and once" if role.trained else "once"
        line = (
            f"{role.model_key}.layer_offload: {role.name} streams {gb(memory.streamed)} GB from "
            f"{folder or 'host memory'}, {passes} in each without backward"
        )
        if hardware is not None and not folder:  # the rate of a disk is not known
            rate = hardware.link_bytes_per_s
            line += (
                f"; that takes {memory.streamed / rate:.2f} s at {rate / 1e9:.0f} GB/s, beside compute where a layer computes "
                f"longer than {memory.buffers / 2 / rate * 1e3:.1f} ms"
            )
        lines.append(line)
    return lines


def _unknown(forecast: MemoryForecast) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for role, reason in forecast.unknown.items():
        reasons.setdefault(reason, []).append(role)
    return [f"memory: no prediction for {', '.join(roles)}: {reason}" for reason, roles in reasons.items()]


# Checkpoints

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
    config, trainer, found = forecast.config, forecast.config.trainer, {}
    settings = {"actor": (config.actor_rollout_ref.actor.checkpoint, trainer.max_actor_ckpt_to_keep)}
    if has_critic(config):
        settings["critic"] = config.critic.checkpoint, trainer.max_critic_ckpt_to_keep
    with_state = saves(config) or trainer.save_on_sigterm_s > 0
    for name in (each for each in settings if each in forecast.roles and may_save(config)):
        own, (saved, kept) = forecast.run.models[name], settings[name]
        weights = own.update.weights * own.shards * ("model" in saved.save_contents)
        state = own.update.optimizer * own.shards * ("optimizer" in saved.save_contents and with_state)
        exported = own.decoder.parameters * own.stored * ("hf_model" in saved.save_contents)
        staged = 0.0
        if saved.async_save:
            in_place = forecast.roles[name].strategy == "fsdp2" and not exported
            weights_on_host = in_place and (own.steps_on_host or own.weights_rest_on_host)
            moving = in_place * min(state, own.moving_state * own.shards)
            state_on_host = state if in_place and own.steps_on_host else moving
            staged = weights * (not weights_on_host) + state - state_on_host
        found[name] = RoleCheckpoint(weights + state + exported, staged, kept)
    return found


def checkpoint_text(forecast: MemoryForecast, folder: Path | None) -> list[str]:
    """Return lines about disk and host memory for runs in `folder`, None if that is on another machine."""
    roles, told, trainer = role_checkpoints(forecast), seldom_saved(forecast.config), forecast.config.trainer
    lines = [told] if told else []
    if not roles:
        return lines
    room = ""
    if folder is not None:
        free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.is_dir())).free
        room = f"; {gb(free)} GB are free for {folder}"
    by_role, keeps = ", ".join(f"{name} {gb(role.nbytes)}" for name, role in roles.items()), "all are kept"
    if all(role.kept is not None for role in roles.values()):
        # An old one is removed when the new one is whole.
        most = sum(role.nbytes * ((role.kept or 0) + 1) for role in roles.values())
        keeps = f"up to {gb(most)} GB with the one that is written"
    copied = f"; copies go to {trainer.default_local_dir}" if "://" in (trainer.default_local_dir or "") else ""
    each, on_machine = sum(role.nbytes for role in roles.values()), trainer.n_gpus_per_node / processes(forecast.config)
    lines.append(f"checkpoints: {gb(each)} GB each ({by_role}), {keeps}{room}{copied}")
    if staged := on_machine * sum(role.staged for role in roles.values()):
        where = "to the host memory of each machine, from where a thread writes them"
        lines.append(f"a save copies {gb(staged)} GB {where}")
    return lines
