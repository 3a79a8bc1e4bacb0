"""Runs that cannot fit, and what would make them fit, by the outlook on their memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rlx.config.faults import Fault
from rlx.config.machine import Setting
from rlx.config.outlook import LENGTH_STEP, Outlook, Phase
from rlx.config.outlook_text import gb
from rlx.config.roles import ModelRole, sharded_roles
from rlx.config.schema import PPOConfig
from rlx.config.tree import value_at

REFUSED_FROM = 1.1  # times what is usable; the formulas are within 3 % where they were measured (docs/planning.md)
CHECK = "trainer.memory_check"
AT_MOST = 3  # remedies that are named of those that are enough by themselves
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MORE = "more processes (trainer.n_gpus_per_node), shorter responses or a smaller model"


def memory_suffices(s: Setting) -> Iterator[Fault]:
    """What is sure to come fits into device and host, or nearly."""
    if s.config.trainer.memory_check != "refuse":
        return
    outlook = Outlook.of(s.config, s.machine)
    over = _over(outlook, is_least=True, margin=REFUSED_FROM)
    if not over:
        return
    remedy = f"{remedies(outlook, is_least=True)}; {CHECK}=warn runs all the same"
    of_device = [phase for phase in over if not outlook.fits(phase._replace(host=0.0), REFUSED_FROM)]
    on_host = [phase for phase in over if not outlook.fits_host(phase, REFUSED_FROM)]
    if of_device:
        memory = "device" if outlook.on_device else "host"
        expected = f"at most {usable(outlook, of_device)} GB; {_margin(s)}"
        yield Fault(f"the run does not fit into {memory} memory", _needs(of_device), expected, remedy, (CHECK,))
    if on_host:
        most, count = max(on_host, key=lambda phase: phase.host), s.config.trainer.n_gpus_per_node
        got = f"{gb(most.host * count)} GB in {count} process(es), in {most.name}"
        expected = f"at most the {gb(s.machine.host_bytes or 0)} GB of this machine; {_margin(s)}"
        yield Fault("what waits in host memory does not fit there", got, expected, remedy, (CHECK,))


def memory_warnings(s: Setting) -> Iterator[str]:
    """What may not fit, but is not refused."""
    if s.config.trainer.memory_check == "off":
        return
    outlook = Outlook.of(s.config, s.machine)
    is_refused = s.config.trainer.memory_check == "refuse" and _over(outlook, is_least=True, margin=REFUSED_FROM)
    over = [] if is_refused else _over(outlook)
    of_device = [phase for phase in over if not outlook.fits(phase._replace(host=0.0))]
    on_host = [phase for phase in over if not outlook.fits_host(phase)]
    if of_device:
        where = "device" if outlook.on_device else "host"
        longest = min(outlook.longest(phase.name) or 0 for phase in of_device)
        until = f"; sequences of up to {longest:,} tokens fit" if longest else ""
        yield (
            f"{where} memory may run out: {_needs(of_device)}, of which {usable(outlook, of_device)} are usable, if a micro-batch "
            f"holds as many sequences of {outlook.length:,} tokens as it may{until}; to be safe: {remedies(outlook)}"
        )
    if on_host:
        most, count = max(on_host, key=lambda phase: phase.host), s.config.trainer.n_gpus_per_node
        yield (
            f"host memory may run out: {gb(most.host * count)} GB wait there in {count} process(es) in {most.name}, and this "
            f"machine has {gb(s.machine.host_bytes or 0)}; to be safe: {remedies(outlook)}"
        )


def usable(outlook: Outlook, phases: list[Phase]) -> str:
    """What the phases may come to, of what there is."""
    limit = min(phase.limit or 0.0 for phase in phases)
    what = "a device's" if outlook.on_device else "each process's part of the host's"
    return f"{gb(limit)} of {what} {gb(outlook.memory_bytes or 0.0)}"


def _margin(s: Setting) -> str:
    return f"{CHECK}={s.config.trainer.memory_check} refuses what is {REFUSED_FROM - 1:.0%} above that"


def _needs(phases: list[Phase]) -> str:
    """Each with its peak, the largest with its parts."""
    largest, *others = sorted(phases, key=lambda phase: -phase.peak)
    parts = sorted(largest.parts.items(), key=lambda part: -part[1])
    of = ", ".join(f"{name} {gb(nbytes)}" for name, nbytes in parts if nbytes >= 0.01 * largest.peak)
    texts = [f"{largest.name} {gb(largest.peak)} GB ({of})", *(f"{phase.name} {gb(phase.peak)}" for phase in others)]
    lacking = [
        f"the sampler's share lacks {gb(phase.lacking)} to hold one sequence" for phase in phases if phase.lacking
    ]
    return ", ".join(texts + lacking)


def _over(outlook: Outlook, is_least: bool = False, margin: float = 1.0) -> list[Phase]:
    return [phase for phase in outlook.phases(is_least) if not outlook.fits(phase, margin)]


# Remedies -------------------------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A key and the value that might help."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key}={self.value}"

    def of(self, config: PPOConfig) -> PPOConfig:
        """The configuration with it."""
        changed: PPOConfig = _with(config, self.key.split("."), self.value)
        return changed


def _with(section: Any, names: list[str], value: Any) -> Any:
    below = value if len(names) == 1 else _with(getattr(section, names[0]), names[1:], value)
    return replace(section, **{names[0]: below})


def remedies(outlook: Outlook, is_least: bool = False) -> str:
    """Which keys make the run fit: one of several, or several together."""

    def fits(*changes: Change) -> bool:
        config = outlook.config
        for change in changes:
            config = change.of(config)
        return not _over(outlook.changed(config), is_least)

    candidates = list(_candidates(outlook))
    enough = [change for change in candidates if fits(change)]
    if sized := _lowered(outlook, fits):
        enough = [*enough[: AT_MOST - 1], sized]
    if enough:
        return "set " + ", or ".join(map(str, enough[:AT_MOST]))
    if not fits(*candidates):
        sized = _lowered(outlook, lambda *changes: fits(*candidates, *changes))
        if sized is None:
            named = f"{', '.join(map(str, candidates))} are not enough: " if candidates else ""
            return f"{named}use {MORE}"
        candidates.append(sized)
    # The last of them is the dearest: what is not needed is left out from there.
    for change in reversed(candidates[:]):
        if fits(*(one for one in candidates if one is not change)):
            candidates.remove(change)
    *first, last = map(str, candidates)
    return "set " + " and ".join([*([", ".join(first)] if first else []), last])


def _candidates(outlook: Outlook) -> Iterator[Change]:
    """What takes memory off where there is too little, what costs least time first."""
    over = _over(outlook)
    is_device = any(not outlook.fits(phase._replace(host=0.0)) for phase in over)
    is_host = any(not outlook.fits_host(phase) for phase in over)
    roles = sharded_roles(outlook.config)
    if is_device:
        for role in roles:
            yield from _of_activations(outlook, role)
        if outlook.on_device:
            yield from _of_states(outlook, roles)
    elif is_host:
        flags = [
            f"{role.fsdp_key}.{name}"
            for role in roles
            for name in ("param_offload", "optimizer_offload", "offload_policy")
        ]
        yield from (Change(key, False) for key in flags if value_at(outlook.config, key))


def _of_activations(outlook: Outlook, role: ModelRole) -> Iterator[Change]:
    if not role.trained:
        return
    model, compiles = role.model, role.name == "actor" and outlook.config.actor_rollout_ref.actor.use_torch_compile
    if not model.enable_gradient_checkpointing and (
        not model.enable_activation_offload or model.activation_offload.save is None
    ):
        yield Change(f"{role.model_key}.enable_gradient_checkpointing", True)
    if outlook.on_device and not model.enable_activation_offload and not compiles:
        yield Change(f"{role.model_key}.enable_activation_offload", True)
    if not model.tiled_mlp and not compiles:
        yield Change(f"{role.model_key}.tiled_mlp", "auto")


def _of_states(outlook: Outlook, roles: list[ModelRole]) -> Iterator[Change]:
    rollout = outlook.config.actor_rollout_ref.rollout
    if rollout.name == "vllm" and not rollout.free_cache_engine:
        yield Change(f"{ROLLOUT}.free_cache_engine", True)
    for name, applies in (("optimizer_offload", [r for r in roles if r.trained]), ("param_offload", roles[::-1])):
        for role in applies:
            if not getattr(role.fsdp, name) and not role.fsdp.offload_policy:
                yield Change(f"{role.fsdp_key}.{name}", True)


class Size(NamedTuple):
    """A key whose value can be lowered: in `unit`s, from `least` of them to the `most` there are now."""

    key: str
    least: int
    most: int
    unit: float = 1

    def change(self, units: int) -> Change:
        """The key set to so many units."""
        return Change(self.key, round(units * self.unit, 2) if self.unit < 1 else units * int(self.unit))


def _sizes(outlook: Outlook) -> Iterator[Size]:
    """The sampler's share or batch, and the micro-batches."""
    config, rollout = outlook.config, outlook.config.actor_rollout_ref.rollout
    if rollout.name == "hf":
        yield Size(f"{ROLLOUT}.max_num_seqs", 1, rollout.max_num_seqs)
    elif outlook.on_device:
        yield Size(f"{ROLLOUT}.gpu_memory_utilization", 5, int(100 * rollout.gpu_memory_utilization), 0.01)
    longest = -(-outlook.length // LENGTH_STEP)
    for section, prefix in (
        ("actor_rollout_ref.actor", "ppo"),
        ("critic", "ppo"),
        (ROLLOUT, "log_prob"),
        (REF, "log_prob"),
    ):
        flag = "use_dynamic_bsz" if prefix == "ppo" else "log_prob_use_dynamic_bsz"
        rows, tokens = (f"{section}.{prefix}_{name}_per_gpu" for name in ("micro_batch_size", "max_token_len"))
        if value_at(config, f"{section}.{flag}"):
            yield Size(tokens, longest, value_at(config, tokens) // LENGTH_STEP, LENGTH_STEP)
        elif value_at(config, rows) is not None:
            yield Size(rows, 1, value_at(config, rows))


def _lowered(outlook: Outlook, fits: Callable[..., bool]) -> Change | None:
    """The largest value of one of the sizes with which it fits; None where there is none."""
    for size in _sizes(outlook):
        below, above = size.least, size.most
        if below >= above or not fits(size.change(below)):
            continue
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (middle, above) if fits(size.change(middle)) else (below, middle)
        return size.change(below)
    return None
