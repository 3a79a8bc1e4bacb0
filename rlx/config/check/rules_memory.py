"""Faults and warnings of runs whose forecast exceeds memory, with keys that would make them fit."""

from collections.abc import Iterator
from dataclasses import replace

from rlx.config.check.context import CheckContext
from rlx.config.faults import Fault
from rlx.config.forecast.fitting import remedies
from rlx.config.forecast.forecast_text import gb
from rlx.config.forecast.memory_forecast import REFUSED_FROM, MemoryForecast
from rlx.offload.plan.run_memory import Phase

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
    remedy = f"{remedies(forecast, is_least=True)}; {CHECK}=warn runs all the same"
    margin = f"a run that needs over {(REFUSED_FROM - 1) * 100:.0f} % more than that is refused"
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
    """Warn of phases that may not fit but are not refused."""
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
            f"{where} memory may run out: {_needs(of_device)}, of which {usable(forecast, of_device)} are usable, if a micro-batch "
            f"holds as many sequences of {forecast.length:,} tokens as it may{until}; to be safe: {remedies(forecast)}"
        )
    if on_host := [phase for phase in over if not phase.fits_host()]:
        most, count = max(on_host, key=lambda phase: phase.host), s.config.trainer.n_gpus_per_node
        yield (
            f"host memory may run out: {count} process(es) hold {gb(most.host * count)} GB there in {most.name}, and this "
            f"machine has {gb(s.machine.host_bytes or 0)}; to be safe: {remedies(forecast)}"
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
    """Return in words how much memory the phases may use, and how much there is."""
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
