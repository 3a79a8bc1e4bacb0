"""Faults and warnings of runs whose forecast exceeds memory or disk, with keys that would make them fit."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rlx.config.check.declared import CheckContext
from rlx.config.check.rules import offload_options, offloading_roles
from rlx.config.faults import Fault
from rlx.config.forecast.fitting import remedies
from rlx.config.forecast.forecast_text import gb
from rlx.config.forecast.memory_forecast import REFUSED_FROM, MemoryForecast
from rlx.offload.plan.run_memory import Phase
from rlx.offload.runtime.options import folder_problem

CHECK = "trainer.memory_check"
SMALLER = 0.7  # times a run's memory, for which remedies are sought after memory was full


def memory_suffices(s: CheckContext) -> Iterator[Fault]:
    """The least memory that the run needs is at most REFUSED_FROM times the usable memory of device and host."""
    if s.config.trainer.memory_check != "refuse":
        return
    forecast = MemoryForecast.of(s.config, s.machine)
    over = forecast.oversized(is_least=True, margin=REFUSED_FROM)
    if not over:
        return
    remedy = f"{remedies(forecast, is_least=True)}; {CHECK}=warn runs anyway"
    margin = f"a run that needs over {(REFUSED_FROM - 1) * 100:.0f} % more is rejected"
    if of_device := [phase for phase in over if not phase.fits_device(REFUSED_FROM)]:
        what = f"the run does not fit into {'device' if forecast.on_device else 'host'} memory"
        expected = f"at most {usable(forecast, of_device)} GB; {margin}"
        yield s.fault(what, expected, remedy, CHECK, got=_needs(of_device))
    if on_host := [phase for phase in over if not phase.fits_host(REFUSED_FROM)]:
        most, count = max(on_host, key=lambda phase: phase.host), s.config.trainer.n_gpus_per_node
        got = f"{gb(most.host * count)} GB in {count} process(es), in {most.name}"
        expected = f"at most the {gb(s.machine.host_bytes or 0)} GB of {s.machine.label}; {margin}"
        yield s.fault("states and activations do not fit into host memory", expected, remedy, CHECK, got=got)


def memory_warnings(s: CheckContext) -> Iterator[str]:
    if s.config.trainer.memory_check == "off":
        return
    forecast = MemoryForecast.of(s.config, s.machine)
    is_refused = s.config.trainer.memory_check == "refuse" and forecast.oversized(is_least=True, margin=REFUSED_FROM)
    over = [] if is_refused else forecast.oversized()
    if of_device := [phase for phase in over if not phase.fits_device()]:
        where = "device" if forecast.on_device else "host"
        longest = min(forecast.longest(phase.name) or 0 for phase in of_device)
        until = f"; sequences of up to {longest:,} tokens fit" if longest else ""
        yield (
            f"{where} memory may run out: {_needs(of_device)}; {usable(forecast, of_device)} GB are usable. This assumes full "
            f"micro-batches of sequences of {forecast.length:,} tokens{until}; to be safe: {remedies(forecast)}"
        )
    if on_host := [phase for phase in over if not phase.fits_host()]:
        most, count = max(on_host, key=lambda phase: phase.host), s.config.trainer.n_gpus_per_node
        yield (
            f"host memory may run out: {count} process(es) hold {gb(most.host * count)} GB there in {most.name}, and this "
            f"machine has {gb(s.machine.host_bytes or 0)}; to be safe: {remedies(forecast)}"
        )


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
            written.append(
                (key, role.model.activation_offload.directory, nbytes * count, f"the {count} process(es) are")
            )
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
    return ", ".join(
        [*texts, *(f"the sampler's share lacks {gb(nbytes)} GB to hold one sequence" for nbytes in lacking)]
    )
