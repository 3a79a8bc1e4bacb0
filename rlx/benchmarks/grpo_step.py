"""Measure the seconds of a GRPO step by phase, with each of several values of a key: whole runs on a model of random weights.

python -m rlx.benchmarks.grpo_step --each actor_rollout_ref.model.use_shared_prefix=False,True [key=value ...]

Model and prompts are made on the spot. Each value of the key gets a run of `--steps` steps in a process of its own, one after
the other. Responses have `--response` tokens but for a rare one that samples EOS. The table shows the median over all steps
but the first of each phase, and of other figures of a run. Further overrides hold for every run.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import TYPE_CHECKING

import torch

from rlx.benchmarks.common import benchmark_parser, cell, chosen_device, title, write_json, write_random_model
from rlx.offload.plan.shapes import SHAPES
from rlx.trainer.report import read_metrics
from rlx.trainer.tracking import METRICS_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PHASE = "timing_s/"
OTHERS = ("actor/tokens_saved", "actor/grad_norm", "response_length/mean", "perf/peak_memory_gb")
REWARD = "def score(data_source, solution_str, ground_truth, extra_info=None): return len(set(solution_str)) / 64\n"


def byte_tokenizer() -> "PreTrainedTokenizerBase":
    """Return a tokenizer with a token for each byte; other ids of the model decode to nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|end|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=special[0], eos_token=special[1])


def write_inputs(folder: Path, options: Namespace, device: torch.device) -> list[str]:
    """Write model, prompts of exactly `--prompt` tokens and a reward function; return the overrides that name them."""
    longest, random = options.prompt + options.response, Random(0)
    write_random_model(folder / "model", options.shape, device, max_position_embeddings=longest)
    byte_tokenizer().save_pretrained(folder / "model")
    with (folder / "prompts.jsonl").open("w") as file:
        for _ in range(options.prompts * options.steps):
            text = "".join(random.choices(ascii_lowercase, k=options.prompt))
            row = {"prompt": text, "data_source": "random", "reward_model": {"style": "rule", "ground_truth": ""}}
            file.write(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(REWARD)
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'prompts.jsonl'}",
        f"data.val_files={folder / 'prompts.jsonl'}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "custom_reward_function.name=score",
    ]


def settings(options: Namespace) -> list[str]:
    """Return the overrides of every run but those of its inputs."""
    tokens = 8 * (options.prompt + options.response)
    policy = "actor_rollout_ref"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={options.prompts}",
        f"data.max_prompt_length={options.prompt}",
        f"data.max_response_length={options.response}",
        f"{policy}.rollout.n={options.samples}",
        f"{policy}.rollout.max_num_seqs={options.prompts * options.samples}",
        f"{policy}.actor.ppo_mini_batch_size={options.prompts}",
        f"{policy}.actor.use_dynamic_bsz=True",
        f"{policy}.actor.ppo_max_token_len_per_gpu={tokens}",
        f"{policy}.actor.use_kl_loss=True",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={options.steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console,jsonl]",
    ]


def run(folder: Path, overrides: Sequence[str]) -> dict[int, dict[str, float]]:
    """Do one run and return its metrics by step. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "rlx.main_ppo", *overrides, f"trainer.default_local_dir={folder}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    made = next(folder.rglob(METRICS_FILE), None)
    if done.returncode or made is None:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout[-8000:]}")
    return read_metrics(made)


def medians(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each phase and of `OTHERS` over all steps but the first, which compiles and plans."""
    steps = [metrics[step] for step in sorted(metrics) if f"{PHASE}step" in metrics[step]][1:]
    names = {name for step in steps for name in step if name.startswith(PHASE) or name in OTHERS}
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in sorted(names)}


def show(found: Mapping[str, Mapping[str, float]]) -> None:
    """Print a row for each phase and a column for each value, the phases by their seconds, then the step and the others."""
    print(f"{'median of a step':>26}" + "".join(f"{value:>14}" for value in found))
    last = {f"{PHASE}step": 1, **dict.fromkeys(OTHERS, 2)}
    names = {name: figures[name] for figures in reversed(found.values()) for name in figures}
    for name in sorted(names, key=lambda name: (last.get(name, 0), -names[name])):
        print(f"{name.removeprefix(PHASE):>26}" + "".join(cell(figures.get(name), 3, 14) for figures in found.values()))


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = benchmark_parser("grpo_step", __doc__)
    parser.add_argument("--each", required=True, metavar="KEY=VALUE,VALUE", help="the key, and its value in each run")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-0.5b")
    parser.add_argument("--prompts", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--samples", type=int, default=8, help="responses to a prompt (default 8)")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt (default 4096)")
    parser.add_argument("--response", type=int, default=512, help="most tokens of a response (default 512)")
    parser.add_argument("--steps", type=int, default=4, help="of each run, at least 2 (default 4)")
    options, overrides = parser.parse_known_args(arguments)
    key, _, values = options.each.partition("=")
    if not values or options.steps < 2:
        got = f"--each {options.each} --steps {options.steps}"
        parser.error(f"got {got}, expected KEY=VALUE,VALUE and at least 2 steps")
    device, found = chosen_device(options.device), {}
    with tempfile.TemporaryDirectory(prefix="rlx-grpo-step-") as made:
        folder = Path(made)
        inputs = write_inputs(folder, options, device)
        work = f"{options.prompts} prompts of {options.prompt} tokens, {options.samples} responses of {options.response} to each"
        print(f"{title(device)}, {options.shape}, {work}", flush=True)
        for value in values.split(","):
            every = run(folder / f"run-{value}", [*settings(options), *inputs, *overrides, f"{key}={value}"])
            found[value] = medians(every)
            seconds = [round(x[f"{PHASE}step"], 2) for x in every.values()]
            print(f"{key}={value}: seconds of the steps {seconds}", flush=True)
    show(found)
    write_json(options, device, {"each": options.each, "medians": found})


if __name__ == "__main__":
    main()
