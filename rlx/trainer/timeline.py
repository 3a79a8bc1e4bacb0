"""When a step did what: phases on the driver, the requests of each engine, how busy each process was, and offloading's copies.

`timeline.json` in a run's folder keeps the last step and the slowest one.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlx.checkpoint.folders import replacing_file
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import has_reward_model, sharded_roles
from rlx.errors import storing
from rlx.trainer.progress import PHASES, Span, duration
from rlx.trainer.tracking import TrackingError

TIMELINE_FILE = "timeline.json"
WRITE_S = 20.0  # from one write to the next, at least: it takes 60 ms with 64 processes
MOST_READINGS = 4_000  # of all processes in a step
COPIES = ("offloaded_bytes", "copied_bytes", "disk_bytes", "stall_ms")
MUCH = 0.25  # of a phase, from which on a cause is named; a sampler with fewer of its requests left is in its tail
BLUE, LIGHT, GREEN, RED, GREY = "#2563eb", "#93b4f5", "#16966b", "#c8324a", "#7b8794"

Bar = tuple[float, float, float, str, str]
"""From when to when in a picture [s], height from 0 to 1, colour, name."""
Step = dict[str, Any]
"""
step, seconds: its number and duration
pace: seconds without validation and checkpoint; 0 for the first step of a process, which includes what is done once, such as compilation
phases: [name, start, end] of each, in seconds from the step's beginning
processes: of each the lists of `ReadingLog.take`, with `at` in seconds from the step's beginning in place of `age`
copies: COPIES of each role that offloads
queue: partial/... and staleness/... of the metrics, if there are any
"""


class Timeline:
    """Collects a run's steps; `read` and `end` are called in each. `costs` are of all after this process's first one."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / TIMELINE_FILE
        self._kept: dict[str, Step] = {}  # last and slowest
        self.costs = Counter[str]()
        self._steps = 0
        self._processes: list[defaultdict[str, list[float]]] = []
        self._due_s = 0.0

    def rewind(self, step: int) -> None:
        """Continue the file of a run that goes on from this step. Raises TrackingError: it is damaged, so it begins anew."""
        self._kept = {name: each for name, each in read_timeline(self._file).items() if each["step"] <= step}

    def read(self, readings: Sequence[Mapping[str, list[float]]]) -> None:
        """Take what each process has just recorded, see `ReadingLog.take`."""
        now = time.perf_counter()
        self._processes = self._processes or [defaultdict(list) for _ in readings]
        for process, new in zip(self._processes, readings, strict=True):
            for name in process.keys() - new.keys():  # NVML has failed meanwhile
                del process[name]
            for name, values in new.items():
                process[name] += [now - age for age in values] if name == "age" else values

    def end(self, step: int, began: float, spans: Sequence[Span], metrics: Mapping[str, float]) -> None:
        """Take a finished step with its `timing_s/...`; keep it if it is the slowest."""
        every = 1 + sum(len(process["age"]) for process in self._processes) // MOST_READINGS
        processes = []
        for readings in self._processes:
            times = [at - began for at in readings.pop("age", [])]
            own = [index for index, at in enumerate(times) if at >= 0][::every]
            columns = {"at": times, **readings}.items()
            processes.append({name: [round(values[index], 3) for index in own] for name, values in columns})
        self._processes = []
        outside = sum(end - start for name, start, end in spans if name in ("validate", "checkpoint"))
        roles = sorted({name.split("/")[2] for name in metrics if name.startswith("perf/offload/")})
        new: Step = {
            "step": step,
            "seconds": round(metrics["timing_s/step"], 3),
            "pace": round(metrics["timing_s/step"] - outside, 3) if self._steps else 0.0,
            "phases": [[name, *(round(at - began, 3) for at in ends)] for name, *ends in spans],
            "processes": processes,
            "copies": {role: {name: metrics[f"perf/offload/{role}/{name}"] for name in COPIES} for role in roles},
        }
        if queue := {name: x for name, x in metrics.items() if name.startswith(("partial/", "staleness/"))}:
            new["queue"] = queue
        if self._steps == 1:
            self.costs.clear()
        self.costs += costs_of(new)
        self.costs["sampling"] += metrics.get("perf/rollout/generate_s", 0.0)
        self._steps += 1
        self._kept = {"last": new, "slowest": max(self._kept.get("slowest", new), new, key=itemgetter("pace"))}
        if time.monotonic() >= self._due_s:
            self.write()

    def write(self) -> None:
        """Replace the file, unless no step has ended. Raises StorageError."""
        if self._steps:
            with storing(self._file), replacing_file(self._file) as file:
                json.dump(self._kept, file, separators=(",", ":"))
            self._due_s = time.monotonic() + WRITE_S


def costs_of(step: Step) -> Counter[str]:
    """Return `steps`, which is 1, and what the step cost [s]: `step`, each phase by its name, and `stall/<role>`, waits for offloading.

    Of the phase rollout `tail`, the last part, in which no process had more than MUCH of its requests left; and of the time before it,
    as means over processes, `waiting`, with requests that waited for a place; `no request`, although samples were missing; and
    `no kernel` on the GPU, as far as that is known. `cpu` is above 0 if there is no GPU.
    """
    found = Counter[str](steps=1, step=step["seconds"], cpu=sum("CPU busy" in each for each in step["processes"]))
    found.update({f"stall/{role}": copied["stall_ms"] / 1e3 for role, copied in step["copies"].items()})
    samplers = [process for process in step["processes"] if "engine 1 running" in process]
    for phase, start, end in step["phases"]:
        found[phase] += end - start
        if phase != "rollout" or not samplers:
            continue
        full = start  # when the last process still had more requests than in its tail
        for process in samplers:
            names = [[name for name in process if name.endswith(what)] for what in (" running", " waiting")]
            running, waiting = ([*map(sum, zip(*(process[name] for name in each), strict=True))] for each in names)
            ends = pairwise(min(max(at, start), end) for at in [*process["at"], end])
            readings = zip(ends, running, waiting, process.get("GPU busy", [1.0] * len(running)), strict=True)
            parts = [(*own, *values) for own, *values in readings if own[0] < own[1]]
            most = MUCH * max(running, default=0)
            at_work = [(since, until) for since, until, requests, *_ in parts if requests > most] or [(start, start)]
            full = max(full, at_work[-1][1])
            for since, until, requests, waits, busy in parts:
                if at_work[0][0] <= since < at_work[-1][1]:
                    seconds = (until - since) / len(samplers)
                    found["waiting"] += seconds * (waits > 0)
                    found["no request"] += seconds * (requests + waits == 0)
                    found["no kernel"] += seconds * (1 - busy)
        found["tail"] += end - full
    return found


def costliest(costs: Mapping[str, float], config: PPOConfig, start_s: float) -> str:
    """Say which phase cost most and the key to turn for a known cause; first the start if it took longer; empty without steps."""
    phases = {name: costs[name] for name in PHASES if costs.get(name)}
    if not phases:
        return ""
    phase = max(phases, key=lambda name: phases[name])
    each, step = (duration(costs[name] / costs["steps"]) for name in (phase, "step"))
    why = next((f": {text}" for is_cause, text in _causes(phase, costs, config) if is_cause), "")
    start = f"start-up, {duration(start_s)}, which a longer run pays once; then " if start_s > costs["step"] else ""
    found = f"{start}{phase.replace('_', ' ')}, {each} of {step} a step ({costs[phase] / costs['step']:.0%}){why}"
    return f"{found}. {balance}" if (balance := _balance(costs, config)) else found


def _balance(costs: Mapping[str, float], config: PPOConfig) -> str:
    """Say what both sides of a run with samplers of their own take of a step, and which numbers of GPUs would make these alike."""
    trainer = config.trainer
    if not (trainer.n_rollout_gpus and costs.get("sampling")):
        return ""
    training = sum(costs.get(name, 0.0) for name in PHASES if name not in ("rollout", "validate", "checkpoint"))
    work, counts = (costs["sampling"], training), (trainer.n_rollout_gpus, trainer.n_gpus_per_node)
    of_one = [seconds * count for seconds, count in zip(work, counts, strict=True)]
    whole = trainer.processes_per_node
    tensor = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    sequence = [role.sequence_parallel_size for role in sharded_roles(config)]
    fits = [n for n in range(tensor, whole, tensor) if not any((whole - n) % size for size in sequence)]
    best = min(fits, key=lambda n: max(of_one[0] / n, of_one[1] / (whole - n)), default=counts[0])
    each = (f"{duration(seconds / costs['steps'])} on {n}" for seconds, n in zip(work, counts, strict=True))
    said = "Of a step sampling takes {}, training {} GPU(s) of a machine".format(*each)
    if best == counts[0]:
        return said
    return f"{said}; set trainer.n_rollout_gpus={best} trainer.n_gpus_per_node={whole - best}"


def _causes(phase: str, costs: Mapping[str, float], config: PPOConfig) -> Iterator[tuple[bool, str]]:
    """Yield the known causes of a costly phase: whether it is this one, and what to do then."""
    role, rollout, on_gpu = phase.removeprefix("update_"), config.actor_rollout_ref.rollout, not costs.get("cpu")
    names = ("tail", "no request", "no kernel", "waiting", f"stall/{role}")
    tail, idle, unused, waiting, stall = (costs.get(name, 0.0) / costs[phase] for name in names)
    if phase == "rollout":
        yield on_gpu and rollout.name == "hf", "transformers samples; set actor_rollout_ref.rollout.name=vllm"
        key, is_apart = "actor_rollout_ref.rollout.partial.max_staleness", config.trainer.n_rollout_gpus > 0
        shorter = f"set {key}=2 (docs/async.md), or lower data.max_response_length"
        if rollout.partial.max_staleness > is_apart:
            shorter = f"raise actor_rollout_ref.rollout.partial.round_tokens, or {key}"
        yield tail > MUCH, f"{tail:.0%} of it waits for few long answers; {shorter}"
        turns = f"sampler and trainer take turns; set {key}=1 (docs/async.md)"
        yield is_apart and not rollout.partial.max_staleness, turns
        yield idle > MUCH, f"no request runs in {idle:.0%} of it, while environments work; raise environment.processes"
        engines = f"the GPU waits for vLLM in {unused:.0%} of it; raise actor_rollout_ref.rollout.engines_per_gpu"
        yield rollout.tensor_model_parallel_size == 1 and unused > MUCH, engines
        yield waiting > 2 * MUCH, f"requests wait in {waiting:.0%} of it; raise actor_rollout_ref.rollout.max_num_seqs"
    yield phase == "reward" and not has_reward_model(config), "raise reward.num_workers if there are cores"
    yield phase == "old_log_prob", "algorithm.rollout_correction.bypass_mode=True takes the sampler's (docs/rollout.md)"
    save = f"{'critic' if role == 'critic' else 'actor_rollout_ref'}.model.activation_offload.save=auto copies less"
    yield on_gpu and stall > MUCH / 2, f"compute waits for offloading's copies in {stall:.0%} of it; {save}"
    yield phase == "validate", "raise trainer.test_freq, or lower data.val_max_samples"
    yield phase == "checkpoint", "raise trainer.save_freq, or set actor_rollout_ref.actor.checkpoint.async_save=True"


def pictures(kept: Mapping[str, Step]) -> dict[str, tuple[float, dict[str, list[Bar]]]]:
    """Return seconds and rows of the pictures of a file's steps by title; of a step that is both last and slowest one picture."""
    names = {step["step"]: [name for name in kept if kept[name]["step"] == step["step"]] for step in kept.values()}
    steps = {f"{' and '.join(names[step['step']]).capitalize()} step {step['step']}": step for step in kept.values()}
    return {title: (step["seconds"], _rows(step)) for title, step in steps.items()}


def _rows(step: Step) -> dict[str, list[Bar]]:
    """Return the bars of each row: phases, the tail, the readings of each process, and waits for offloading's copies."""
    queue = step.get("queue", {})
    colors = {name: PHASES[name].color if name in PHASES else GREY for name, *_ in step["phases"]}
    bars = [(start, end, 1.0, colors[name], name.replace("_", " ")) for name, start, end in step["phases"]]
    rows: dict[str, list[Bar]] = {"phases": bars}
    if (costs := costs_of(step))["tail"] > 0:
        share, has_rounds = costs["tail"] / costs["rollout"], "partial/queued_prompts" in queue
        key = "raise partial.round_tokens, or partial.max_staleness" if has_rounds else "set partial.max_staleness=2"
        rows[f"tail, {share:.0%} of rollout waits for few long answers{f'; {key}' if share > MUCH else ''}"] = [
            (end - costs_of({**step, "phases": [[name, start, end]]})["tail"], end, 1.0, RED, "tail")
            for name, start, end in step["phases"]
            if name == "rollout"
        ]
    if queue:
        names = ("queued_prompts", "unfinished_samples", "continued_tokens")
        prompts, samples, tokens = (queue.get(f"partial/{name}", 0) for name in names)
        gaps = {name[14:-6]: share for name, share in queue.items() if name.startswith("staleness/gap_")}
        width = step["seconds"] / max(1, len(gaps))
        row = f"{prompts:,.0f} prompts wait, {samples:,.0f} samples go on; {tokens:,.0f} tokens did; by updates behind"
        shares = enumerate(gaps.items())  # a histogram as wide as the step
        rows[row] = [(at * width, (at + 1) * width, x, LIGHT, f"{gap}: {x:.0%}") for at, (gap, x) in shares]
    for number, process in enumerate(step["processes"], 1):
        for name in sorted(process.keys() - {"at"}):
            values = [value - process[name][0] * (name == "tokens") for value in process[name]]
            is_share, most = name.endswith("busy"), max(values, default=0)
            color = GREEN if is_share else LIGHT if name.endswith("waiting") else BLUE
            label = f"process {number}, {name}{'' if is_share else f' (max {most:,.0f})'}"
            ends = pairwise([*process["at"], step["seconds"]])
            known = ((*own, value) for own, value in zip(ends, values, strict=True) if value > 0)
            bars = [(*own, value / (1 if is_share else most), color, f"{value:g}") for *own, value in known]
            rows |= {label: bars} if bars else {}
    for role, copied in step["copies"].items():
        out, both, disk = (copied[name] / 1e6 for name in COPIES[:3])
        row = f"{role} waits for copies: {out:,.0f} MB out, {max(0, both - out):,.0f} in{f', disk {disk:,.0f}' if disk else ''}"
        start = next((start for name, start, _ in step["phases"] if name == f"update_{role}"), 0.0)
        rows[row] = [(start, start + copied["stall_ms"] / 1e3, 1.0, RED, "wait")]
    return rows


def read_timeline(path: Path) -> dict[str, Step]:
    """Return the `last` and the `slowest` step of a run; {} without a file. Raises TrackingError: it is none."""
    if not (path.exists() or path.is_symlink()):
        return {}
    try:
        if not path.is_file():  # a pipe would never end
            raise ValueError("no regular file")
        kept = json.loads(path.read_bytes())
        for step in kept.values():
            numbers = [step["step"], step["seconds"], step["pace"]]
            numbers += step.get("queue", {}).values()
            numbers += [copied[name] for copied in step["copies"].values() for name in COPIES]
            for name, start, end in step["phases"]:
                numbers += [start, end, len(name.strip())]
            for process in step["processes"]:
                is_table = all(type(each) is list and len(each) == len(process["at"]) for each in process.values())
                numbers += [value for each in process.values() for value in each] if is_table else [None]
            if not all(type(each) in (int, float) and 0 <= each < 1 << 53 for each in numbers):
                raise ValueError("expected numbers from 0 on, in lists of one length")
        return {name: kept[name] for name in ("last", "slowest") if name in kept}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise TrackingError(f"{path}: is no timeline ({type(fault).__name__}: {fault}); remove it") from None
