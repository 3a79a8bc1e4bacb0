"""Print the memory forecast: a short table at the start of a run, a long one for `--check`."""

from rlx.config.forecast.decoders import fewest_positions
from rlx.config.forecast.memory_forecast import LENGTH_STEP, REFUSED_FROM, MemoryForecast
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
        largest = max(phases, key=lambda phase: phase.peak)
        count = forecast.config.trainer.n_gpus_per_node
        of = "" if forecast.machine.host_bytes is None else f" of {gb(forecast.machine.host_bytes)}"
        lines.append(
            f"memory: computed on the CPU; up to {gb(count * largest.peak)}{of} GB of host memory in {count} process(es), in "
            f"{largest.name}, in addition to the memory of Python and torch"
        )
    elif phases:
        rows = [("memory by phase", "peak GB", "of", LONGEST_COLUMN), *(_row(forecast, phase) for phase in phases)]
        lines += [*aligned(rows, texts=1), _legend(forecast), *_states(forecast), *_host(forecast, phases)]
        lines += _streams(forecast)
    return "\n".join(lines)


def long_text(forecast: MemoryForecast) -> str:
    """Return the text that `--check` prints: every phase by its parts."""
    phases = forecast.phases()
    parts: list[tuple[str, ...]] = [("parts in GB", *PARTS)]
    names = ("peak", "of", LONGEST_COLUMN, "full beyond", "host", "disk", "peak in")
    peaks: list[tuple[str, ...]] = [("peaks in GB", *names)]
    for phase in phases:
        parts.append((phase.name, *(_cell(phase.parts.get(part, 0.0)) for part in PARTS)))
        full = _full_beyond(forecast, phase)
        peaks.append((*_row(forecast, phase), full, _cell(phase.host), _cell(phase.disk), phase.where or "-"))
    tables = [*aligned(parts), "", *aligned(peaks), COLUMNS, _legend(forecast)] if phases else []
    host = _host(forecast, phases) if phases else []
    return "\n".join([*_unknown(forecast), *tables, *_states(forecast), *host, *_streams(forecast)])


def verdict_text(forecast: MemoryForecast) -> str:
    """Return the last line of `rlx check`: the processes, and the largest phase that does not fit, or the one nearest to its limit."""
    trainer, machine = forecast.config.trainer, forecast.machine
    where = f"{trainer.n_gpus_per_node * trainer.nnodes} {'GPU(s)' if forecast.on_device else 'CPU process(es)'}"
    if forecast.on_device and machine.cluster is None and machine.gpus < trainer.n_gpus_per_node:
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


def _cell(nbytes: float) -> str:
    return gb(nbytes) if nbytes else "-"


def _row(forecast: MemoryForecast, phase: Phase) -> tuple[str, ...]:
    if phase.limit is None:
        return (phase.name, gb(phase.peak), "?", "?")
    longest, positions = forecast.longest(phase.name), fewest_positions(forecast.config)
    if longest is not None and positions is not None:
        longest = min(
            longest, positions
        )  # a table of positions ends there, and rotary embeddings were not trained beyond
    text = "any" if longest is None else f"{longest:,}" if longest else "none"
    return (phase.name, gb(phase.peak), gb(phase.limit), text)


def _full_beyond(forecast: MemoryForecast, phase: Phase) -> str:
    """Return what is full first with longer sequences than those that fit: `device` or `host`, or the model's `positions`."""
    longest = None if phase.limit is None else forecast.longest(phase.name)
    if longest is None:
        return "-"
    if (positions := fewest_positions(forecast.config)) is not None and positions <= longest:
        return "positions"
    return "device" if not forecast.phase(phase.name, longest + LENGTH_STEP).fits_device() else "host"


def _legend(forecast: MemoryForecast) -> str:
    what = "a device" if forecast.on_device else "the host for each process"
    whole = "not known here" if forecast.memory_bytes is None else f"{gb(forecast.memory_bytes)} GB, less a reserve"
    return (
        f"memory of {what}: {whole}; predicted for sequences of {forecast.length:,} tokens, the longest that the "
        "configuration allows (docs/planning.md)"
    )


def _states(forecast: MemoryForecast) -> list[str]:
    """Return a line for each role whose optimizer state is split over device and host."""
    return [
        f"optimizer state: of the {name}'s {gb(staying + moving)} GB in each process {gb(staying)} stay on the device and "
        f"{gb(moving)} are in host memory"
        for name, staying, moving in forecast.decided().split_states()
    ]


def _host(forecast: MemoryForecast, phases: list[Phase]) -> list[str]:
    most = max(phases, key=lambda phase: phase.host)
    if not most.host:
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
