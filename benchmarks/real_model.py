"""Train a real small model on a real task, and record curves over steps and time, with held-out accuracy in its intervals.

    python -m benchmarks.real_model NAME --model smollm2 [--gsm8k FOLDER] [--seeds 1,2,3] [--minutes 9] [key=value ...]

NAME is a record below, or several with commas. docs/real_model.md says how to get the model. Each run has a folder in OUT/NAME. Called again, the command
continues unfinished runs from their checkpoints and repeats no finished one. With `--together N` up to N runs share the machine's GPUs
(benchmarks/side_by_side.py): curves over steps stay what they are, times do not. It writes OUT/NAME.json and OUT/NAME.png, and exits
with 1 if a record that has to win points falls short, with 3 if `--minutes` ended before the runs did.
"""

import argparse
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.table import Table

from benchmarks.side_by_side import Job, SideBySide
from rlx.config.compose.command_line import compose
from rlx.config.machine import inspect_machine
from rlx.trainer.report import BLUE, GREEN, GREY, INK, ORANGE, RED
from rlx.trainer.report import style as style_axes

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "real_model"
COLORS = (BLUE, ORANGE, GREEN, RED)
Z = 1.96  # standard deviations of a normal distribution that hold 95 %
TOO_LITTLE, UNFINISHED = 1, 3  # exit codes
COUNTED = 20  # numbers of an answer
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
        data: `sums`; `small`, sums of numbers up to 30; `products`, to compute with a tool; `counts`, long answers; `gsm8k`.
        steps: of a run.
        test_freq: steps between two validations.
        keys: of all its runs, after EVERY.
        variants: further keys by name.
        seeds: of sampling and the order of rows.
        points: of held-out accuracy that each run has to win, with intervals apart; None: any result is a result.
        traces: metrics of each step to record and draw besides.
    """

    data: str
    steps: int
    test_freq: int
    keys: tuple[str, ...]
    variants: Mapping[str, tuple[str, ...]] = {"GRPO": ()}
    seeds: tuple[int, ...] = (1,)
    points: int | None = None
    traces: tuple[str, ...] = ()


SUMS = sizes(128, 96, 16)
COUNTS = (
    *sizes(64, 224, 128),
    f"{ROLLOUT}.n=16",
    f"{ACTOR}.ppo_mini_batch_size=16",
    "custom_reward_function.name=counted",
)
PPO = (f"{ALGORITHM}.adv_estimator=gae", "trainer.max_critic_ckpt_to_keep=1")
OFFLOAD, SHARED, ADAPTERS = f"{MODEL}.enable_activation_offload", f"{MODEL}.use_shared_prefix", f"{MODEL}.lora_rank"
CORRECTION = "algorithm.rollout_correction.rollout_is"
EXACTLY = {
    "exact": (f"{ROLLOUT}.exact=True",),
    "corrected": (f"{CORRECTION}=token", f"{CORRECTION}_threshold=2.0"),
    "neither": (),
}
STALE = {
    "synchronous": (),
    "two steps stale": (f"{ROLLOUT}.partial.max_staleness=2", *EXACTLY["corrected"]),
}
GAP = ("val/reward", "mismatch/mean_abs_log_prob", "mismatch/ess_sequence", "actor/grad_norm", "actor/entropy")
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
    "exact": Record("counts", 30, 10, COUNTS, EXACTLY, seeds=(1, 2, 3), traces=GAP),
    "stale": Record("counts", 30, 10, COUNTS, STALE, seeds=(1, 2, 3), traces=(*GAP, "staleness/mean")),
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
    traces: dict[str, dict[int, float]]  # metrics of the record, by step


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
    if name == "counts":
        return write_counts(folder / name)
    largest = "30" if name == "small" else "99"
    subprocess.run([sys.executable, str(EXAMPLE / "sums.py"), str(folder / name), "--largest", largest], check=True)
    files = folder / name / "train.jsonl", folder / name / "held_out.jsonl"
    if name == "products":
        for file in files:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            file.write_text("".join(json.dumps(with_tool(index, row)) + "\n" for index, row in enumerate(rows)))
    return files


def write_counts(folder: Path) -> tuple[Path, Path]:
    """Write tasks to count in steps, each behind an example: answers have some 80 tokens, and each number in its place counts."""

    def turns(first: int, step: int) -> tuple[str, str]:
        last = first + COUNTED * step - step
        return f"Count from {first} to {last} in steps of {step}.", ", ".join(map(str, range(first, last + 1, step)))

    rows = []
    for first, step in itertools.product(range(1, 800), (1, 2, 5, 10)):
        (shown, answered), (asked, wanted) = turns(40, step), turns(first, step)
        texts = (("user", shown), ("assistant", answered), ("user", asked))
        prompt = [{"role": role, "content": text} for role, text in texts]
        rows.append(json.dumps({"prompt": prompt, "answer": wanted.replace(",", "")}) + "\n")
    Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, part in zip(files, (rows[300:], rows[:300]), strict=True):
        file.write_text("".join(part))
    return files


def with_tool(index: int, row: Mapping[str, str]) -> dict[str, Any]:
    """Return a product of the numbers of a row, which the model cannot compute alone, behind an example of a call."""
    first, _, second = row["prompt"].removeprefix("What is ").split("?")[0].split()
    question = "What is {} * {}? Use the calculator, then answer with the number alone."
    asked = ("user", question.format(4, 5)), ("user", question.format(first, second))
    texts = (asked[0], ("assistant", "<calc>4*5</calc>"), ("tool", "20"), ("assistant", "20"), asked[1])
    prompt = [{"role": role, "content": text} for role, text in texts]
    return {"prompt": prompt, "answer": str(int(first) * int(second)), "index": index}


def read(
    variant: str, seed: int, metrics: Mapping[int, Mapping[str, float]], rows: int, traces: Sequence[str] = ()
) -> Run:
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
    traced = {name: {step: row[name] for step, row in metrics.items() if name in row} for name in traces}
    return Run(variant, seed, rewards, seconds, accuracy, others, traced)


def points(run: Run) -> tuple[float, bool]:
    """Return the points of held-out accuracy that a run won, and whether the first and the last interval share no value."""
    (first, _, high), *_, (last, low, _) = run.accuracy.values()
    return 100 * (last - first), low > high


def table(name: str, runs: Sequence[Run], is_shared: bool) -> Table:
    """Return a table of accuracies before and after, with a row per run; runs that shared a GPU have no seconds."""
    columns = ("variant", "seed", "step", "held-out accuracy, % (95 % interval)", "points", "apart", "s", "others, %")
    found = Table(*(column for column in columns if not (is_shared and column == "s")), title=name)
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
            *(() if is_shared else (f"{max(run.seconds.values()):.0f}",)),
        )
        found.add_row(run.variant, str(run.seed), *figures, ", ".join(others))
    return found


def ends(runs: Sequence[Run]) -> Table:
    """Return a table of the last ten steps: the mean of each variant's seeds, and the lowest and highest of them."""
    found = Table("last ten steps", "reward", *(trace.removeprefix("mismatch/") for trace in runs[0].traces))
    for variant in dict.fromkeys(run.variant for run in runs):
        of_seeds = [(run.reward, *run.traces.values()) for run in runs if run.variant == variant]
        cells = []
        for curves in zip(*of_seeds, strict=True):
            lasts = [[value for step, value in curve.items() if step > max(curve) - 10] for curve in curves if curve]
            means = [fmean(last) for last in lasts]
            cells.append(f"{fmean(means):.3g} ({min(means):.3g} to {max(means):.3g})" if means else "-")
        found.add_row(variant, *cells)
    return found


def difference(runs: Sequence[Run]) -> float | None:
    """Return the largest difference of two variants' rewards in a step, over the seeds; None for one variant."""
    pairs = [(a.reward, b.reward) for a in runs for b in runs if a.seed == b.seed and a.variant < b.variant]
    return max((abs(a[step] - b[step]) for a, b in pairs for step in a.keys() & b.keys()), default=None)


def draw(name: str, runs: Sequence[Run], picture: Path, is_shared: bool) -> None:
    """Draw held-out accuracy with its intervals, and the sampled reward, over steps and over minutes; below, the traces."""
    traces = [*runs[0].traces]
    height = 2 * (len(traces) > 0)
    figure = Figure(figsize=(11, 4.2 + 1.5 * height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    above, *below = figure.subfigures(2, 1, height_ratios=(4.2, 1.5 * height)) if traces else (figure,)
    colors = dict(zip(dict.fromkeys(run.variant for run in runs), COLORS, strict=False))
    labelled = set[str]()
    minutes = "minutes of steps" + is_shared * ", of runs that shared a GPU"
    for axes, unit in zip(above.subplots(1, 2, sharey=True), ("step", minutes), strict=True):
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
    for part in below:
        for axes, trace in zip(part.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
            style_axes(axes)
            axes.set_xlabel(trace, color=GREY, fontsize=9)
            for run in runs:
                found = run.traces[trace]
                axes.plot([*found], [*found.values()], color=colors[run.variant], linewidth=0.9, alpha=0.7)
    figure.axes[0].legend(loc="best", frameon=False, fontsize=9, labelcolor=GREY)
    figure.suptitle(f"{name}: held-out accuracy with 95 % intervals; thin: sampled reward", fontsize=12, color=INK)
    figure.savefig(picture, dpi=130)


def jobs_of(name: str, given: argparse.Namespace, files: tuple[Path, Path]) -> dict[tuple[str, int], Job]:
    """Return the runs of a record by variant and seed. Raises ValueError for an unknown variant, and for runs that cannot share a GPU."""
    record, found = RECORDS[name], dict[tuple[str, int], Job]()
    places = [f"data.train_files={files[0]}", f"data.val_files={files[1]}", f"{MODEL}.path={given.model.absolute()}"]
    places += [] if record.data == "gsm8k" else ["data.answer_key=answer"]
    ends = (f"trainer.total_training_steps={record.steps}", f"trainer.test_freq={record.test_freq}")
    variants = given.variants.split(",") if given.variants else [*record.variants]
    if unknown := {*variants} - record.variants.keys():
        raise ValueError(f"--variants: got {', '.join(unknown)}, expected of {', '.join(record.variants)}")
    for seed in map(int, given.seeds.split(",")) if given.seeds else record.seeds:
        for variant in variants:
            title = f"{variant}-{seed}".replace(" ", "-")
            folder = given.out.absolute() / name / title
            own = (f"trainer.seed={seed}", f"trainer.default_local_dir={folder / 'runs'}")
            overrides = (*EVERY, *places, *ends, *record.keys, *record.variants[variant], *own, *given.overrides)
            trainer = compose(overrides).config.trainer
            if given.together > 1 and trainer.n_gpus_per_node > 1:
                raise ValueError(f"--together: a run of {name} has {trainer.n_gpus_per_node} GPUs; give 1")
            found[variant, seed] = Job(title, folder, overrides, trainer.total_training_steps or 0)
    return found


def write(name: str, jobs: Mapping[tuple[str, int], Job], given: argparse.Namespace, console: Console) -> bool:
    """Write and show what the runs of a record have reached; return whether each won the points that it had to."""
    record, out = RECORDS[name], given.out.absolute()
    data = compose(next(iter(jobs.values())).overrides).config.data
    lines = sum(len(Path(file).read_text().splitlines()) for file in data.val_files)
    rows = min(lines, data.val_max_samples) if data.val_max_samples > 0 else lines
    runs = [read(*key, job.metrics, rows, record.traces) for key, job in jobs.items()]
    if not (runs := [run for run in runs if run.accuracy]):
        return True
    gap, shared = difference(runs), [job.name for job in jobs.values() if job.shared]
    figures = {
        "record": name, "machines": sorted({job.machine for job in jobs.values()}), "held_out_rows": rows,
        "overrides": given.overrides, "largest_difference_of_rewards": gap, "shared_a_gpu": shared,
        "unfinished": [job.name for job in jobs.values() if not job.finished], "runs": [run._asdict() for run in runs],
    }  # fmt: skip
    (out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(name, runs, out / f"{name}.png", bool(shared))
    console.print(table(name, runs, bool(shared)))
    if len(record.variants) > 1:
        console.print(ends(runs))
    if shared:
        console.print(f"no seconds: {len(shared)} run(s) shared a GPU or CPU with others")
    if gap is not None:
        console.print(f"largest difference of the variants' rewards in a step: {gap:.3g}")
    console.print(f"{out / name}.json, {out / name}.png")
    return record.points is None or all(apart and won >= record.points for won, apart in map(points, runs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", metavar="NAME", help=f"of {', '.join(RECORDS)}, or several with commas")
    parser.add_argument("--model", type=Path, required=True, help="folder that examples/real_model/get_model.py wrote")
    parser.add_argument("--gsm8k", type=Path, help="folder with train.jsonl and test.jsonl, for the record gsm8k")
    parser.add_argument("--out", type=Path, default=Path("outputs/real_model"), help="default outputs/real_model")
    parser.add_argument("--seeds", help="such as 1,2,3; default: the record's")
    parser.add_argument("--variants", help="such as LoRA; default: all of the record")
    parser.add_argument("--minutes", type=float, default=math.inf, help="then save and stop; call again to continue")
    parser.add_argument("--together", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    given = parser.parse_intermixed_args(arguments)
    names, console, until = (
        given.names.split(","),
        Console(width=160, highlight=False),
        time.time() + 60 * given.minutes,
    )
    if unknown := {*names} - RECORDS.keys():
        parser.error(f"NAME: got {', '.join(unknown)}, expected of {', '.join(RECORDS)}")
    if given.gsm8k is None and any(RECORDS[name].data == "gsm8k" for name in names):
        parser.error("gsm8k needs --gsm8k FOLDER, with GSM8K's own train.jsonl and test.jsonl")
    out, gsm8k = given.out.absolute(), given.gsm8k and given.gsm8k.absolute()
    files = {name: write_data(RECORDS[name].data, out / "data", gsm8k) for name in names}
    try:
        jobs = {name: jobs_of(name, given, files[name]) for name in names}
    except ValueError as error:
        parser.error(str(error))
    every = [job for of_record in jobs.values() for job in of_record.values()]
    console.print(f"{given.names}: {len(every)} run(s), {given.together} at a time, in {out}")
    is_done = SideBySide(every, given.together, inspect_machine(), until, console).run()
    short = [name for name in names if not write(name, jobs[name], given, console)]
    if not is_done:
        reached = ", ".join(f"{job.name} at step {max(job.metrics, default=0)}" for job in every)
        console.print(f"stopped: {reached}; call again to continue")
        return UNFINISHED
    for name in short:
        console.print(
            f"TOO LITTLE: a run of {name} won fewer than {RECORDS[name].points} points, or its intervals overlap"
        )
    return TOO_LITTLE if short else 0


if __name__ == "__main__":
    sys.exit(main())
