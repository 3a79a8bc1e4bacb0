"""The driver: compose, check, run. `rlx.main_ppo` starts it as a child; `python -m rlx.driver` runs it without restarts."""

import argparse
import atexit
import logging
import multiprocessing.util
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rlx.cluster import let_idle_threads_sleep, stay_on_this_machine
from rlx.cluster.errors import WorkerFailure, end_of
from rlx.config.check.folders import runs_folder, warm_starts_folder
from rlx.config.check.rules_memory import after_full_memory
from rlx.config.check.validate import check
from rlx.config.choices import PROMPTS, chosen, most_prompts, not_chosen, why_fewer, with_reason
from rlx.config.compose.command_line import Composed, compose
from rlx.config.describe import help_text
from rlx.config.faults import Fault, numbered
from rlx.config.forecast.decoders import fetch_configs
from rlx.config.forecast.forecast_text import checkpoint_text, long_text, short_text, verdict_text
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Cluster, Machine, inspect_machine, named_machine
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import is_tiny
from rlx.config.secrets import override_without_secrets
from rlx.errors import ExplainedError, shown, wrapped
from rlx.program import beside_python, continuing, program
from rlx.step_folders import steps_in
from rlx.supervisor.link import Terminated, tell
from rlx.trainer import try_inputs
from rlx.trainer.checkpoints import end_of_run
from rlx.trainer.launch import launch
from rlx.trainer.resume_config import faults_of_resume

DONE, FAILED, FAULTY, INTERRUPTED, PIPE_CLOSED, TERMINATED = 0, 1, 2, 130, 141, 143


def main(arguments: Sequence[str]) -> int:
    """Compose, check and run as the command line's arguments say, and return the exit code.

    0: done. 1: the run failed, with its first cause on the last line of standard error. 2: the configuration has faults, all of them
    listed. 130: Ctrl-C. 141: the reader of standard output ended first. 143: SIGTERM.
    """
    let_idle_threads_sleep()
    try:
        if "--help" in arguments or "-h" in arguments:
            print(help_text())
            return DONE
        try:
            os.getcwd()
        except FileNotFoundError:
            print("rlx: the working folder is gone; change to one that exists", file=sys.stderr)
            return FAULTY
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a name may not be UTF-8
        options, overrides = read_options(arguments)
        return _check_and_run(overrides, options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Terminated:
        return TERMINATED
    except BrokenPipeError:  # the reader of the output has ended, as in `rlx check --tree | head`
        return PIPE_CLOSED
    except ValueError as error:
        print(f"rlx: {error}", file=sys.stderr)
        return FAULTY


class DriverOptions(NamedTuple):
    """What the command line asks for beside the configuration."""

    check: bool  # only check, and predict memory; `on` does without being asked
    is_asked: bool  # whether the command line itself asks for a check
    tree: bool  # print the whole configuration too
    on: Machine | None  # the machine to check for instead of this one


def read_options(arguments: Sequence[str]) -> tuple[DriverOptions, list[str]]:
    """Return the options, and the overrides among the arguments. Raises ValueError for a machine that is not known."""
    parser = argparse.ArgumentParser(prog=program("check"), add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tree", action="store_true")
    parser.add_argument("--on")
    try:
        found, overrides = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}, such as --on 8xh100") from None
    on = None if found.on is None else named_machine(found.on)
    return DriverOptions(found.check or on is not None, found.check, found.tree, on), overrides


def _check_and_run(overrides: Sequence[str], options: DriverOptions) -> int:
    composed = compose(overrides)
    # The cluster is joined once for both check and run, because joining takes seconds.
    with ExitStack() as until_done:
        machine = options.on or inspect_machine(join_cluster(composed.partial, until_done))
        of_hub = fetch_configs(composed.partial)
        unchosen = not_chosen(overrides, composed)
        rows = try_inputs.training_rows(composed.partial, PROMPTS)
        if more := chosen(overrides, composed, machine, rows):
            if not composed.faults:
                chose = f"chosen for this command and machine; set a key to choose yourself:\n    {'  '.join(more)}"
                print(wrapped(chose + why_fewer(rows, more, most_prompts(composed, machine))))
            composed = compose([*overrides, *more])
        composed = with_nodes(composed, machine)
        checked = check(composed, machine)
        data = try_inputs.check_data(composed.partial, composed.broken)
        models = try_inputs.check_models(composed.partial, composed.broken, machine)
        tried = try_inputs.check_user_code(composed.partial, composed.broken, machine)
        # Another machine may have the model of a check.
        found: tuple[Fault, ...] = (*checked.faults, *models, *data, *tried.faults, *(() if options.check else of_hub))
        over = end_of_run(composed.partial)
        if not composed.faults and options.on is None and over is None:
            found += faults_of_resume(composed.config, composed.yaml)
        if options.check and not found and try_inputs.tries_start(composed.config, options.on is None):
            from rlx.trainer.start import faults_at_start  # loads torch and transformers

            found = faults_at_start(composed.config, is_here=options.on is None)
        faults = tuple(with_reason(fault, unchosen) for fault in found)
        if options.tree and not composed.faults:
            print(composed.yaml)
        if options.check and not composed.faults:
            _print_plan(composed, machine)
        warnings = (*checked.warnings, *tried.warnings, *(over[1:] if over and options.check else ()))
        for warning in (*warnings, *(of_hub if options.check else ())):
            print(wrapped(f"warning: {warning}"), file=sys.stderr, flush=True)
        if faults:
            listed = f"{len(faults)} fault(s) in the configuration:\n{numbered(faults)}"
            print(wrapped(listed), file=sys.stderr, flush=True)
        if options.check:
            if not options.is_asked:
                print("nothing was started: --on only checks")
            print(f"rlx check: {_verdict(composed, machine, len(faults))}")
        if faults or options.check:
            return FAULTY if faults else DONE
        given = [override_without_secrets(each) for each in overrides]
        if over:
            folder, text = over
            print(wrapped(text), *next_commands(folder, given), sep="\n")
            return DONE
        forecast = MemoryForecast.of(composed.config, machine)
        trainer = composed.config.trainer
        if "console" in trainer.logger and trainer.memory_check != "off":
            print(wrapped(short_text(forecast)), flush=True)
        tell(overrides=given)
        return _run(composed, forecast.decided(), given)


def _print_plan(composed: Composed, machine: Machine) -> None:
    """Print the memory by phase, and how to ask for another machine if this one has no GPU."""
    forecast = MemoryForecast.of(composed.config, machine)
    lines = checkpoint_text(forecast, None if machine.name else runs_folder(composed.config))
    if is_tiny(composed.config) and not machine.name:
        cache = warm_starts_folder(composed.config)
        kept = len([*cache.glob("warm_start_*")])
        lines.append(
            "warm start: before step 1 builtin:tiny learns by imitation, about 4 minutes on two cores, unless these settings did "
            f"before; {cache} keeps each result and has {kept}"
        )
    if (told := try_inputs.isolation_of_programs(composed.partial)) and not machine.name:
        lines.append(told)
    if not forecast.on_device and composed.partial.trainer.device == "auto" and not is_tiny(composed.partial):
        train, here = program("train"), program("check")
        lines.append(
            f"this machine has no GPU, so {train} would use its CPU; to check for another one: {here} --on 8xh100 …"
        )
    print(wrapped("\n".join([long_text(forecast), *lines])), flush=True)


def _verdict(composed: Composed, machine: Machine, faults: int) -> str:
    """Return the last line of a check: the number of faults, and whether the memory suffices, if that is known."""
    found = f"{faults} fault(s), listed above" if faults else "valid"
    if composed.faults:
        return found
    elsewhere = "; its packages are not checked" if machine.name else ""
    return f"{found}; {verdict_text(MemoryForecast.of(composed.config, machine))}{elsewhere}"


def with_nodes(composed: Composed, machine: Machine) -> Composed:
    """Return the command line for the nodes that are there, if `trainer.min_nodes` lets some stay away."""
    trainer = composed.partial.trainer
    least = trainer.min_nodes
    if least is None or least >= trainer.nnodes or machine.cluster is None or machine.cluster.error:
        return composed
    from rlx.cluster.placement import nodes_to_take

    nodes = nodes_to_take(trainer.nnodes, least, 0 if trainer.device == "cpu" else trainer.processes_per_node)
    if nodes == trainer.nnodes:
        return composed
    print(f"warning: the run takes {nodes} of {trainer.nnodes} nodes, because others stay away", file=sys.stderr)
    partial = replace(composed.partial, trainer=replace(trainer, nnodes=nodes))
    return replace(composed, partial=partial)


def next_commands(folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return the commands that one may want after a run with these overrides, each with a comment."""
    lines, shown = [], shlex.quote(str(folder))
    for step, saved in [*steps_in(folder / "checkpoints").items()][-1:]:
        lines.append(f"{program('export')} {shlex.quote(str(saved))} my-model   # the policy as a Hugging Face folder")
        more = continuing(saved, overrides, f"trainer.total_training_steps={2 * step}")
        lines.append(f"{more}   # continues from step {step} to {2 * step}")
    if (folder / "transcripts").exists() or (folder / "timeline.json").exists():
        lines.append(f"{program('view')} {shown}   # samples and timelines, as a page for a browser")
    if (folder / "tensorboard").exists():
        lines.append(f"{beside_python('tensorboard')} --logdir {shown}   # the curves")
    return lines


def _run(composed: Composed, forecast: MemoryForecast, overrides: Sequence[str]) -> int:
    config = forecast.config
    tell(max_restarts=config.trainer.max_restarts)
    try:
        folder = launch(config, composed.yaml)
    except ExplainedError as error:
        if error.__cause__ is not None:
            print(shown(error.__cause__), file=sys.stderr)
        stopped = f"\nrlx stopped: {error}"
        print(wrapped(stopped) if error.may_be_wrapped else stopped, file=sys.stderr)
        if isinstance(error, WorkerFailure) and error.fault.kind == "memory":
            print(wrapped(after_full_memory(forecast)), file=sys.stderr)
        tell(end=end_of(error))
        return FAILED
    except Exception as error:
        if (end := _asked_to_end(error)) is not None:
            raise end from None
        traceback.print_exception(error)
        print(f"\nrlx stopped: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        tell(end=end_of(error))
        return FAILED
    for command in () if config.trainer.val_only else next_commands(folder, overrides):
        print(command)
    return DONE


def _asked_to_end(error: BaseException | None) -> BaseException | None:
    """Return the Ctrl-C or SIGTERM behind a SystemError: as such comes a signal during a call of Ray's compiled code."""
    while isinstance(error, SystemError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, KeyboardInterrupt | Terminated) else None


def join_cluster(config: PPOConfig, until_done: ExitStack) -> Cluster | None:
    """Return the cluster that the run joins until `until_done` closes, with its machines' GPUs; None if Ray is to start here."""
    address = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        stay_on_this_machine()
        return None
    import ray

    from rlx.cluster.runtime import session

    try:
        until_done.enter_context(session(config))
        nodes = [node for node in ray.nodes() if node["Alive"]]
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        return Cluster(address, error=" ".join(str(error).split()))
    return Cluster(address, tuple(int(node["Resources"].get("GPU", 0)) for node in nodes))


def _leave(codes: list[int]) -> None:
    """End without the teardown of torch's and transformers' modules, which takes 0.6 s, if `main` has returned.

    Handlers that imports registered before this one would not run any more: those of logging and multiprocessing run here.
    """
    if codes and sys.gettrace() is None and sys.getprofile() is None:
        multiprocessing.util._exit_function()
        logging.shutdown()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    codes: list[int] = []
    atexit.register(_leave, codes)  # what is registered first runs last
    codes.append(main(sys.argv[1:]))
    sys.exit(codes[0])
