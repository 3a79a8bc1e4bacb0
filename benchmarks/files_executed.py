"""Count the files of rlx that run in one step, and on the way of a saved tensor: `python -m benchmarks.files_executed [COMMIT]`.

- step: from the call of `Trainer.step` to the first optimizer step in it, in the driver and in the worker, on the second step of
  the default run on the CPU, with batches of 16 prompts.
- tensor: forward and backward of a two-layer model in boundary mode with all bytes offloaded, from the first pack to the last
  unpack, after a step that warms up.

With COMMIT its files are counted as well, in a temporary worktree, with this Python and its packages.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.compare_commits import EVERY, checkout

# Every Python process of the run imports this at its start. It compiles each function of rlx with a call that notes its file and
# the machine's clock. A profile function would do without that, but Python 3.11 hangs in it in processes with Ray's threads.
HOOK = """
import ast, builtins, os, time
from importlib.machinery import PathFinder

SOURCE, FOLDER = os.environ["RLX_SOURCE"] + "/rlx/", os.environ.get("RLX_CALLS")
last, files, seen = {}, {}, set()

def note(name):
    seen.add(name)
    now, process = time.monotonic_ns(), os.getpid()
    if FOLDER and (name[0] == "<" or now - last.get((process, name), 0) > 200_000):
        last[process, name] = now
        if process not in files:
            files[process] = os.open(f"{FOLDER}/{process}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(files[process], f"{now} {name}\\n".encode())

builtins.note_of_files_executed = note

def noted(file, source):
    tree = ast.parse(source)
    name = file.removeprefix(SOURCE) if file.startswith(SOURCE) else "<optimizer>"
    steps = {id(f) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and c.name == "Trainer" for f in c.body if getattr(f, "name", "") == "step"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = [name, "<step>"] if id(node) in steps else [name]
            for each in names:
                call = ast.parse(f"note_of_files_executed({each!r})").body[0]
                node.body.insert(ast.get_docstring(node) is not None, call)
    return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)

class Finder:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] != "rlx" and name != "torch.optim.adamw":
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            spec.loader.get_code = lambda _: noted(spec.origin, open(spec.origin).read())
        return spec

import sys
sys.meta_path.insert(0, Finder)
"""
TENSOR = """
import sitecustomize, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from rlx.offload import OffloadOptions, enable_activation_offloading

config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16)
model = Qwen3ForCausalLM(config)
handle = enable_activation_offloading(model, True, OffloadOptions(save="boundary", min_bytes=0))
for step in range(2):
    sitecustomize.seen.clear()
    model(input_ids=torch.arange(16)[None]).logits.sum().backward()
print("\\n".join(sorted(sitecustomize.seen - {"<optimizer>"})))
"""


@contextmanager
def hooked(source: Path, **names: str) -> Iterator[dict[str, str]]:
    """Yield the environment of a process that notes the calls of the rlx in the folder `source`."""
    with tempfile.TemporaryDirectory(prefix="rlx-files-") as made:
        Path(made, "sitecustomize.py").write_text(HOOK)
        yield {**os.environ, "RLX_SOURCE": str(source), "PYTHONPATH": f"{made}:{source}", **names}


def files_of_step(source: Path) -> dict[str, set[str]]:
    """Return the files of rlx that ran in the window, by process: `driver` (which calls `Trainer.step`) and `worker`."""
    with tempfile.TemporaryDirectory(prefix="rlx-files-") as made:
        calls = Path(made, "calls")
        calls.mkdir()
        command = [sys.executable, "-m", "rlx.main_ppo", *EVERY, "trainer.total_training_steps=2"]
        command.append(f"trainer.default_local_dir={made}/run")
        with hooked(source, RLX_CALLS=str(calls)) as names:
            done = subprocess.run(command, cwd=source, env=names, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} in {source} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        seen: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for file in calls.iterdir():
            for line in file.read_text().splitlines():
                time, _, name = line.partition(" ")
                seen[int(file.name)].append((int(time), name))
        every = sorted((time, process, name) for process, rows in seen.items() for time, name in rows)
        start, driver = [(time, process) for time, process, name in every if name == "<step>"][-1]
        end, worker = next((time, process) for time, process, name in every if name == "<optimizer>" and time > start)
        found: dict[str, set[str]] = defaultdict(set)
        for time, process, name in every:
            if start <= time <= end and process in (driver, worker) and name[0] != "<":
                found["driver" if process == driver else "worker"].add(name)
        return found


def files_of_tensor(source: Path) -> set[str]:
    """Return the files of rlx that ran in forward and backward of the second step."""
    with hooked(source) as names:
        done = subprocess.run([sys.executable, "-c", TENSOR], cwd=source, env=names, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return set(done.stdout.split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.files_executed", description=__doc__)
    parser.add_argument("commit", nargs="?", help="compare with this commit")
    parser.add_argument("--names", action="store_true", help="print the files, too")
    options = parser.parse_args(arguments)
    for commit in (options.commit, None) if options.commit else (None,):
        with checkout(commit) as source:
            step, tensor = files_of_step(source), files_of_tensor(source)
        both = step["driver"] | step["worker"]
        counts = f"{len(both)} files (driver {len(step['driver'])}, worker {len(step['worker'])})"
        print(f"{commit or 'this checkout'}: step {counts}; tensor {len(tensor)} files", flush=True)
        if options.names:
            print(
                "\n".join(
                    f"    {name}" for part in (step["driver"], step["worker"], tensor) for name in (*sorted(part), "")
                )
            )


if __name__ == "__main__":
    main()
