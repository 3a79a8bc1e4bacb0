"""Choose what a command leaves open: processes, algorithm, sizes of batches. `model.path=… data.train_files=…` alone then trains.

Only for a command that names a model and no experiment file; a key that it sets is never changed.
"""

from collections.abc import Sequence

from rlx.config.compose.command_line import MODEL_KEY, Composed, compose
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Machine, on_accelerator
from rlx.config.schema import ActorConfig, PPOConfig

ACTOR, ROLLOUT, PROCESSES = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer.n_gpus_per_node"
TOKENS, ROWS = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
BY_TOKENS = f"{ACTOR}.use_dynamic_bsz"
ESTIMATOR, BATCH, MINI_BATCH = "algorithm.adv_estimator", "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
GRPO = {ESTIMATOR: "grpo", f"{ROLLOUT}.n": "8", BATCH: "128", MINI_BATCH: "64"}
"""Sizes with which a first run shows within some steps whether it learns."""
MOST_TOKENS, LEAST_TOKENS = 65_536, 1024


def chosen(arguments: Sequence[str], composed: Composed, machine: Machine) -> list[str]:
    """Return overrides to add to a command line; empty if it leaves nothing open.

    Args:
        arguments: overrides of the command line.
        composed: the same, composed.
        machine: decides on the processes, and with the memory forecast on the tokens of a micro-batch.
    """
    given = composed.set_keys
    has_file = any(argument.lstrip("+").startswith("experiment=") for argument in arguments)
    if composed.faults or has_file or MODEL_KEY not in given:
        return []
    found: dict[str, str] = {}
    if PROCESSES not in given:
        found[PROCESSES] = str(_per_machine(composed, machine))
    if ESTIMATOR not in given and not any(key.startswith("critic.") for key in given):
        found |= {key: value for key, value in GRPO.items() if key not in given} | _sizes(composed)
    if "data.train_files" in given and not given & {"data.val_files", "trainer.val_before_train", "trainer.test_freq"}:
        found["trainer.val_before_train"] = "False"  # the default files are problems of the generated task
    if not given & {TOKENS, ROWS, BY_TOKENS}:
        found[BY_TOKENS] = "True"
        found[TOKENS] = str(_tokens([*arguments, *_texts(found)], machine))
    return _texts(found)


def _sizes(composed: Composed) -> dict[str, str]:
    """Return the size of a batch or mini-batch that fits to the one that is given alone, both in prompts."""
    given = composed.set_keys
    prompts, mini = composed.partial.data.train_batch_size, composed.partial.actor_rollout_ref.actor.ppo_mini_batch_size
    if BATCH in given and MINI_BATCH not in given:
        usual = int(GRPO[MINI_BATCH])
        return {MINI_BATCH: str(usual if prompts % usual == 0 else prompts)}
    if MINI_BATCH in given and BATCH not in given:
        usual = int(GRPO[BATCH])
        return {BATCH: str(usual if usual % mini == 0 else mini)}
    return {}


def _per_machine(composed: Composed, machine: Machine) -> int:
    with_gpus = [count for count in machine.node_gpus if count]  # a cluster's head often has none
    return min(with_gpus, default=1) if on_accelerator(composed.partial, machine) else 1


def _tokens(arguments: Sequence[str], machine: Machine) -> int:
    """Return the most tokens with which the run fits by the forecast: a power of two, or the longest row, which is the least.

    Without a forecast the default is returned.
    """

    def of(tokens: int) -> PPOConfig:
        return compose([*arguments, f"{TOKENS}={tokens}"]).partial

    data, usual = of(MOST_TOKENS).data, ActorConfig().ppo_max_token_len_per_gpu
    longest, tokens = data.max_prompt_length + data.max_response_length, MOST_TOKENS
    while tokens > max(longest, LEAST_TOKENS):
        forecast = MemoryForecast.of(of(tokens), machine)
        if forecast.memory_bytes is None or forecast.unknown:
            return max(usual, longest)
        if not forecast.oversized():
            return tokens
        tokens //= 2
    return longest


def _texts(found: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in found.items()]
