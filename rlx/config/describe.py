"""The configuration in words: the help text, and docs/configuration.md (`python -m rlx.config.describe` prints it)."""

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
  python -m rlx.main_ppo algorithm.adv_estimator=gae            the same with PPO and a critic
  python -m rlx.main_ppo --check experiment=gsm8k_grpo_8gpu     what that experiment sets, and what it needs
"""

INTRODUCTION = """\
# Configuration

This page is printed by `python -m rlx.config.describe`; change the code it describes, not the page.

## How a configuration comes about

The typed tree below holds every key with its default. A YAML file in `configs/experiment/` holds what differs from it
for one experiment, and the command line has the last word:

    python -m rlx.main_ppo experiment=gsm8k_grpo_1gpu trainer.total_epochs=1

When the command names neither an experiment nor `actor_rollout_ref.model.path`, `experiment=arithmetic` is composed: the
run that needs nothing but this package. Values are written as Hydra writes them: `null`, `True`, `[a,b]`, `{a: 1}`,
`${other.key}`, `${oc.env:NAME}`; quote what holds special characters twice, once for the shell: `"key='a=b'"`.

`python -m rlx.main_ppo --check ...` composes, validates, prints the tree and a prediction of memory, and stops. All
faults are listed at once before any worker starts, with what was found, what was expected and what to do, and exit code
2: unknown keys with the nearest known name, wrong types, values out of range, combinations that cannot work, what
this machine or cluster lacks, folders that cannot be written, and code of your own that cannot be imported or called.
Keys that have no effect under the other options give one warning.

A run then reads what takes longer to look at, still before a warm start and before Ray, and again says at once what is
wrong, with exit code 1: the checkpoint to resume from, the configs of models and the names in `override_config`,
`attn_implementation` and `target_modules`, tokenizers, every prompt, whether each data source has a reward function, and
the names in `ray_kwargs.ray_init`. The weights of models and the options of vLLM are looked at by the workers.
"""

DIFFERENCES = """\
## What differs from verl

Keys and meanings are verl's wherever both have the feature. The differences:

- The entry is `python -m rlx.main_ppo`, and without arguments it runs.
- Defaults: `actor.strategy` is fsdp2, `rollout.calculate_log_probs` is on, `rollout.tensor_model_parallel_size` is 1,
  `trainer.resume_mode` is disable (a second run starts anew in a folder of its own).
- `ppo_mini_batch_size` counts prompts, as in verl, and must divide `data.train_batch_size`; nothing below it need divide.
  Losses are normalised over the whole mini-batch, so neither the micro-batch size nor the number of processes changes them.
- Exactly one of `ppo_micro_batch_size_per_gpu` and `use_dynamic_bsz` is set. The critic, the reference and the old
  log-probs follow the actor where theirs are null.
- `trainer.n_gpus_per_node` counts processes; on CPU the number is free.
- Null keys of the critic mean the actor's value. With `critic.model.path=null` the critic also takes the actor's
  `trust_remote_code`, `override_config` and `attn_implementation` where its own are the defaults. How it
  is run stays its own, as in verl: a critic of a policy with `tiled_mlp`, `use_liger`, `enable_activation_offload`,
  `use_remove_padding=False` or adapters has none of them unless `critic.model` sets them too. Its sharding is `critic.fsdp`.
- `model.enable_activation_offload` has options, `model.activation_offload`, and works with gradient checkpointing on or
  off. It cannot be combined with `actor.use_torch_compile`. The actor's model keys are the reference's too, which has no
  backward and so nothing to offload. What exceeds `max_host_bytes` stays on the device, or goes to `directory` where one is
  set; with tier disk that key bounds the staging memory. The directory must exist and be writable: on a single machine that
  is checked beforehand, on a cluster by each worker as it starts.
- `data.train_files` also takes JSONL and `builtin:arithmetic`; a single file needs no brackets.
- Rewards: `compute_score(data_source, solution_str, ground_truth, extra_info=None)` works unchanged, and in
  processes with limits of time and memory; `reward.reward_manager.name` is naive or batch. Reward models are those with one
  label for a sequence; `reward_model.rule_weight` adds the functions' score. See [rewards.md](rewards.md).
- `algorithm.rollout_correction` has the weights of verl and five of its tests; bounds of a ratio, r = trainer over sampler,
  hold for r in every test, and `rollout_token_veto_threshold` is still there. What a rejected token leaves out is said in
  [rollout.md](rollout.md#mismatch-and-correction). The sampler's mismatch is always logged.
- Advantage estimators, policy losses and what differs in them: [algorithms.md](algorithms.md). A policy loss of your own is a
  function by path, `actor.policy_loss.path`, and gives one number per token; `loss_agg_mode` holds for every loss.
- `algorithm.filter_groups` works with every estimator; DAPO's penalty for length is `reward.overlong_buffer`, for training only.
- Overrides never need `+`: an unknown key is a fault either way.

Keys and values of verl that are answered with a remedy of their own:
"""


def help_text() -> str:
    """What `--help` prints: usage, groups, the top of the tree."""
    lines = [USAGE, "Groups (files in configs/):"]
    for group, files in group_choices().items():
        default = DEFAULT_GROUPS.get(group)
        lines += [f"  {group}={file}{'   (default)' if file == default else ''}" for file in files]
    lines += ["", "Keys (all of them, with defaults: --check, docs/configuration.md):"]
    lines += [f"  {name + '.*':26}{child.info.doc}" for name, child in children(PPOConfig()).items()]
    return "\n".join([*lines, "", EXAMPLES])


def page() -> str:
    """docs/configuration.md."""
    first_place: dict[type, str] = {}
    sections = "\n".join(_section(name, child, first_place) for name, child in children(PPOConfig()).items())
    verl = "\n".join(f"| `{key}` | {remedy} |" for key, remedy in REMEDIES.items())
    memory = (MEMORY or "").split("\n\n", 1)[1].strip()
    return (
        f"{INTRODUCTION}\n{DIFFERENCES}\n| key | what to do |\n|---|---|\n{verl}\n\n"
        f"## The prediction of memory\n\nA run says when it starts, and `--check` by parts, what its phases will hold, and how long sequences may be.\n\n{memory}\n\n## All keys\n\n{sections}"
    )


def _section(path: str, section: Leaf, first_place: dict[type, str]) -> str:
    """A heading, a table of the section's own keys, and its subsections; a class met before is only referred to."""
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
    """How Markdown viewers name the heading of a path."""
    return path.replace(".", "")


if __name__ == "__main__":
    print(page(), end="")
