"""Evaluate trained policies: `python -m rlx.trainer.evaluate [RUN | CHECKPOINT | FOLDER ...] [--all] [--out FILE] [key=value ...]`.

Each policy is validated by a driver of its own, with the settings that it was trained with. Its folder keeps what is finished:

<run>/evaluations/<digest>/     of a Hugging Face folder in outputs/; the digest is of all that samples depend on, which settings.json lists
    N.jsonl                     samples of step N
    N.json                      its metrics, and the rows of the table
    N.parts.jsonl               until then the parts that are finished, see `PartsFile`
"""

import argparse
import glob
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rlx import __version__
from rlx.checkpoint.manifest import MANIFEST
from rlx.config.compose.command_line import MODEL_KEY, compose
from rlx.config.schema.tree import LEAVES, value_at
from rlx.config.secrets import override_without_secrets
from rlx.errors import ExplainedError, storing, wrapped
from rlx.program import program
from rlx.supervisor.link import handling
from rlx.trainer.checkpoints import EVALUATION
from rlx.trainer.finished import Policy, policies_at, written

PART = 2048
"""Samples that are generated together, and the most that an interruption loses."""
PARTS = "data.val_batch_size"


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, print a table and write it as JSON. Returns 0; 2 for faults, which are listed; or the code of a driver that failed."""
    parser = argparse.ArgumentParser(
        prog=program("eval"),
        description="Validate trained policies on data or an environment, with the settings of their run, and print avg@n and pass@k.",
        epilog="key=value: as for training, such as data.val_files=test.parquet actor_rollout_ref.rollout.val_kwargs.n=8",
    )
    parser.add_argument(
        "policies", nargs="*", metavar="POLICY", help="a run, a .../global_step_N, a Hugging Face folder"
    )
    parser.add_argument("--all", action="store_true", help="all checkpoints of a run, not only the newest")
    parser.add_argument("--out", type=Path, help="JSON file (default: evaluation.json beside the samples)")
    chosen, more = parser.parse_known_intermixed_args(arguments)
    given = [
        each for each in (*chosen.policies, *more) if each.startswith("-") or ("=" in each and not os.path.exists(each))
    ]
    try:
        policies = [one for each in chosen.policies if each not in given for one in policies_at(each, chosen.all)]
        if not policies:
            models = [each.partition("=")[2] for each in given if each.startswith(f"{MODEL_KEY}=")]
            if not models:
                parser.error(f"name a run, a checkpoint or a Hugging Face folder, or set {MODEL_KEY}")
            policies = [Policy(Path(models[-1]), None, [])]
        commands = [command_of(policy, given) for policy in policies]
        out, found = chosen.out or commands[0][0] / "evaluation.json", []
        with storing(out.parent, "evaluate again"):
            out.parent.mkdir(parents=True, exist_ok=True)
        for policy, (folder, overrides) in zip(policies, commands, strict=True):
            result = folder / f"{policy.step}.json"
            if not result.exists() and (code := _validate(overrides)):
                print(
                    f"{program('eval')}: {policy.folder} was not evaluated, see above; the same command continues",
                    file=sys.stderr,
                )
                return code
            found.append({"policy": str(policy.folder), "step": policy.step, "samples": str(folder)})
            found[-1] |= json.loads(result.read_text())
        with storing(out, "evaluate again"):
            out.write_text(json.dumps(found, indent=1) + "\n")
    except (ExplainedError, OSError, ValueError) as error:
        print(wrapped(f"{program('eval')}: {error}"), file=sys.stderr)
        return 2
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table(found))
    print(
        f"intervals: 95 %, normal, over prompts\ntable     {out}",
        *(f"samples   {each[0]}" for each in commands),
        sep="\n",
    )
    return 0


def command_of(policy: Policy, given: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the folder of an evaluation, which is made, and the driver's overrides. Raises ValueError for faults of overrides."""
    overrides = policy.with_given(given)
    composed = compose(overrides)
    config = composed.config
    val = config.actor_rollout_ref.rollout.val_kwargs
    added = ["trainer.val_only=True", "trainer.logger=[console]"]
    if "data.val_files" in composed.set_keys:  # else a check compares the default with the run's own rows
        added.append(f"data.train_files={written(list(config.data.val_files))}")
    elif policy.checkpoint is None and config.custom_reward_function.is_set:
        remedy = "set data.val_files=held_out.jsonl, say, or to builtin:arithmetic, the generated problems"
        raise ValueError(f"data.val_files: not set, expected rows that your reward function can score; {remedy}")
    # The manager `batch` scores all together
    if config.data.val_batch_size is None and config.reward.reward_manager.name != "batch":
        added.append(f"{PARTS}={max(1, PART // (val.n if val.do_sample else 1))}")
    if config.trainer.n_rollout_gpus:
        added.append("trainer.n_rollout_gpus=0")  # nothing trains
    if policy.checkpoint is not None:
        added += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={written(str(policy.checkpoint))}"]
    paths = {key: value_at(config, key) for key, leaf in LEAVES.items() if leaf.info.is_path}
    used = {key: list(value) if isinstance(value, tuple) else [value] for key, value in paths.items() if value}
    for place, part in enumerate(config.custom_reward_function.parts):
        used[f"custom_reward_function.parts[{place}]"] = [each for each in (part.path, part.template) if each]
    if policy.checkpoint is not None:
        used[MODEL_KEY] = [policy.checkpoint / MANIFEST]  # it has digests of all files
    files = {key: _files(names) for key, names in used.items()}
    known: dict[str, Any] = {"rlx": __version__, "overrides": [*overrides, *added], "files": files}
    text = json.dumps(known, indent=1)
    digest = hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
    base = policy.checkpoint.parent.parent if policy.checkpoint else Path.cwd() / "outputs"
    folder = base / "evaluations" / digest
    with storing(folder, "evaluate again"):
        folder.mkdir(parents=True, exist_ok=True)
        known["overrides"] = [override_without_secrets(each) for each in known["overrides"]]
        (folder / EVALUATION).write_text(json.dumps(known, indent=1))
    return folder, [
        *Policy(folder, None, overrides).with_given(added),
        f"trainer.validation_data_dir={written(str(folder))}",
    ]


def _files(names: Iterable[str | Path]) -> dict[str, Any]:
    """Return size and time of files by name, and of those in folders and behind patterns."""
    found = [Path(name).expanduser() for name in names]
    paths = [
        Path(each) for path in found for each in ([path] if path.exists() else glob.glob(str(path), recursive=True))
    ]
    files = [each for path in paths for each in (sorted(path.glob("*")) if path.is_dir() else [path]) if each.is_file()]
    return {str(each): [each.stat().st_size, each.stat().st_mtime_ns] for each in files}


def _validate(overrides: Sequence[str]) -> int:
    """Run a driver and return its exit code; signals reach it too."""
    with subprocess.Popen([sys.executable, "-m", "rlx.driver", *overrides]) as driver:
        passed_on = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), lambda number, _: driver.send_signal(number))
        with handling({signal.SIGINT: signal.SIG_IGN, **passed_on}):
            return driver.wait()


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Return a row for each policy and data source, and a column for each number; none for scores that are accuracies."""
    different = any(
        not math.isclose(one["metrics"]["val/accuracy"], one["metrics"]["val/reward"], rel_tol=1e-6) for one in found
    )
    names = dict.fromkeys(row["name"] for one in found for row in one["rows"])
    columns = [name for name in names if different or not name.startswith("reward ")]
    drawn = Table(box=box.SIMPLE)
    for title in ("policy", "data", "prompts"):
        drawn.add_column(title, overflow="fold")
    for title in columns:
        drawn.add_column(title, justify="right")
    shared = os.path.commonpath([Path(one["policy"]).parent for one in found])
    for one in found:
        of_source: dict[str, dict[str, dict[str, Any]]] = {}
        for row in one["rows"]:
            of_source.setdefault(row["data_source"], {})[row["name"]] = row
        for source, rows in of_source.items():
            cells = [_cell(rows.get(name)) for name in columns]
            drawn.add_row(
                os.path.relpath(one["policy"], shared), source, str(next(iter(rows.values()))["prompts"]), *cells
            )
    return drawn


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['value']:.3f}" + ("" if row["high"] is None else f" ±{row['high'] - row['value']:.3f}")


if __name__ == "__main__":
    sys.exit(main())
