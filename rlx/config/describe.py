"""Write the help text and docs/configuration.md (`python -m rlx.config.describe` prints it)."""

from dataclasses import is_dataclass
from typing import Any

from rlx.config.compose.command_line import DEFAULT_GROUPS, group_choices
from rlx.config.compose.verl_keys import REMEDIES
from rlx.config.forecast.memory_forecast import __doc__ as MEMORY
from rlx.config.schema import PPOConfig
from rlx.config.schema.tree import Leaf, as_text, children, describe_range, describe_type

USAGE = """\
python -m rlx.main_ppo [--check] [--help] [group=file ...] [key=value ...]

Trains a language model with PPO or GRPO. Without arguments: a tiny model learns generated word problems on this machine.

  --check   compose, validate, print the whole configuration and a prediction of memory, and stop
  --help    this text

Exit code: 0 done; 1 the run failed, its first cause on the last line; 2 faults in the configuration; 130 after Ctrl-C or SIGTERM.
"""

EXAMPLES = """\
Examples:
  python -m rlx.main_ppo                                        the default run
  python -m rlx.main_ppo algorithm.adv_estimator=gae            the default run with PPO and a critic
  python -m rlx.main_ppo --check experiment=gsm8k_grpo_8gpu     the experiment's settings and its memory
"""

INTRODUCTION = """\
# Configuration

`python -m rlx.config.describe` prints this page; change the code, not the page.

## How is a configuration composed?

The typed tree below holds every key with its default. A YAML file in `configs/experiment/` overrides some keys for one
experiment, and the command line overrides both:

    python -m rlx.main_ppo experiment=gsm8k_grpo_1gpu trainer.total_epochs=1

If the command names neither an experiment nor `actor_rollout_ref.model.path`, rlx composes `experiment=arithmetic`, which
needs nothing but this package. Values have Hydra's form: `null`, `True`, `[a,b]`, `{a: 1}`, `${other.key}`,
`${oc.env:NAME}`. Quote a value with special characters twice, once for the shell: `"key='a=b'"`.

## What is checked, and when?

`python -m rlx.main_ppo --check ...` composes, validates, prints the tree and a prediction of memory, and stops. Before any
worker starts rlx lists all faults, each with the value found, the value expected and a remedy. The exit code is 2. Faults
are unknown keys (with the nearest known name), wrong types, values out of range, combinations that cannot work, missing
devices or packages, folders that cannot be written, and code of your own that cannot be imported or called. One warning
lists the keys that have no effect under the other options.

Before a warm start and before Ray, a run makes slower checks and lists all faults with exit code 1. It checks the checkpoint
to resume from, the configs of models, the names in `override_config`, `attn_implementation`, `target_modules` and
`ray_kwargs.ray_init`, tokenizers, every prompt, and each data source's reward function. Workers check weights and vLLM's options.
"""

DIFFERENCES = """\
## What differs from verl

Keys that both have keep verl's names and meanings. The differences:

- The entry is `python -m rlx.main_ppo`; it also runs without arguments. Overrides never need `+`; unknown keys are faults.
- Defaults: `actor.strategy` is fsdp2, `rollout.calculate_log_probs` is on, `rollout.tensor_model_parallel_size` is 1,
  `trainer.resume_mode` is disable (a second run starts anew in its own folder).
- `ppo_mini_batch_size` counts prompts, as in verl, and must divide `data.train_batch_size`. Micro-batch sizes need not
  divide anything: losses are normalised over the whole mini-batch, whatever the micro-batches and number of processes.
- Set exactly one of `ppo_micro_batch_size_per_gpu` and `use_dynamic_bsz`. The critic, the reference and the old log-probs
  take the actor's values for their null keys.
- `trainer.n_gpus_per_node` counts processes; on CPU the number is free.
- Null keys of the critic mean the actor's value. With `critic.model.path=null` the critic also takes the actor's
  `trust_remote_code`, `override_config` and `attn_implementation` if its own are the defaults. As in verl, it does not
  take `tiled_mlp`, `use_liger`, `enable_activation_offload`, `use_remove_padding=False` or adapters: set them in
  `critic.model` too. `critic.fsdp` configures its sharding.
- `model.enable_activation_offload` has options, `model.activation_offload`. It works with and without gradient
  checkpointing, but not with `actor.use_torch_compile`. The reference shares the actor's model keys, but offloads nothing
  because it has no backward. Activations that exceed `max_host_bytes` stay on the device, or go to `directory` if it is set;
  with tier disk `max_host_bytes` bounds the staging memory. rlx checks before a run that the directory exists and is
  writable; on a cluster each worker checks it at its start.
- `data.train_files` also takes JSONL and `builtin:arithmetic`; a single file needs no brackets.
- Rewards: `compute_score(data_source, solution_str, ground_truth, extra_info=None)` works unchanged. It runs in processes
  with limits of time and memory. `reward.reward_manager.name` is naive or batch. A reward model has one label per
  sequence; `reward_model.rule_weight` adds the functions' score. See [rewards.md](rewards.md).
- `algorithm.rollout_correction` has verl's weights and five of its tests. Bounds of a ratio apply to
  r = trainer over sampler in every test. `rollout_token_veto_threshold` still exists. The sampler's mismatch is always logged.
  [rollout.md](rollout.md#mismatch-and-correction) explains the effect of a rejected token.
- [algorithms.md](algorithms.md) lists advantage estimators, policy losses and their differences. `actor.policy_loss.path`
  names a file with a policy loss of your own, which returns one number per token; `loss_agg_mode` applies to every loss.
- `algorithm.filter_groups` works with every estimator. DAPO's length penalty is `reward.overlong_buffer`, in training only.

For these keys and values of verl the error names a remedy:
"""


def help_text() -> str:
    """Return the text of `--help`: usage, groups, the top of the tree."""
    lines = [USAGE, "Groups (files in configs/):"]
    for group, files in group_choices().items():
        default = DEFAULT_GROUPS.get(group)
        lines += [f"  {group}={file}{'   (default)' if file == default else ''}" for file in files]
    lines += ["", "Keys (all of them, with defaults: --check, docs/configuration.md):"]
    lines += [f"  {name + '.*':26}{child.info.doc}" for name, child in children(PPOConfig()).items()]
    return "\n".join([*lines, "", EXAMPLES])


def page() -> str:
    """Return the text of docs/configuration.md."""
    first_place: dict[type, str] = {}
    sections = "\n".join(_section(name, child, first_place) for name, child in children(PPOConfig()).items())
    verl = "\n".join(f"| `{key}` | {remedy} |" for key, remedy in REMEDIES.items())
    memory = (MEMORY or "").split("\n\n", 1)[1].strip()
    return (
        f"{INTRODUCTION}\n{DIFFERENCES}\n| key | what to do |\n|---|---|\n{verl}\n\n"
        f"## The prediction of memory\n\nA run prints at its start the memory of each phase and the longest sequences that fit; `--check` also prints the parts.\n\n{memory}\n\n## All keys\n\n{sections}"
    )


def _section(path: str, section: Leaf, first_place: dict[type, str]) -> str:
    """Return a heading, a table of the section's keys, and its subsections; a repeated class only links to its first table."""
    kind = type(section.default)
    text = f"### `{path}`\n\n{section.info.doc}"
    if kind in first_place:
        changed = _differences(path, kind(), section.default)
        return f"{text} Keys as in [`{first_place[kind]}`](#{_anchor(first_place[kind])}){changed}.\n"
    first_place[kind] = path
    known = children(section.default)
    rows = [_row(name, child) for name, child in known.items() if not is_dataclass(child.default)]
    table = "\n| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    below = [
        _section(f"{path}.{name}", child, first_place) for name, child in known.items() if is_dataclass(child.default)
    ]
    return "\n".join([text, *([table] if table else [""]), *below])


def _differences(path: str, usual: Any, here: Any) -> str:
    changed = [
        f"`{name}` is {as_text(child.default)}"
        for name, child in children(here).items()
        if child.default != getattr(usual, name)
    ]
    return f", but {', '.join(changed)}" if changed else ""


def _row(name: str, leaf: Leaf) -> str:
    default = as_text(leaf.default)
    allowed = describe_range(leaf.info)
    kind = f"{describe_type(leaf.hint)}{'; ' if allowed else ''}{allowed}"
    return f"| `{name}` | {kind} | `{default}` | {leaf.info.doc} |".replace("<=", "≤").replace(">=", "≥")


def _anchor(path: str) -> str:
    """Return the anchor that Markdown viewers give to a path's heading."""
    return path.replace(".", "")


if __name__ == "__main__":
    print(page(), end="")
