"""The metrics of a step by name: unit, meaning, verl's name. `python -m rlx.trainer.metric_table > docs/metrics.md` writes the page."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from rlx.trainer.progress import PHASES, PROGRESS_COLUMNS


class Metric(NamedTuple):
    """One metric, or all that match a pattern.

    Args:
        name: `*` stands for any text.
        unit: empty for a plain number.
        meaning: one sentence.
        verl: its name there; empty if verl has no such metric.
    """

    name: str
    unit: str
    meaning: str
    verl: str = ""


METRIC_TABLE = (
    Metric("reward/mean", "", "Mean score of the step's samples.", "critic/score/mean"),
    Metric("reward/max", "", "Highest score.", "critic/score/max"),
    Metric("reward/min", "", "Lowest score.", "critic/score/min"),
    Metric("reward/std", "", "Standard deviation of the scores."),
    Metric("reward/accuracy", "share", "Samples that are right: a score of 1 or more, or the reward's own `acc`."),
    Metric(
        "reward/extra/*",
        "",
        "Mean of a number that the reward function returned beside its score, or the environment in `info`.",
    ),
    Metric(
        "reward/*", "", "Calls of reward functions that failed, timed out, crashed or were repeated; their processes."
    ),
    Metric("response_length/mean", "tokens", "Mean length of a response.", "response_length/mean"),
    Metric("response_length/max", "tokens", "Longest response.", "response_length/max"),
    Metric(
        "response_length/clip_ratio", "share", "Responses cut at max_response_length.", "response_length/clip_ratio"
    ),
    Metric("actor/entropy", "nats", "Mean entropy of the next-token distribution before the update.", "actor/entropy"),
    Metric("actor/kl_ref", "nats", "KL of the policy to the reference per token (k3), before the update."),
    Metric(
        "actor/ppo_kl",
        "nats",
        "KL between the policy before the step and during its updates, per token.",
        "actor/ppo_kl",
    ),
    Metric("actor/kl_loss", "nats", "KL to the reference in the loss.", "actor/kl_loss"),
    Metric("actor/pg_loss", "", "Policy loss.", "actor/pg_loss"),
    Metric("actor/loss", "", "Policy loss with entropy bonus and KL."),
    Metric("actor/clip_fraction", "share", "Tokens whose ratio was clipped.", "actor/pg_clipfrac"),
    Metric("actor/clip_fraction_lower", "share", "Tokens clipped by clip_ratio_c.", "actor/pg_clipfrac_lower"),
    Metric("actor/grad_norm", "", "Norm of the gradient before it is clipped.", "actor/grad_norm"),
    Metric("actor/lr", "", "Learning rate.", "actor/lr"),
    Metric("actor/tokens_saved", "share", "Tokens of the update that shared prompts save."),
    Metric("actor/skipped", "", "Optimizer steps that were left out because the gradient was not finite."),
    Metric("actor/update_share", "share", "Weights that the step changed, of a sample of them; docs/long_context.md."),
    Metric(
        "actor/update_length", "", "Length of the weights' change, relative to that of the weights, of the same sample."
    ),
    Metric("critic/vf_loss", "", "Loss of the value model.", "critic/vf_loss"),
    Metric(
        "critic/explained_variance",
        "",
        "1 - variance of the values' error / variance of the returns.",
        "critic/vf_explained_var",
    ),
    Metric("critic/values_mean", "", "Mean value.", "critic/values/mean"),
    Metric("critic/*", "", "As for the actor, of the value model."),
    Metric("actor/*", "", "Further figures of the policy's update."),
    Metric("correction/*", "", "Weights and rejections of algorithm.rollout_correction.", "rollout_corr/*"),
    Metric("filter_groups/*", "", "Prompts kept by algorithm.filter_groups, and the generations they took."),
    Metric(
        "conversation/forks",
        "",
        "Mean rows of a conversation less 1: how often on_rewritten_history=fork began another row.",
    ),
    Metric("conversation/*", "", "Turns, calls and failures of conversations; docs/environments.md."),
    Metric("advantages/abs_mean", "", "Mean size of an advantage."),
    Metric(
        "mismatch/*", "", "How far the sampler's log-probs are from the trainer's; docs/rollout.md.", "rollout_corr/*"
    ),
    Metric(
        "train/zero_advantage_share", "share", "Prompts whose samples all scored alike, so that they teach nothing."
    ),
    Metric("train/epoch", "", "Pass over the prompts.", "training/epoch"),
    Metric("train/*", "", "Counters of the loop."),
    Metric("perf/tokens", "tokens", "Tokens of the step, prompts and responses.", "perf/total_num_tokens"),
    Metric(
        "perf/tokens_per_second",
        "tokens/s",
        "perf/tokens by seconds of the step, of all processes together; verl's perf/throughput is by GPU.",
        "perf/throughput",
    ),
    Metric("perf/offloaded_mb", "MB", "Activations that left the device, all processes together."),
    Metric("perf/stall_share", "share", "Time of a step in which a device waited for offloaded activations."),
    Metric("perf/stall_ms", "ms", "The same in time."),
    Metric(
        "perf/peak_memory_gb",
        "GB",
        "Highest memory of a process: of the device, on the CPU resident.",
        "perf/max_memory_allocated_gb",
    ),
    Metric("perf/offload/*", "", "Activation offloading by role; docs/activation_offloading.md."),
    Metric("perf/rollout/*", "", "Load of the sampler; docs/rollout.md."),
    Metric("perf/*", "", "Further figures of speed."),
    Metric("memory/*", "GB", "Memory in use before and after each phase, of the largest process; docs/rollout.md."),
    Metric("timing_s/rollout", "s", "Generation.", "timing_s/gen"),
    Metric("timing_s/advantages", "s", "Advantages.", "timing_s/adv"),
    Metric("timing_s/*", "s", "Time of a phase of the step; `step` is the whole.", "timing_s/*"),
    Metric("val/*", "", "Held-out results: accuracy, reward, and both by data source.", "val-core/*"),
)
"""In the order of the page; the first that matches a name describes it."""


def described(name: str) -> Metric | None:
    """Return the description of a metric, or None if the table has none."""
    return next((metric for metric in METRIC_TABLE if fnmatchcase(name, metric.name)), None)


def page() -> str:
    """Return the text of docs/metrics.md."""
    rows = [f"| `{m.name}` | {m.unit} | {m.meaning} | {f'`{m.verl}`' if m.verl else ''} |" for m in METRIC_TABLE]
    head = [
        "# Metrics",
        "",
        "Each row of `metrics.jsonl`, tensorboard and wandb has these. A name with `*` stands for several; the first row that fits a",
        "name describes it. The page is written by `python -m rlx.trainer.metric_table`.",
        "",
        "| metric | unit | meaning | verl's name |",
        "|---|---|---|---|",
    ]
    columns = [f"| `{c.title}` | {', or '.join(f'`{name}`' for name in c.metrics)} |" for c in PROGRESS_COLUMNS]
    table = ["", "## The columns of the console", "", "A column shows the first of its metrics that a step has.", ""]
    phases = ", ".join(f"`{phase.label}` is {name}" for name, phase in PHASES.items())
    return (
        "\n".join([*head, *rows, *table, "| column | metric |", "|---|---|", *columns, "", f"Phases: {phases}."]) + "\n"
    )


if __name__ == "__main__":
    print(page(), end="")
