"""Write the help text and docs/configuration.md (`python -m rlx.config.describe` prints it)."""

from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from rlx.config.compose.command_line import DEFAULT_GROUPS, group_choices
from rlx.config.schema import PPOConfig
from rlx.config.schema.tree import Leaf, as_text, children, describe_range, describe_type, section_in

USAGE = """\
rlx train [group=file ...] [key=value ...]        (or python -m rlx.main_ppo ...)
rlx check [--tree] [--on 8xh100] [group=file ...] [key=value ...]

Trains a language model with PPO or GRPO. Without arguments: a tiny model learns generated word
problems on this machine.

  --check      `rlx check`: compose, validate, predict the memory, and stop
  --tree       print the whole configuration, too
  --on 8xh100  check for that machine instead of this one; 1x24gb is any card of 24 GB
  --help       this text

Exit code: 0 done; 1 the run failed, its first cause comes last; 2 faults in the configuration;
130 after Ctrl-C; 141 if the output pipe was closed; 143 after SIGTERM.
"""

EXAMPLES = """\
Examples:
  rlx train                                              the default run
  rlx train algorithm.adv_estimator=gae                  the default run with PPO and a critic
  rlx train actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct data.train_files=mine.jsonl \\
    data.answer_key=answer custom_reward_function.path=reward.py
                                                         your model, data and reward on this machine's GPUs
  rlx check --on 8xh100 experiment=gsm8k_grpo_8gpu       an experiment's memory on a machine
"""

PAGE = Path(__file__).with_name("configuration.md")
"""The page's text, with <keys> for the generated part."""


def help_text() -> str:
    lines = [USAGE, "Groups (files in configs/):"]
    for group, files in group_choices().items():
        default = DEFAULT_GROUPS.get(group)
        lines += [f"  {group}={file}{'   (default)' if file == default else ''}" for file in files]
    lines += ["", "Keys (all of them, with defaults: --tree, docs/configuration.md):"]
    lines += [f"  {name + '.*':26}{child.info.doc}" for name, child in children(PPOConfig()).items()]
    return "\n".join([*lines, "", EXAMPLES])


def page() -> str:
    first_place: dict[type, str] = {}
    keys = "\n".join(_section(name, child, first_place) for name, child in children(PPOConfig()).items())
    return PAGE.read_text(encoding="utf-8").replace("<keys>\n", keys)


def _section(path: str, section: Leaf, first_place: dict[type, str]) -> str:
    """Return a heading, a table of the section's keys, and its subsections; a repeated class only links to its first table."""
    kind = type(section.default)
    text = f"### `{path}`\n\n{section.info.doc}"
    if kind in first_place:
        changed = _differences(kind(), section.default)
        return f"{text} Keys as in [`{first_place[kind]}`](#{first_place[kind].replace('.', '')}){changed}.\n"
    first_place[kind] = path
    known = children(section.default).items()
    rows = [_row(name, child) for name, child in known if not is_dataclass(child.default)]
    table = "\n| key | values; default | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    below = [_section(f"{path}.{name}", child, first_place) for name, child in known if is_dataclass(child.default)]
    lists = [(name, part, child.info) for name, child in known if (part := section_in(child.hint))]
    below += [_section(f"{path}.{name}[]", Leaf(part, part(), info), first_place) for name, part, info in lists]
    return "\n".join([text, table, *below])


def _differences(usual: Any, here: Any) -> str:
    others = [(name, child.default) for name, child in children(here).items() if child.default != getattr(usual, name)]
    changed = ", ".join(f"`{name}` is {as_text(value)}" for name, value in others)
    return f", but {changed}" if changed else ""


def _row(name: str, leaf: Leaf) -> str:
    kind = ", ".join(filter(None, (describe_type(leaf.hint), describe_range(leaf.info).removeprefix("one of "))))
    if leaf.info.choices is not None and not kind.startswith("list"):
        kind = kind.partition(", ")[2]
    if leaf.default is None:
        kind = kind.replace(" or null", "")  # the default shows it
    values = f"`{as_text(leaf.default)}`" if isinstance(leaf.default, bool) else f"{kind}; `{as_text(leaf.default)}`"
    row = f"| `{name}` | {values} | {leaf.info.doc} |"
    return row.replace("<=", "≤").replace(">=", "≥")


if __name__ == "__main__":
    print(page(), end="")
