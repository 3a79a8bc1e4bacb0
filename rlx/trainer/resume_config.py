"""Keep every configuration that a run had, and answer what a resume changes.

<run folder>/
    config.yaml                     the first configuration, without secrets
    config_2_from_step_40.yaml      what the second part changed, from step 40 on; then config_3_from_step_...
"""

import re
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlx.checkpoint.folders import replacing_file
from rlx.config.faults import Fault
from rlx.config.schema import PPOConfig
from rlx.config.schema.tree import LEAVES, as_text
from rlx.errors import ExplainedError, storing
from rlx.program import program
from rlx.trainer.checkpoints import ResumeError, checkpoint_of, read_driver_state, require_step, resumes_here

FIRST = "config.yaml"
LATER = re.compile(r"config_(\d+)_from_step_(\d+)\.yaml")

ROWS = ("data.train_files", "data.prompt_key", "data.answer_key", "data.reward_fn_key")
"""Keys that say where the rows are. A checkpoint with a digest of its rows allows other values for the same rows."""
REFUSED = {
    "the starting model, which gives the reference and the shape of the weights": (
        *("actor_rollout_ref.model.path", "*.model.override_config", "*.model.tiny.*", "*.model.lora_*"),
        *("*.model.lora.use_*", "*.model.target_modules", "*.model.quantization", "warm_start.target_accuracy"),
        *("warm_start.max_steps", "warm_start.batch_size", "warm_start.lr", "warm_start.eval_every"),
    ),
    "the prompts and their order, in which the checkpoint holds a position": (
        *("data.train_max_samples", *ROWS, "data.shuffle", "data.seed", "data.custom_cls.*"),
        *("data.arithmetic.difficulty", "data.arithmetic.train_size", "data.arithmetic.seed"),
    ),
    "the estimator and its controllers, whose state the checkpoint holds": (
        *("algorithm.adv_estimator", "algorithm.kl_ctrl.type"),
    ),
}
"""Keys that the saved state belongs to: with another value the run would continue with another meaning."""

OF_THE_RESUME = ("trainer.resume_mode", "trainer.resume_from_path")
SAID = ("trainer.total_epochs", "trainer.total_training_steps", "trainer.critic_warmup", "trainer.device")
SAMPLERS = "trainer.n_rollout_gpus"  # with max_staleness, samplers of their own have another round of tokens
LENGTHS = {"trainer.total_training_steps": "step", "trainer.total_epochs": "epoch"}
FREE = (
    *("trainer.*", "ray_kwargs.*", "warm_start.cache_dir"),
    *("data.val_*", *ROWS, "data.arithmetic.val_size", "actor_rollout_ref.rollout.val_kwargs.*"),
    *("*.activation_offload.*", "*.enable_activation_offload", "*.enable_gradient_checkpointing", "*.tiled_mlp"),
    *("*micro_batch_size_per_gpu", "*use_dynamic_bsz", "*max_token_len_per_gpu", "*.ulysses_sequence_parallel_size"),
    *("*.strategy", "*.param_offload", "*.optimizer_offload", "*.optimizer_state", "*.offload_policy"),
    *("*.reshard_after_forward", "*.fsdp_size", "*.forward_prefetch", "*.save_contents", "*.gpu_memory_utilization"),
    *("*.max_num_seqs", "*.max_num_batched_tokens", "*.enforce_eager", "*.free_cache_engine", "*.engines_per_gpu"),
    *("*.enable_chunked_prefill", "*.enable_prefix_caching", "*.tensor_model_parallel_size", "*.assign_late"),
    *("reward.num_workers", "reward.max_concurrent", "reward.memory_limit_gb", "reward.timeout_s"),
)
"""Keys that change where, how fast and how often, but not what is computed, up to rounding. All others are said, as those of SAID."""


class ChangedKey(NamedTuple):
    """Another value of a key than the part of the run before had."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {as_text(self.before)} -> {as_text(self.now)}"


def changes(folder: Path, step: int, text: str, knows_rows: bool = False) -> list[ChangedKey]:
    """Return what a resume from `step` with the configuration `text` changes; nothing is known without a config.yaml in the folder.

    `knows_rows`: the checkpoint has a digest of its rows, which then tells whether they are others. Raises ResumeError if keys
    changed that the saved state belongs to, or a kept file cannot be read.
    """
    if not (folder / FIRST).is_file():
        return []
    before, now = config_at(folder, step), flat(text, "the new configuration")
    known = [key for key in now if key in before and not _is_one_of(key, OF_THE_RESUME)]
    found = [ChangedKey(key, before[key], now[key]) for key in known if before[key] != now[key]]
    judged = [change for change in found if not (knows_rows and change.key in ROWS)]
    refused = {
        what: [str(change) for change in judged if _is_one_of(change.key, keys)] for what, keys in REFUSED.items()
    }
    if reasons := [f"{', '.join(changes)} ({what})" for what, changes in refused.items() if changes]:
        raise ResumeError(
            f"cannot resume {folder} with another value of {'; '.join(reasons)}; set them back, or start a "
            "new run: trainer.experiment_name=NAME, or trainer.resume_mode=disable. To start it with the trained weights, "
            f"export the checkpoint: {program('export')}"
        )
    return found


def changes_since(config: PPOConfig, checkpoint: Path, yaml: str) -> list[ChangedKey]:
    """Return what a resume from this checkpoint changes. A validation writes no checkpoint, so it may have any settings.

    Raises ResumeError as `changes`.
    """
    if config.trainer.val_only or not yaml:
        return []
    state = read_driver_state(checkpoint)
    return changes(checkpoint.parent.parent, require_step(checkpoint), yaml, "rows" in state.sampler)


def faults_of_resume(config: PPOConfig, yaml: str) -> tuple[Fault, ...]:
    """Return why the run cannot continue its checkpoint, as far as small files on this machine show it; takes milliseconds."""
    if not resumes_here(config):
        return ()
    try:
        checkpoint = checkpoint_of(config).checkpoint
        if checkpoint is not None:
            changes_since(config, checkpoint, yaml)
    except ExplainedError as error:
        what, expected = "the run cannot be resumed", "a whole checkpoint of such a run"
        return (Fault.of(error, what, expected, "set trainer.resume_mode=disable for a new run"),)
    return ()


def keep(folder: Path, text: str, step: int, changed: list[ChangedKey]) -> list[str]:
    """Write the configuration of a new run, or the changes of one that continues from `step`; return what to tell the user."""
    if not (folder / FIRST).is_file():
        _write(folder / FIRST, text)
        return []
    later = _later(folder)
    if not changed and not [each for _, each, _ in later if each > step]:
        return []
    file = folder / f"config_{max([1, *(number for number, _, _ in later)]) + 1}_from_step_{step}.yaml"
    head = f"# Resumed from step {step} at {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z} with these changes.\n"
    pairs = {change.key: {"before": change.before, "now": change.now} for change in changed}
    _write(file, head + yaml.safe_dump(pairs, sort_keys=False, default_flow_style=None))
    others = [change for change in changed if change.key not in longer(changed, text)]
    has_rounds = bool(flat(text, folder).get("actor_rollout_ref.rollout.partial.max_staleness"))
    moved = has_rounds and any(each.key == SAMPLERS and 0 in (each.before, each.now) for each in others)
    said = (*SAID, SAMPLERS) if moved else SAID
    free = [each for each in others if _is_one_of(each.key, FREE) and not _is_one_of(each.key, said)]
    told = [f"from step {step} on the run trains differently: {change}" for change in others if change not in free]
    if free:
        told.append(f"changed from step {step} on, with the same results: {'; '.join(map(str, free))}")
    return told


def longer(changed: list[ChangedKey], text: str) -> dict[str, str]:
    """Return a line for each key that gives the run another length and changes nothing else, by key.

    That is so if no learning rate depends on the number of steps. `changed` is from `changes`, `text` the new configuration.
    """
    now = flat(text, "the new configuration")
    for role in ("actor_rollout_ref.actor", *(["critic"] if now.get("algorithm.adv_estimator") == "gae" else [])):
        names = ("scheduler_type", "warmup_steps", "warmup_steps_ratio")
        kind, steps, ratio = (now.get(f"{role}.optim.lr_{name}") for name in names)
        if kind != "constant" or (steps == -1 and ratio != 0):
            return {}
    return {
        change.key: f"continues to {LENGTHS[change.key]} {change.now} instead of {change.before}"
        for change in changed
        if change.key in LENGTHS and isinstance(change.before, int) and isinstance(change.now, int)
    }


def config_at(folder: Path, step: int) -> dict[str, Any]:
    """Return the configuration that led to this step, by dotted key. A resume from an earlier step undid later changes."""
    known = flat((folder / FIRST).read_text(), folder / FIRST)
    history: list[tuple[int, dict[str, Any]]] = []
    for _, begin, file in _later(folder):
        history = [part for part in history if part[0] <= begin]
        history.append((begin, {key: pair["now"] for key, pair in _read(file.read_text(), file).items()}))
    for begin, values in history:
        known |= values if begin <= step else {}
    return known


def _later(folder: Path) -> list[tuple[int, int, Path]]:
    """Return (number, step, file) of the kept changes, in order."""
    found = [(LATER.fullmatch(file.name), file) for file in folder.glob("config_*.yaml")]
    return sorted((int(match[1]), int(match[2]), file) for match, file in found if match)


def flat(text: str, source: object) -> dict[str, Any]:
    """Return the values of a YAML text by dotted key of the schema; a mapping that is one key's value stays whole."""
    return _flat(_read(text, source))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= _flat(value, f"{key}.") if isinstance(value, dict) and key not in LEAVES else {key: value}
    return found


def _read(text: str, source: object) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as fault:
        raise ResumeError(f"{source}: cannot be read as YAML ({' '.join(str(fault).split())})") from None
    if tree is not None and not isinstance(tree, dict):
        raise ResumeError(f"{source}: got a {type(tree).__name__}, expected a mapping of keys; restore the file")
    return tree or {}


def _write(file: Path, text: str) -> None:
    with storing(file), replacing_file(file) as opened:
        opened.write(text)


def _is_one_of(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
