"""Choose what a command leaves open: processes, algorithm, sizes of batches, the rate of small models. `model.path=… data.train_files=…` alone then trains.

Only for a command that names a model and no experiment file; a key that it sets is never changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlx.config.compose.command_line import MODEL_KEY, Composed, compose
from rlx.config.faults import Fault
from rlx.config.forecast.decoders import decoder_of
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.machine import Machine, on_accelerator
from rlx.config.schema import ActorConfig, PPOConfig
from rlx.config.schema.tree import with_value
from rlx.offload.plan.decoder import Decoder

ACTOR, ROLLOUT, PROCESSES = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer.n_gpus_per_node"
TOKENS, ROWS = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
BY_TOKENS = f"{ACTOR}.use_dynamic_bsz"
ESTIMATOR, BATCH, MINI_BATCH = "algorithm.adv_estimator", "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size"
FILES = "data.train_files"
RATE = f"{ACTOR}.optim.lr"
SAMPLES, SEQUENCES = f"{ROLLOUT}.n", f"{ROLLOUT}.max_num_seqs"
GRPO = {ESTIMATOR: "grpo", SAMPLES: "8"}
PROMPTS, MINI_PROMPTS = 128, 64
"""Sizes with which a first run shows within some steps whether it learns."""
CPU_PROMPTS = 16
"""On a CPU, where 128 prompts would take half an hour a step."""
CPU_SHARE = 0.5  # of a host's memory for states and activations, beside Python, torch, Ray and other programs
MOST_TOKENS, LEAST_TOKENS = 65_536, 1024
RATES = ((10e6, "4e-4"), (300e6, "2e-5"))
"""Learning rates of models with fewer weights than these, from tried runs (docs/real_model.md); the default suits larger ones."""
OF_SAMPLER = ("rollout", "sync")  # phases whose memory does not depend on the tokens of a micro-batch


def chosen(arguments: Sequence[str], composed: Composed, machine: Machine, rows: int | None) -> list[str]:
    """Return overrides to add to a command line of these arguments; empty if it leaves nothing open.

    A command with faults gets them too, else rules would report what the choices answer. Its tokens are the default's. `rows` are
    the training rows, counted to PROMPTS or further; None or 0 if they cannot be counted.
    """
    given, found = composed.set_keys, dict[str, str]()
    if not _is_open(arguments, given):
        return []
    if PROCESSES not in given:
        with_gpus = [count for count in machine.node_gpus if count]  # a cluster's head often has none
        left = min(with_gpus, default=1) - composed.partial.trainer.n_rollout_gpus
        found[PROCESSES] = str(max(1, left) if on_accelerator(composed.partial, machine) else 1)
    if not _of_algorithm(given):
        found |= {key: value for key, value in GRPO.items() if key not in given}
        most = most_prompts(composed, machine)
        found |= _sizes(composed, min(most, rows or most))
    if FILES in given and not given & {"data.val_files", "trainer.val_before_train", "trainer.test_freq"}:
        found["trainer.val_before_train"] = "False"  # the default files are problems of the generated task
    if not on_accelerator(composed.partial, machine) and machine.host_bytes is not None:
        machine = replace(machine, host_bytes=int(CPU_SHARE * machine.host_bytes))
    if has_tokens := not given & {TOKENS, ROWS, BY_TOKENS}:
        found[BY_TOKENS] = "True"
    if composed.faults:  # a forecast needs every value
        return _texts(found)
    config = compose([*arguments, *_texts(found)]).partial
    if RATE not in given:
        found |= _rate(config)
    if has_tokens:
        tokens = _tokens(config, machine)
        found[TOKENS], config = str(tokens), with_value(config, TOKENS, tokens)
    if SEQUENCES not in given and config.actor_rollout_ref.rollout.name == "hf":
        found |= _sequences(config, machine)
    return _texts(found)


def most_prompts(composed: Composed, machine: Machine) -> int:
    return PROMPTS if on_accelerator(composed.partial, machine) else CPU_PROMPTS


def why_fewer(rows: int | None, choices: Sequence[str], most: int = PROMPTS) -> str:
    """Return a sentence if the chosen batch has fewer than `most` prompts because the training files have few rows, else nothing."""
    is_chosen = any(choice.startswith(f"{BATCH}=") for choice in choices)
    return f"\n{FILES} has {rows} row(s): a batch is no larger" if is_chosen and rows and rows < most else ""


def not_chosen(arguments: Sequence[str], composed: Composed) -> dict[str, str]:
    """Return the sizes that the command leaves open, but rlx does not choose beside a key that it names, each with this key."""
    named = _of_algorithm(composed.set_keys) if _is_open(arguments, composed.set_keys) else []
    return {key: named[0] for key in (SAMPLES, BATCH, MINI_BATCH) if named and key not in composed.set_keys}


def with_reason(fault: Fault, unchosen: Mapping[str, str]) -> Fault:
    keys = [key for key in fault.keys if key in unchosen]
    if not keys:
        return fault
    reason = f"rlx chooses {' and '.join(keys)} only for a command without {unchosen[keys[0]]}"
    return replace(fault, got=f"{fault.got}; {reason}")


def _is_open(arguments: Sequence[str], given: frozenset[str]) -> bool:
    """Whether rlx chooses at all: the command names a model and no experiment."""
    return MODEL_KEY in given and not any(each.lstrip("+").startswith("experiment=") for each in arguments)


def _of_algorithm(given: frozenset[str]) -> list[str]:
    """Return the given keys beside which rlx chooses neither algorithm nor sizes."""
    return sorted(key for key in given if key == ESTIMATOR or key.startswith("critic."))


def _sizes(composed: Composed, most: int) -> dict[str, str]:
    """Return the sizes of batch and mini-batch that are open, both in prompts; the batch has at most `most`."""
    given, config, sizes = composed.set_keys, composed.partial, dict[str, str]()
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if BATCH not in given:
        batch = max(most - most % mini, mini) if MINI_BATCH in given else most
        sizes[BATCH] = str(batch)
    if MINI_BATCH not in given:
        sizes[MINI_BATCH] = str(batch if batch % MINI_PROMPTS else MINI_PROMPTS)
    return sizes


def _tokens(config: PPOConfig, machine: Machine) -> int:
    """Return the most tokens with which the run fits by the forecast: a power of two, or the longest row, which is the least.

    Without a forecast the default is returned. The sampler's phases do not count: fewer tokens would not make them fit.
    """
    tokens = MOST_TOKENS
    longest = config.data.max_prompt_length + config.data.max_response_length
    while tokens > max(longest, LEAST_TOKENS):
        forecast = MemoryForecast.of(with_value(config, TOKENS, tokens), machine)
        if forecast.memory_bytes is None or forecast.unknown:
            return max(ActorConfig().ppo_max_token_len_per_gpu, longest)
        if all(phase.name in OF_SAMPLER for phase in forecast.oversized()):
            return tokens
        tokens //= 2
    return longest


def _sequences(config: PPOConfig, machine: Machine) -> dict[str, str]:
    """Return the most sequences that transformers may decode at once by the forecast, a power of two; empty if the default may."""
    usual = number = config.actor_rollout_ref.rollout.max_num_seqs
    while number > 1:
        forecast = MemoryForecast.of(with_value(config, SEQUENCES, number), machine)
        if forecast.memory_bytes is None or forecast.unknown or forecast.phase("rollout").fits():
            break
        number //= 2
    return {SEQUENCES: str(number)} if number < usual else {}


def _rate(config: PPOConfig) -> dict[str, str]:
    """Return the learning rate of a small model whose weights are all trained; empty for another, or one of unknown size."""
    model = config.actor_rollout_ref.model
    shape = decoder_of(model)
    if model.lora_rank or not isinstance(shape, Decoder):
        return {}
    return next(({RATE: rate} for weights, rate in RATES if shape.parameters < weights), {})


def _texts(found: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in found.items()]
