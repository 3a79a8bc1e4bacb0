"""Find settings with which a run fits into memory: the keys to change, and the largest micro-batch."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from math import ceil
from typing import Any, NamedTuple

from rlx.config.forecast.memory_forecast import LENGTH_STEP, MemoryForecast
from rlx.config.machine import processes
from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import ModelRole, has_frozen_layers, sharded_roles
from rlx.config.schema.tree import value_at, with_value
from rlx.offload.plan.decoder import Decoder

AT_MOST = 3  # remedies to name, of those that suffice alone
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
SHARE = f"{ROLLOUT}.gpu_memory_utilization"
USUAL_SHARE = 0.8  # leaves vLLM room for many sequences where the weights alone take most of a device
FOLDER = "FOLDER"  # of a local disk, which the user knows
MORE = "more processes (trainer.n_gpus_per_node), shorter responses or a smaller model"


class Change(NamedTuple):
    """A key and a value that may help, and a change without which the value is refused."""

    key: str
    value: Any
    needs: "Change | None" = None

    def __str__(self) -> str:
        return f"{self.needs} with {self.key}={self.value}" if self.needs else f"{self.key}={self.value}"

    def of(self, config: PPOConfig) -> PPOConfig:
        changed: PPOConfig = with_value(self.needs.of(config) if self.needs else config, self.key, self.value)
        return changed


def remedies(forecast: MemoryForecast, is_least: bool = False) -> str:
    """Return in words which keys make the run fit: one of several, or several together."""

    def fits(*changes: Change) -> bool:
        config = forecast.config
        for change in changes:
            config = change.of(config)
        return not forecast.changed(config).oversized(is_least)

    candidates = list(_candidates(forecast))
    enough = list({change.key: change for change in reversed(candidates) if fits(change)}.values())[
        ::-1
    ]  # the first of a key
    if sized := _lowered(forecast, fits):
        enough = [*enough[: AT_MOST - 1], sized]
    if enough:
        return "set " + ", or ".join(map(str, enough[:AT_MOST]))
    if not fits(*candidates):
        sized = _lowered(forecast, lambda *changes: fits(*candidates, *changes))
        if sized is None:
            verb = "is" if len(candidates) == 1 else "are"
            named = f"{', '.join(map(str, candidates))} {verb} not enough: " if candidates else ""
            return f"{named}use {MORE}"
        candidates.append(sized)
    # The last change costs most time, so unneeded changes are dropped from the end.
    for change in reversed(candidates[:]):
        if fits(*(one for one in candidates if one is not change)):
            candidates.remove(change)
    *first, last = map(str, candidates)
    return "set " + " and ".join([*([", ".join(first)] if first else []), last])


def _candidates(forecast: MemoryForecast) -> Iterator[Change]:
    """Yield changes that lower the memory that is too small, the one that costs least time first."""
    over = forecast.oversized()
    roles = sharded_roles(forecast.config)
    if not all(phase.fits_device() for phase in over):
        for role in roles:
            yield from _of_activations(forecast, role)
        if forecast.on_device:
            yield from _of_states(forecast, roles)
            yield from _of_share(forecast)
    else:  # the host's memory is too small
        names = ("param_offload", "optimizer_offload", "offload_policy")
        flags = (f"{role.fsdp_key}.{name}" for role in roles for name in names)
        yield from (Change(key, False) for key in flags if value_at(forecast.config, key))
        models = {role.model_key: role.model for role in roles if role.model.layer_offload}
        yield from (Change(f"{key}.layer_offload", False) for key in models)
        for key, model in models.items():
            if model.lora_rank and model.quantization is None and "bitsandbytes" in forecast.machine.packages:
                yield Change(f"{key}.quantization", "nf4")
        yield from (Change(f"{key}.layer_offload_directory", FOLDER) for key in models)


def _of_share(forecast: MemoryForecast) -> Iterator[Change]:
    """Yield a larger share of vLLM if its share holds no sequence."""
    for phase in forecast.phases():
        if phase.lacking and forecast.memory_bytes is not None:
            least = ceil(100 * (phase.parts["sampler"] + phase.lacking) / forecast.memory_bytes) / 100
            if least < 1:
                yield Change(SHARE, max(least, USUAL_SHARE))


def _of_activations(forecast: MemoryForecast, role: ModelRole) -> Iterator[Change]:
    if not role.trained:
        return
    model, compiles = role.model, role.name == "actor" and forecast.config.actor_rollout_ref.actor.use_torch_compile
    if not model.enable_gradient_checkpointing and (
        not model.enable_activation_offload or model.activation_offload.save is None
    ):
        yield Change(f"{role.model_key}.enable_gradient_checkpointing", True)
    if forecast.on_device and not model.enable_activation_offload and not compiles:
        yield Change(f"{role.model_key}.enable_activation_offload", True)
    if not model.tiled_mlp and not compiles:
        yield Change(f"{role.model_key}.tiled_mlp", "auto")


def _of_states(forecast: MemoryForecast, roles: list[ModelRole]) -> Iterator[Change]:
    rollout = forecast.config.actor_rollout_ref.rollout
    if rollout.name == "vllm" and not rollout.free_cache_engine:
        yield Change(f"{ROLLOUT}.free_cache_engine", True)
    for role in roles:
        if role.model.lora_rank > 0 and role.fsdp.model_dtype == "fp32" and role.strategy == "fsdp2":
            yield Change(f"{role.fsdp_key}.model_dtype", "bf16")  # of the frozen weights; adapters stay in fp32
    for role in roles:
        if not role.fsdp.reshards(processes(forecast.config)):
            yield Change(f"{role.fsdp_key}.reshard_after_forward", True)
    for name, applies in (("optimizer_offload", [r for r in roles if r.trained]), ("param_offload", roles[::-1])):
        for role in applies:
            if not getattr(role.fsdp, name) and not role.fsdp.offload_policy:
                yield Change(f"{role.fsdp_key}.{name}", True)
    for role in roles:  # streams in each micro-batch; the flags above move weights and states between phases alone
        if not role.model.layer_offload and _can_stream(forecast, role):
            engine = Change(f"{role.model_key}.enable_activation_offload", True)
            recomputes = role.trained and role.model.enable_gradient_checkpointing
            needs = engine if recomputes and not role.model.enable_activation_offload else None
            yield Change(f"{role.model_key}.layer_offload", True, needs)
    shape = forecast.known.get("actor")
    for size in (2, 4, 8):
        fits_machine = forecast.config.trainer.n_gpus_per_node % size == 0
        fits_model = isinstance(shape, Decoder) and shape.heads % size == 0
        if rollout.name == "vllm" and rollout.tensor_model_parallel_size < size and fits_machine and fits_model:
            yield Change(f"{ROLLOUT}.tensor_model_parallel_size", size)


def _can_stream(forecast: MemoryForecast, role: ModelRole) -> bool:
    """Whether a role's frozen layers may wait on the host; see `layers_can_stream` in rlx/config/check/rules_offload.py."""
    compiles = forecast.config.actor_rollout_ref.actor.use_torch_compile
    return role.strategy == "fsdp2" and has_frozen_layers(role) and not compiles


class Size(NamedTuple):
    """A key whose value can be lowered, in steps of `unit`, from `most` units now down to `least`."""

    key: str
    least: int
    most: int
    unit: float = 1

    def change(self, units: int) -> Change:
        """Return the change that sets the key to this number of units."""
        return Change(self.key, round(units * self.unit, 2) if self.unit < 1 else units * int(self.unit))


def _sizes(forecast: MemoryForecast) -> Iterator[Size]:
    """Yield the sampler's share or batch, and the micro-batches."""
    config, rollout = forecast.config, forecast.config.actor_rollout_ref.rollout
    if rollout.name == "hf":
        yield Size(f"{ROLLOUT}.max_num_seqs", 1, rollout.max_num_seqs)
    elif forecast.on_device:
        yield Size(SHARE, 5, int(100 * rollout.gpu_memory_utilization), 0.01)
    longest = -(-forecast.length // LENGTH_STEP)
    for section in ("actor_rollout_ref.actor", "critic", ROLLOUT, REF):
        prefix = "log_prob" if section in (ROLLOUT, REF) else "ppo"
        flag = "use_dynamic_bsz" if prefix == "ppo" else "log_prob_use_dynamic_bsz"
        rows, tokens = (f"{section}.{prefix}_{name}_per_gpu" for name in ("micro_batch_size", "max_token_len"))
        if value_at(config, f"{section}.{flag}"):
            yield Size(tokens, longest, value_at(config, tokens) // LENGTH_STEP, LENGTH_STEP)
        elif value_at(config, rows) is not None:
            yield Size(rows, 1, value_at(config, rows))


def _lowered(forecast: MemoryForecast, fits: Callable[..., bool]) -> Change | None:
    """Return the largest value of one of the sizes with which the run fits; None if there is none."""
    for size in _sizes(forecast):
        if size.least < size.most and fits(size.change(size.least)):
            above = range(size.least + 1, size.most)
            return size.change(size.least + bisect_left(above, True, key=lambda units: not fits(size.change(units))))
    return None
