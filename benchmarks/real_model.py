"""Train a real small model on a real task, and record curves over steps and time, with held-out accuracy in its intervals.

    python -m benchmarks.real_model NAME --model smollm2 [--gsm8k FOLDER] [--seeds 1,2,3] [--minutes 9] [key=value ...]

NAME is a record below. docs/real_model.md says how to get the model. Each run has a folder in OUT/NAME. Called again, the command
continues unfinished runs from their checkpoints and repeats no finished one. It writes OUT/NAME.json and OUT/NAME.png, and exits with 1
if a record that has to win points falls short, with 3 if `--minutes` ended before the runs did.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.table import Table

from benchmarks.common import chosen_device, title
from rlx.trainer.report import BLUE, GREEN, GREY, INK, ORANGE, RED
from rlx.trainer.report import style as style_axes
from rlx.trainer.tracking import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "real_model"
COLORS = (BLUE, ORANGE, GREEN, RED)
Z = 1.96  # standard deviations of a normal distribution that hold 95 %
TOO_LITTLE, UNFINISHED = 1, 3  # exit codes
SAVE_S = 240.0  # after `--minutes`, for the step to end and to save

ALGORITHM, ROLLOUT, ACTOR, MODEL = "algorithm", *(f"actor_rollout_ref.{part}" for part in ("rollout", "actor", "model"))
EVERY = (
    f"custom_reward_function.path={EXAMPLE / 'reward.py'}",
    f"{ALGORITHM}.adv_estimator=grpo",
    f"{ROLLOUT}.n=8",
    f"{ACTOR}.optim.lr=2e-5",
    f"{ACTOR}.use_dynamic_bsz=True",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[console,jsonl]",
    "trainer.save_freq=10",
    "trainer.max_actor_ckpt_to_keep=1",
    f"trainer.save_on_sigterm_s={SAVE_S}",
    "trainer.resume_mode=auto",
)
"""Keys of every run; a record, a variant and the command line may replace them, each the former."""


def sizes(prompts: int, longest_prompt: int, longest_response: int) -> tuple[str, ...]:
    """Return the keys of a batch with one optimizer step per 64 prompts."""
    batch = (f"data.train_batch_size={prompts}", f"{ACTOR}.ppo_mini_batch_size={min(prompts, 64)}")
    return (*batch, f"data.max_prompt_length={longest_prompt}", f"data.max_response_length={longest_response}")


class Record(NamedTuple):
    """One record: runs on one task that differ in a few keys.

    Args:
        data: `sums`; `small`, sums of numbers up to 30; `products`, to compute with a tool; `gsm8k`.
        steps: of a run.
        test_freq: steps between two validations.
        keys: of all its runs, after EVERY.
        variants: further keys by name.
        seeds: of sampling and the order of rows.
        points: of held-out accuracy that each run has to win, with intervals apart; None: any result is a result.
    """

    data: str
    steps: int
    test_freq: int
    keys: tuple[str, ...]
    variants: Mapping[str, tuple[str, ...]] = {"GRPO": ()}
    seeds: tuple[int, ...] = (1,)
    points: int | None = None


SUMS = sizes(128, 96, 16)
PPO = (f"{ALGORITHM}.adv_estimator=gae", "trainer.max_critic_ckpt_to_keep=1")
OFFLOAD, SHARED, ADAPTERS = f"{MODEL}.enable_activation_offload", f"{MODEL}.use_shared_prefix", f"{MODEL}.lora_rank"
RECORDS = {
    "sums": Record("sums", 200, 20, SUMS, seeds=(1, 2, 3)),
    "gsm8k": Record("gsm8k", 200, 20, (*sizes(128, 384, 320), "custom_reward_function.name=gsm8k"), seeds=(1, 2, 3)),
    "tools": Record("products", 100, 10, (*sizes(128, 192, 64), "environment.name=calculator")),
    "lora": Record(
        "sums", 100, 10, SUMS,
        {"all weights": (), "LoRA": (f"{ADAPTERS}=32", f"{MODEL}.lora_alpha=64", f"{ACTOR}.optim.lr=4e-4")},
    ),
    "ppo": Record("sums", 100, 10, SUMS, {"GRPO": (), "PPO": PPO}),
    "offload": Record("sums", 20, 10, SUMS, {"offloaded": (f"{OFFLOAD}=True",), "kept": (f"{OFFLOAD}=False",)}),
    "shared_prefix": Record("sums", 20, 10, SUMS, {"shared": (f"{SHARED}=True",), "repeated": (f"{SHARED}=False",)}),
    "gpus": Record("sums", 20, 10, SUMS, {"1 GPU": (), "2 GPUs": ("trainer.n_gpus_per_node=2",)}),
    "nightly": Record("small", 24, 24, (*sizes(8, 96, 16), f"{ROLLOUT}.name=hf", "trainer.device=cpu"), points=5),
}  # fmt: skip


class Run(NamedTuple):
    """What a run has reached; accuracy has the share, and the ends of its interval, by step."""

    variant: str
    seed: int
    reward: dict[int, float]
    seconds: dict[int, float]  # of all steps up to this one, without start-up and interruptions
    accuracy: dict[int, tuple[float, float, float]]
    others: dict[str, list[float]]  # further held-out numbers of the reward function


def wilson(right: int, rows: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, as in Wilson 1927, https://doi.org/10.2307/2276774."""
    share, spread = right / rows, Z**2 / rows
    middle = (share + spread / 2) / (1 + spread)
    reach = math.sqrt(spread * share * (1 - share) + spread**2 / 4) / (1 + spread)
    return middle - reach, middle + reach


def write_data(name: str, folder: Path, gsm8k: Path | None) -> tuple[Path, Path]:
    """Return the files to train on and to hold out, after writing them if they are made."""
    if name == "gsm8k":
        assert gsm8k is not None, "the parser asks for it"
        return gsm8k / "train.jsonl", gsm8k / "test.jsonl"
    largest = "30" if name == "small" else "99"
    subprocess.run([sys.executable, str(EXAMPLE / "sums.py"), str(folder / name), "--largest", largest], check=True)
    files = folder / name / "train.jsonl", folder / name / "held_out.jsonl"
    if name == "products":
        for file in files:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            file.write_text("".join(json.dumps(with_tool(index, row)) + "\n" for index, row in enumerate(rows)))
    return files


def with_tool(index: int, row: Mapping[str, str]) -> dict[str, Any]:
    """Return a product of the numbers of a row, which the model cannot compute alone, behind an example of a call."""
    first, _, second = row["prompt"].removeprefix("What is ").split("?")[0].split()
    question = "What is {} * {}? Use the calculator, then answer with the number alone."
    asked = ("user", question.format(4, 5)), ("user", question.format(first, second))
    texts = (asked[0], ("assistant", "<calc>4*5</calc>"), ("tool", "20"), ("assistant", "20"), asked[1])
    prompt = [{"role": role, "content": text} for role, text in texts]
    return {"prompt": prompt, "answer": str(int(first) * int(second)), "index": index}


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of a run that may have begun several times before its first checkpoint."""
    found = [read_metrics(file) for file in sorted(folder.glob(f"*/{METRICS_FILE}"))]
    return max(found, key=lambda metrics: max(metrics, default=-1), default={})


def train(folder: Path, overrides: Sequence[str], until: float) -> bool:
    """Begin or continue a run in a process of its own; return whether it ended before `until` [s of the clock]."""
    folder.mkdir(parents=True, exist_ok=True)
    given = folder / "keys.json"
    if given.exists() and json.loads(given.read_text()) != [*overrides]:
        sys.exit(f"{folder} has a run with other keys: see keys.json there; give another --out, or delete the folder")
    given.write_text(json.dumps([*overrides], indent=2))
    with (folder / "output.log").open("a") as output:
        command = [sys.executable, "-m", "rlx.main_ppo", *overrides]
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            run.wait(max(until - time.time(), 1.0) if math.isfinite(until) else None)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGTERM)
            run.wait()
            return False
        except KeyboardInterrupt:
            run.wait()
            raise
    if run.returncode:
        last = "\n".join((folder / "output.log").read_text(errors="replace").splitlines()[-15:])
        sys.exit(f"{' '.join(command)} ended with exit code {run.returncode}; {folder / 'output.log'} ends in:\n{last}")
    return True


def read(variant: str, seed: int, metrics: Mapping[int, Mapping[str, float]], rows: int) -> Run:
    """Return what a run has reached."""
    spent, seconds, accuracy = 0.0, dict[int, float](), dict[int, tuple[float, float, float]]()
    others: dict[str, list[float]] = {}
    for step, row in metrics.items():
        spent += row.get("timing_s/step", 0.0)
        seconds[step] = spent
        if (share := row.get("val/accuracy")) is not None:
            accuracy[step] = (share, *wilson(round(share * rows), rows))
        for name, value in row.items():
            if name.startswith("val/extra/"):
                others.setdefault(name.removeprefix("val/extra/"), []).append(value)
    rewards = {step: row["reward/mean"] for step, row in metrics.items() if "reward/mean" in row}
    return Run(variant, seed, rewards, seconds, accuracy, others)


def points(run: Run) -> tuple[float, bool]:
    """Return the points of held-out accuracy that a run won, and whether the first and the last interval share no value."""
    (first, _, high), *_, (last, low, _) = run.accuracy.values()
    return 100 * (last - first), low > high


def table(name: str, runs: Sequence[Run]) -> Table:
    """Return a table of accuracies before and after, with a row per run."""
    columns = ("variant", "seed", "step", "held-out accuracy, % (95 % interval)", "points", "apart", "s", "others, %")
    found = Table(*columns, title=name)
    for run in runs:
        ends = [run.accuracy[step] for step in (min(run.accuracy), max(run.accuracy))]
        path = " → ".join(f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})" for share, low, high in ends)
        others = [f"{key} {100 * values[0]:.1f} → {100 * values[-1]:.1f}" for key, values in run.others.items()]
        won, apart = points(run)
        figures = (
            str(max(run.seconds)),
            path,
            f"{won:+.1f}",
            "yes" if apart else "no",
            f"{max(run.seconds.values()):.0f}",
        )
        found.add_row(run.variant, str(run.seed), *figures, ", ".join(others))
    return found


def difference(runs: Sequence[Run]) -> float | None:
    """Return the largest difference of two variants' rewards in a step, over the seeds; None for one variant."""
    pairs = [(a.reward, b.reward) for a in runs for b in runs if a.seed == b.seed and a.variant < b.variant]
    return max((abs(a[step] - b[step]) for a, b in pairs for step in a.keys() & b.keys()), default=None)


def draw(name: str, runs: Sequence[Run], picture: Path) -> None:
    """Draw held-out accuracy with its intervals, and the sampled reward, over steps and over minutes."""
    figure = Figure(figsize=(11, 4.2), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    colors = dict(zip(dict.fromkeys(run.variant for run in runs), COLORS, strict=False))
    labelled = set[str]()
    for axes, unit in zip(figure.subplots(1, 2, sharey=True), ("step", "minutes of steps"), strict=True):
        style_axes(axes)
        axes.set_xlabel(unit, color=GREY, fontsize=9)
        for run in runs:
            place = {step: step if unit == "step" else spent / 60 for step, spent in run.seconds.items()}
            color, label = colors[run.variant], None if run.variant in labelled else run.variant
            labelled.add(run.variant)
            sampled = [place[step] for step in run.reward], [*run.reward.values()]
            axes.plot(*sampled, color=color, linewidth=0.8, alpha=0.35)
            shares, lows, highs = zip(*run.accuracy.values(), strict=True)
            held = [place[step] for step in run.accuracy]
            axes.plot(held, shares, color=color, linewidth=1.8, marker="o", markersize=3.5, label=label)
            axes.fill_between(held, lows, highs, color=color, alpha=0.12, linewidth=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.axes[0].legend(loc="best", frameon=False, fontsize=9, labelcolor=GREY)
    figure.suptitle(f"{name}: held-out accuracy with 95 % intervals; thin: sampled reward", fontsize=12, color=INK)
    figure.savefig(picture, dpi=130)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", choices=RECORDS)
    parser.add_argument("--model", type=Path, required=True, help="folder that examples/real_model/get_model.py wrote")
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl, for the record gsm8k")
    parser.add_argument("--out", type=Path, default=Path("outputs/real_model"), help="default outputs/real_model")
    parser.add_argument("--seeds", help="such as 1,2,3; default: the record's")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then save and stop; call again to continue")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    given = parser.parse_intermixed_args(arguments)
    record, console, began = RECORDS[given.name], Console(width=160, highlight=False), time.time()
    if record.data == "gsm8k" and given.gsm8k is None:
        parser.error("gsm8k needs --gsm8k FOLDER, with GSM8K's own train.jsonl and test.jsonl")
    out, until, runs = given.out.absolute(), began + 60 * given.minutes, list[Run]()
    train_file, held_out = write_data(record.data, out / "data", given.gsm8k and given.gsm8k.absolute())
    rows = len(held_out.read_text().splitlines())
    places = [f"data.train_files={train_file}", f"data.val_files={held_out}", f"{MODEL}.path={given.model.absolute()}"]
    places += [] if record.data == "gsm8k" else ["data.answer_key=answer"]
    ends = (f"trainer.total_training_steps={record.steps}", f"trainer.test_freq={record.test_freq}")
    for seed in map(int, given.seeds.split(",")) if given.seeds else record.seeds:
        for variant, keys in record.variants.items():
            folder = out / given.name / f"{variant}-{seed}".replace(" ", "-")
            own = (f"trainer.seed={seed}", f"trainer.default_local_dir={folder / 'runs'}")
            overrides = (*EVERY, *places, *ends, *record.keys, *keys, *own, *given.overrides)
            console.print(f"{given.name}: {variant}, seed {seed}, in {folder}")
            if not ((folder / "finished").exists() or train(folder, overrides, until)):
                console.print(f"stopped at step {max(metrics_of(folder / 'runs'), default=0)}; call again to continue")
                return UNFINISHED
            (folder / "finished").touch()
            runs.append(read(variant, seed, metrics_of(folder / "runs"), rows))
    gap = difference(runs)
    figures = {
        "record": given.name, "machine": title(chosen_device()), "held_out_rows": rows, "overrides": given.overrides,
        "largest_difference_of_rewards": gap, "runs": [run._asdict() for run in runs],
    }  # fmt: skip
    (out / f"{given.name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(given.name, runs, out / f"{given.name}.png")
    console.print(table(given.name, runs))
    if gap is not None:
        console.print(f"largest difference of the variants' rewards in a step: {gap:.3g}")
    console.print(f"{out / given.name}.json, {out / given.name}.png")
    if any(record.points is not None and not (points(run)[1] and points(run)[0] >= record.points) for run in runs):
        console.print(f"TOO LITTLE: a run won fewer than {record.points} points, or its intervals overlap")
        return TOO_LITTLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
