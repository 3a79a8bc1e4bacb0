"""Faults and warnings of runs whose forecast exceeds memory or disk, with keys that make them fit."""

import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from rlx.config.check.declared import CheckContext
from rlx.config.check.rules import offload_options, offloading_roles
from rlx.config.faults import Fault
from rlx.config.forecast.forecast_text import gb
from rlx.config.forecast.memory_forecast import LENGTH_STEP, REFUSED_FROM, MemoryForecast
from rlx.config.machine import processes
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import ModelRole, has_frozen_layers, sharded_roles
from rlx.config.schema.tree import value_at, with_value
from rlx.offload.plan.decoder import Decoder
from rlx.offload.plan.run_memory import Phase
from rlx.offload.runtime.options import folder_problem

CHECK = "trainer.memory_check"
SMALLER = 0.7  # times a run's memory, for which remedies are sought after memory was full


def judge_memory(s: CheckContext) -> tuple[list[Fault], list[str]]:
    """Return faults if what the run needs at least is above REFUSED_FROM times the usable memory, else warnings if it may be."""
    mode, count = s.config.trainer.memory_check, s.config.trainer.n_gpus_per_node
    forecast, faults, warnings = MemoryForecast.of(s.config, s.machine), list[Fault](), list[str]()
    refused = forecast.oversized(is_least=True, margin=REFUSED_FROM) if mode == "refuse" else []
    if mode == "off" or not (over := refused or forecast.oversized()):
        return faults, warnings
    remedy, margin = remedies(forecast, is_least=bool(refused)), REFUSED_FROM if refused else 1.0
    above = f"a run that needs over {(REFUSED_FROM - 1) * 100:.0f} % more is rejected"
    anyway = f"{remedy}; {CHECK}=warn runs anyway"
    where, whole = "device" if forecast.on_device else "host", gb(s.machine.host_bytes or 0)
    of_device = [phase for phase in over if not phase.fits_device(margin)]
    on_host = [phase for phase in over if not phase.fits_host(margin)]
    if of_device and refused:
        expected, got = f"at most {usable(forecast, of_device)} GB; {above}", _needs(of_device)
        what = f"the run does not fit into {where} memory"
        faults.append(s.fault(what, expected, anyway, CHECK, got=got))
    elif of_device:
        longest = min(forecast.longest(phase.name) or 0 for phase in of_device)
        until = f"; sequences of up to {longest:,} tokens fit" if longest else ""
        warnings.append(
            f"{where} memory may run out: {_needs(of_device)}; {usable(forecast, of_device)} GB are usable. This assumes full "
            f"micro-batches of sequences of {forecast.length:,} tokens{until}; to be safe: {remedy}"
        )
    most = max(on_host, key=lambda phase: phase.host, default=None)
    if most is not None and refused:
        got = f"{gb(most.host * count)} GB in {count} process(es), in {most.name}"
        what = "states and activations do not fit into host memory"
        expected = f"at most the {whole} GB of {s.machine.label}; {above}"
        faults.append(s.fault(what, expected, anyway, CHECK, got=got))
    elif most is not None:
        warnings.append(
            f"host memory may run out: {count} process(es) hold {gb(most.host * count)} GB there in {most.name}, and this "
            f"machine has {whole}; to be safe: {remedy}"
        )
    return faults, warnings


def disk_warnings(s: CheckContext) -> Iterator[str]:
    """Warn of folders with less room than this machine's processes will write. Call it only if every key could be read."""
    if s.machine.cluster is not None or s.machine.name is not None:
        return
    forecast, count = MemoryForecast.of(s.config, s.machine), s.config.trainer.n_gpus_per_node
    written = []
    for role, memory in forecast.streaming:
        key = f"{role.model_key}.layer_offload_directory"
        written.append((key, role.model.layer_offload_directory, memory.streamed, "the machine's processes are"))
    for role in offloading_roles(s):
        if offload_options(role.model).uses_disk and role.name not in forecast.unknown:
            key, nbytes = f"{role.model_key}.activation_offload.directory", forecast.phase(f"update_{role.name}").disk
            folder = role.model.activation_offload.directory
            written.append((key, folder, nbytes * count, f"the {count} process(es) are"))
    for key, folder, needed, who in written:
        if folder is None or folder_problem(folder):
            continue
        free = shutil.disk_usage(Path(folder).expanduser()).free
        if needed > free:
            yield (
                f"{key}={folder} has {free / 1e9:.1f} GB free, and {who} estimated to write {needed / 1e9:.1f} GB to it; a full "
                "disk ends the run"
            )


def after_full_memory(forecast: MemoryForecast) -> str:
    """Return what to change after the host's memory was full: what the forecast names, or what a smaller machine would need."""
    if not forecast.oversized():
        phases, count = forecast.phases(), forecast.config.trainer.n_gpus_per_node
        most = max((phase.host if forecast.on_device else phase.peak for phase in phases), default=0.0) * count
        smaller = replace(forecast.machine, host_bytes=int(max(1.0, SMALLER * most)))
        forecast = replace(forecast, machine=smaller)
    return f"to need less memory, {remedies(forecast)}; docs/out_of_memory.md"


def usable(forecast: MemoryForecast, phases: list[Phase]) -> str:
    limit = min(phase.limit or 0.0 for phase in phases)
    what = "a device's" if forecast.on_device else "each process's part of the host's"
    return f"{gb(limit)} of {what} {gb(forecast.memory_bytes or 0.0)}"


def _needs(phases: list[Phase]) -> str:
    """Return each phase with its peak, and the largest also with its parts."""
    largest, *others = sorted(phases, key=lambda phase: -phase.peak)
    parts = sorted(largest.parts.items(), key=lambda part: -part[1])
    of = ", ".join(f"{name} {gb(nbytes)}" for name, nbytes in parts if nbytes >= 0.01 * largest.peak)
    texts = [f"{largest.name} {gb(largest.peak)} GB ({of})", *(f"{phase.name} {gb(phase.peak)}" for phase in others)]
    lacking = (phase.lacking for phase in phases if phase.lacking)
    texts += (f"the sampler's share lacks {gb(nbytes)} GB to hold one sequence" for nbytes in lacking)
    return ", ".join(texts)


# Remedies

AT_MOST = 3  # remedies to name, of those that suffice alone
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
SHARE = f"{ROLLOUT}.gpu_memory_utilization"
USUAL_SHARE = 0.8  # leaves vLLM room for many sequences where the weights alone take most of a device
FOLDER = "FOLDER"  # of a local disk, which the user knows
MORE = "more processes (trainer.n_gpus_per_node), shorter responses or a smaller model"


class Change(NamedTuple):
    """A key and a value that may help, and a change without which the value is refused."""

    key: str
    value: Any
    needs: "Change | None" = None

    def __str__(self) -> str:
        return f"{self.needs} with {self.key}={self.value}" if self.needs else f"{self.key}={self.value}"

    def of(self, config: PPOConfig) -> PPOConfig:
        return with_value(self.needs.of(config) if self.needs else config, self.key, self.value)


def remedies(forecast: MemoryForecast, is_least: bool = False) -> str:
    """Return in words which keys make the run fit: one of several, or several together."""

    def fits(*changes: Change) -> bool:
        config = forecast.config
        for change in changes:
            config = change.of(config)
        return not replace(forecast, config=config).oversized(is_least)

    candidates = list(_candidates(forecast))
    first_of_key = {change.key: change for change in reversed(candidates) if fits(change)}
    enough = [*reversed(first_of_key.values())]
    if sized := _lowered(forecast, fits):
        enough = [*enough[: AT_MOST - 1], sized]
    if enough:
        return "set " + ", or ".join(map(str, enough[:AT_MOST]))
    if not fits(*candidates):
        sized = _lowered(forecast, lambda *changes: fits(*candidates, *changes))
        if sized is None:
            verb = "is" if len(candidates) == 1 else "are"
            named = f"{', '.join(map(str, candidates))} {verb} not enough: " if candidates else ""
            return f"{named}use {MORE}"
        candidates.append(sized)
    # The last change costs most time, so unneeded changes are dropped from the end.
    for change in reversed(candidates[:]):
        if fits(*(one for one in candidates if one is not change)):
            candidates.remove(change)
    *first, last = map(str, candidates)
    return "set " + " and ".join([*([", ".join(first)] if first else []), last])


def _candidates(forecast: MemoryForecast) -> Iterator[Change]:
    """Yield changes that lower the memory that is too small, the one that costs least time first."""
    over = forecast.oversized()
    roles = sharded_roles(forecast.config)
    if not all(phase.fits_device() for phase in over):
        for role in (each for each in roles if each.trained):
            yield from _of_activations(forecast, role)
        if forecast.on_device:
            yield from _of_states(forecast, roles)
        for phase in forecast.phases() if forecast.on_device else ():
            if phase.lacking and forecast.memory_bytes is not None:  # vLLM's share holds no sequence
                least = ceil(100 * (phase.parts["sampler"] + phase.lacking) / forecast.memory_bytes) / 100
                if least < 1:
                    yield Change(SHARE, max(least, USUAL_SHARE))
    else:  # the host's memory is too small
        names = ("param_offload", "optimizer_offload", "offload_policy")
        flags = (f"{role.fsdp_key}.{name}" for role in roles for name in names)
        yield from (Change(key, False) for key in flags if value_at(forecast.config, key))
        models = {role.model_key: role.model for role in roles if role.model.layer_offload}
        yield from (Change(f"{key}.layer_offload", False) for key in models)
        for key, model in models.items():
            if model.lora_rank and model.quantization is None and "bitsandbytes" in forecast.machine.packages:
                yield Change(f"{key}.quantization", "nf4")
        yield from (Change(f"{key}.layer_offload_directory", FOLDER) for key in models)


def _of_activations(forecast: MemoryForecast, role: ModelRole) -> Iterator[Change]:
    model, compiles = role.model, role.name == "actor" and forecast.config.actor_rollout_ref.actor.use_torch_compile
    saves_all = model.enable_activation_offload and model.activation_offload.save is not None
    if not (model.enable_gradient_checkpointing or saves_all):
        yield Change(f"{role.model_key}.enable_gradient_checkpointing", True)
    if forecast.on_device and not model.enable_activation_offload and not compiles:
        yield Change(f"{role.model_key}.enable_activation_offload", True)
    if not model.tiled_mlp and not compiles:
        yield Change(f"{role.model_key}.tiled_mlp", "auto")


def _of_states(forecast: MemoryForecast, roles: list[ModelRole]) -> Iterator[Change]:
    rollout = forecast.config.actor_rollout_ref.rollout
    if rollout.name == "vllm" and not rollout.free_cache_engine:
        yield Change(f"{ROLLOUT}.free_cache_engine", True)
    for role in roles:
        if role.model.lora_rank > 0 and role.fsdp.model_dtype == "fp32" and role.strategy == "fsdp2":
            yield Change(f"{role.fsdp_key}.model_dtype", "bf16")  # of the frozen weights; adapters stay in fp32
    for role in roles:
        if not role.fsdp.reshards(processes(forecast.config)):
            yield Change(f"{role.fsdp_key}.reshard_after_forward", True)
    for name, applies in (("optimizer_offload", [r for r in roles if r.trained]), ("param_offload", roles[::-1])):
        for role in applies:
            if not getattr(role.fsdp, name) and not role.fsdp.offload_policy:
                yield Change(f"{role.fsdp_key}.{name}", True)
    compiles = forecast.config.actor_rollout_ref.actor.use_torch_compile
    for role in roles:  # streams in each micro-batch; the flags above move weights and states between phases alone
        # As `layers_can_stream` in rlx/config/check/rules.py has it.
        can_stream = role.strategy == "fsdp2" and has_frozen_layers(role) and not compiles
        if not role.model.layer_offload and can_stream:
            engine = Change(f"{role.model_key}.enable_activation_offload", True)
            recomputes = role.trained and role.model.enable_gradient_checkpointing
            needs = engine if recomputes and not role.model.enable_activation_offload else None
            yield Change(f"{role.model_key}.layer_offload", True, needs)
    shape = forecast.known.get("actor")
    for size in (2, 4, 8):
        fits_machine = forecast.config.trainer.samplers_per_node % size == 0
        fits_model = isinstance(shape, Decoder) and shape.heads % size == 0
        if rollout.name == "vllm" and rollout.tensor_model_parallel_size < size and fits_machine and fits_model:
            yield Change(f"{ROLLOUT}.tensor_model_parallel_size", size)


def _sizes(forecast: MemoryForecast) -> Iterator[tuple[str, Sequence[float]]]:
    """Yield keys that can be lowered, each with its smaller values: the sampler's share or batch, and the micro-batches."""
    config, rollout = forecast.config, forecast.config.actor_rollout_ref.rollout
    if rollout.name == "hf":
        yield f"{ROLLOUT}.max_num_seqs", range(1, rollout.max_num_seqs)
    elif forecast.on_device:
        yield SHARE, [percent / 100 for percent in range(5, int(100 * rollout.gpu_memory_utilization))]
    longest = -(-forecast.length // LENGTH_STEP) * LENGTH_STEP
    for section in ("actor_rollout_ref.actor", "critic", ROLLOUT, REF):
        of_log_probs = section in (ROLLOUT, REF)
        prefix, flag = ("log_prob", "log_prob_use_dynamic_bsz") if of_log_probs else ("ppo", "use_dynamic_bsz")
        rows, tokens = (f"{section}.{prefix}_{name}_per_gpu" for name in ("micro_batch_size", "max_token_len"))
        if value_at(config, f"{section}.{flag}"):
            yield tokens, range(longest, value_at(config, tokens) // LENGTH_STEP * LENGTH_STEP, LENGTH_STEP)
        elif value_at(config, rows) is not None:
            yield rows, range(1, value_at(config, rows))


def _lowered(forecast: MemoryForecast, fits: Callable[..., bool]) -> Change | None:
    """Return the largest value of one of the sizes with which the run fits; None if there is none."""
    for key, values in _sizes(forecast):
        if values and fits(Change(key, values[0])):
            fitting = bisect_left(values, True, lo=1, key=lambda value: not fits(Change(key, value)))
            return Change(key, values[fitting - 1])
    return None
