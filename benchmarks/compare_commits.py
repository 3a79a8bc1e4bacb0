"""Compare the metrics of two commits to the last digit: `python -m benchmarks.compare_commits OLD [NEW]`.

Six short runs on the CPU cover a dense model, LoRA, a critic, an environment, unshared prompts and two processes. OLD is a
commit, which is checked out into a temporary worktree, or a file that `--json` wrote before. NEW is a commit; without it the
checkout is compared as it is. Both use this Python and its packages. Times, rates and memory are left out. The first run of
each experiment warm-starts a model and caches it, which takes a minute.

With `--resume` NEW resumes the runs of OLD from their first step, so that the checkpoints of OLD are tried too.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERY = (
    *("trainer.device=cpu", "trainer.logger=[jsonl]", "data.train_batch_size=16"),
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "dense": (),
    "lora": ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"),
    "critic": ("algorithm.adv_estimator=gae",),
    "environment": ("experiment=calculator",),
    "unshared": ("actor_rollout_ref.model.use_shared_prefix=False", "actor_rollout_ref.actor.use_kl_loss=True"),
    "two_processes": ("trainer.n_gpus_per_node=2",),
}
LEFT_OUT = re.compile(r"^time|^timing|^perf/|_s$|_s/|memory|seconds|bytes|_gb$")

Rows = dict[str, dict[str, float]]  # step -> name -> value


@contextmanager
def checkout(commit: str | None) -> Iterator[Path]:
    """Yield a folder with the files of a commit; None: the checkout of this file."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="rlx-compare-") as made:
        folder = Path(made) / "checkout"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, commit], cwd=ROOT, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def rows_of(source: Path, name: str, steps: int) -> Rows:
    """Run `name` with the rlx in the folder `source`; return its metrics by step. Raises RuntimeError if the run fails."""
    with tempfile.TemporaryDirectory(prefix="rlx-compare-run-") as made:
        return _run(source, name, steps, made)


def resumed_rows(old: Path, new: Path, name: str, steps: int) -> tuple[Rows, Rows]:
    """Return the metrics of a run of the rlx in `old`, and those after the rlx in `new` has resumed it from step 1."""
    with tempfile.TemporaryDirectory(prefix="rlx-compare-run-") as made:
        before = _run(old, name, steps, made, "trainer.save_freq=1")
        [checkpoint] = Path(made).rglob("global_step_1")
        resume = "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"
        return before, _run(new, name, steps, made, "trainer.save_freq=1", *resume)


def _run(source: Path, name: str, steps: int, made: str, *more: str) -> Rows:
    keys = [*RUNS[name], *EVERY, *more, f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={made}"]
    fixed = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
    command = [sys.executable, "-m", "rlx.main_ppo", *keys]
    done = subprocess.run(
        command,
        cwd=source,
        env={**os.environ, **fixed},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    [file] = Path(made).rglob("metrics.jsonl") if done.returncode == 0 else [None]
    if file is None:
        raise RuntimeError(f"{' '.join(command)} in {source} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    rows = map(json.loads, file.read_text().splitlines())
    return {str(row["step"]): {key: row[key] for key in row if is_compared(key)} for row in rows}


def is_compared(metric: str) -> bool:
    """Return whether a metric is the same on every run of the same code."""
    return LEFT_OUT.search(metric) is None


def differences(old: Rows, new: Rows) -> list[str]:
    """Return a line for each metric that differs or is there once only; NaN equals NaN."""
    found = []
    for step in sorted({*old, *new}, key=int):
        before, after = old.get(step, {}), new.get(step, {})
        for name in sorted({*before, *after}):
            values = before.get(name), after.get(name)
            both_nan = all(isinstance(value, float) and math.isnan(value) for value in values)
            if values[0] != values[1] and not both_nan:
                found.append(f"step {step} {name}: {values[0]} -> {values[1]}")
    return found


def all_rows(commit: str | None, names: Sequence[str], steps: int) -> dict[str, Rows]:
    """Run each configuration once with the code of a commit."""
    with checkout(commit) as source:
        found = {}
        for name in names:
            print(f"{commit or 'this checkout'}: {name}", flush=True)
            found[name] = rows_of(source, name, steps)
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if any metric differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_commits", description=__doc__)
    parser.add_argument("old", help="commit, or a file of --json")
    parser.add_argument("new", nargs="?", help="commit (default: this checkout as it is)")
    parser.add_argument("--only", help=f"some of {','.join(RUNS)}, joined by commas")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run (default 3)")
    parser.add_argument("--json", type=Path, help="file to which the rows of OLD are written, for the next comparison")
    parser.add_argument("--resume", action="store_true", help="let NEW resume the runs of OLD from their first step")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else list(RUNS)
    if unknown := set(names) - set(RUNS):
        parser.error(f"--only: got {', '.join(sorted(unknown))}; expected some of {', '.join(RUNS)}")
    if options.resume:
        with checkout(options.old) as before, checkout(options.new) as after:
            pairs = {name: resumed_rows(before, after, name, options.steps) for name in names}
        old, new = ({name: pair[number] for name, pair in pairs.items()} for number in (0, 1))
    elif Path(options.old).is_file():
        old = json.loads(Path(options.old).read_text())
    else:
        old = all_rows(options.old, names, options.steps)
    if options.json:
        options.json.write_text(json.dumps(old))
    if not options.resume:
        new = all_rows(options.new, names, options.steps)
    wrong = {name: differences(old[name], new[name]) for name in names}
    for name, lines in wrong.items():
        metrics = sum(map(len, new[name].values()))
        print(f"{name}: {metrics} numbers in {len(new[name])} rows, {len(lines)} differ")
        print("".join(f"    {line}\n" for line in lines[:20]), end="")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
