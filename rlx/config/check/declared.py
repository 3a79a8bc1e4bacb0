"""The argument of every rule, and what keys declare about others: when they have no effect, their limits, and their needs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

from rlx.config.faults import Fault
from rlx.config.machine import Machine, on_accelerator, processes
from rlx.config.schema import ARITHMETIC, LOSS_MODES, PPOConfig, roles
from rlx.config.schema.keys import Need, Unused
from rlx.config.schema.tree import LEAVES, as_text, children, section_in, value_at
from rlx.config.secrets import without_secrets
from rlx.offload.runtime.options import UNREAD_OPTIONS, OffloadOptions

ACTOR, MODEL, OWN = "actor_rollout_ref.actor", "actor_rollout_ref.model", "custom_reward_function"
REPLAY = f"{ACTOR}.router_replay.mode"
PROCESSES = ("trainer.n_gpus_per_node", "trainer.nnodes")
COUNTED: dict[str, tuple[str, ...]] = {"processes": PROCESSES, "sampling processes": PROCESSES}
"""The keys of limits that are no keys; with `n_rollout_gpus` that of sampling processes."""


Faults = Iterator[Fault]


@dataclass(frozen=True)
class CheckContext:
    """A configuration on a machine."""

    config: PPOConfig
    set_keys: frozenset[str]  # dotted names of the keys that the user set
    machine: Machine

    def value(self, key: str) -> Any:
        return value_at(self.config, key)

    @property
    def changed_keys(self) -> list[str]:
        """Return the keys that the user set to another value than the default, in the tree's order."""
        return [key for key, leaf in LEAVES.items() if key in self.set_keys and self.value(key) != leaf.default]

    @property
    def on_accelerator(self) -> bool:
        return on_accelerator(self.config, self.machine)

    def fault(self, what: str, expected: str, remedy: str, *keys: str, got: str = "") -> Fault:
        """Return a fault of these keys; it shows their values unless `got` says more."""
        got = got or ", ".join(f"{key}={as_text(without_secrets(self.value(key)))}" for key in keys)
        return Fault(what, got, expected, remedy, keys)


class Condition(NamedTuple):
    """A reason why a key has no effect, and whether it holds."""

    why: str
    holds: Callable[[CheckContext], bool]


def _ignored_by(*modes: str) -> Callable[[CheckContext], bool]:
    """Whether rlx's policy loss is one of these, which ignore a key; a user's own loss may read any key."""
    loss = f"{ACTOR}.policy_loss"
    return lambda s: s.value(f"{loss}.path") is None and s.value(f"{loss}.loss_mode") in modes


def _unless(holds: Callable[[PPOConfig], bool]) -> Callable[[CheckContext], bool]:
    return lambda s: not holds(s.config)


def own_function_scores_all(s: CheckContext) -> bool:
    custom = s.config.custom_reward_function
    return custom.is_set and not custom.asks_rule and not custom.data_sources


STATES = {
    "both clips": Condition(
        "clip_ratio_low and clip_ratio_high are both set",
        lambda s: None not in (s.value(f"{ACTOR}.clip_ratio_low"), s.value(f"{ACTOR}.clip_ratio_high")),
    ),
    "experts are not used": Condition(
        "bypass_mode compares no experts, and router_replay.mode replays none",
        lambda s: s.config.algorithm.rollout_correction.bypass_mode and s.value(REPLAY) == "disabled",
    ),
    "never saves": Condition(
        "trainer.save_last=False, and neither trainer.save_freq nor trainer.save_every_minutes is set: nothing is saved",
        _unless(roles.may_save),
    ),
    "never validates": Condition("the run never validates", _unless(roles.validates)),
    "no arithmetic": Condition(
        f"no data file is {ARITHMETIC}",
        lambda s: ARITHMETIC not in (*s.value("data.train_files"), *s.value("data.val_files")),
    ),
    "no critic": Condition("adv_estimator has no critic", _unless(roles.has_critic)),
    "no environment": Condition("neither environment.name nor environment.path is set", _unless(roles.has_environment)),
    "no pass for old log-probs": Condition(
        "no old log-probs take a pass of their own (docs/rollout.md)",
        _unless(lambda c: roles.log_prob_pass(c).prompts > 0),
    ),
    "no reward of your own": Condition(
        f"neither {OWN}.path nor {OWN}.parts is set", _unless(lambda c: c.custom_reward_function.is_set)
    ),
    "no reference": Condition("neither use_kl_loss nor use_kl_in_reward is set", _unless(roles.has_reference)),
    "not sapo": Condition("policy_loss.loss_mode is not sapo", _ignored_by(*{*LOSS_MODES} - {"sapo"})),
    "not tiny": Condition(f"{MODEL}.path is not {roles.TINY}", _unless(roles.is_tiny)),
    "not vanilla": Condition("only the vanilla loss has a dual clip", _ignored_by(*{*LOSS_MODES} - {"vanilla"})),
    "on a CPU": Condition("on CPU everything is in host memory", lambda s: not s.on_accelerator),
    "one process": Condition("there is one process", lambda s: processes(s.config) == 1),
    "own function scores all": Condition("a custom_reward_function scores all", own_function_scores_all),
    "reference is the actor": Condition(
        f"{MODEL}.lora_rank is set: the reference is the actor with its adapters off",
        _unless(roles.has_reference_model),
    ),
    "sapo": Condition("sapo has no clip", _ignored_by("sapo")),
    "the environment scores": Condition(
        "environment.rewards is replace", lambda s: roles.only_environment_scores(s.config)
    ),
    "the model scores": Condition(
        "reward_model.rule_weight is 0: a model alone scores", lambda s: roles.model_scores_alone(s.config)
    ),
}


@cache
def conditions() -> Mapping[str, tuple[Condition, ...]]:
    """Return for each key the conditions under which it has no effect, those of the groups round it first."""
    found = {key: [*declared] for key, declared in _declared(PPOConfig(), "", (), {})}
    for role, model, fsdp in ((ACTOR, MODEL, "fsdp_config"), ("critic", "critic.model", "fsdp")):
        for key, condition in _of_trained_model(role, model, f"{role}.{fsdp}.model_dtype"):
            found[key].append(condition)
    return {key: tuple(each) for key, each in found.items()}


Below = Mapping[str, tuple[Unused, ...]]


def _declared(
    section: Any, prefix: str, above: tuple[Condition, ...], below: Below
) -> Iterator[tuple[str, tuple[Condition, ...]]]:
    for name, child in children(section).items():
        own = (*above, *(_condition(each, prefix, name) for each in (*child.info.unused, *below.get(name, ()))))
        if is_dataclass(child.default):
            inner = {key.removeprefix(f"{name}."): each for key, each in below.items() if key.startswith(f"{name}.")}
            yield from _declared(child.default, f"{prefix}{name}.", own, {**inner, **(child.info.below or {})})
        else:
            yield prefix + name, own


def _condition(unused: Unused, prefix: str, name: str) -> Condition:
    if unused.state == "not read":
        return Condition("adv_estimator does not read it", lambda s: not s.config.algorithm.needs(name))
    if unused.state:
        return STATES[unused.state]
    if not unused.key:
        return Condition(unused.why, lambda s: True)
    places = (f"{prefix}{name}.{unused.key}", f"{prefix}{unused.key}", unused.key)
    other = next(place for place in places if place in LEAVES)
    return Condition(unused.why.format(key=other), lambda s: unused.holds(s.value(other)))


def _of_trained_model(role: str, model: str, dtype: str) -> Iterator[tuple[str, Condition]]:
    """Yield what depends on two sections of a trained role, or on the activation engine."""
    adapters = Condition("adapters are fp32", lambda s: s.value(f"{model}.lora_rank") > 0)
    whole = Condition(f"{dtype} is not bf16", lambda s: s.value(dtype) != "bf16")  # masters would be copies
    for name in ("master_weights", "allow_lossy_updates"):
        yield from ((f"{role}.optim.{name}", each) for each in (adapters, whole))

    def reads_not(unread: Callable[[OffloadOptions, bool], bool], s: CheckContext) -> bool:
        return unread(OffloadOptions.unchecked(**vars(s.value(f"{model}.activation_offload"))), s.on_accelerator)

    for unread in UNREAD_OPTIONS:
        condition = Condition(unread.why, partial(reads_not, unread.when))
        yield from ((f"{model}.activation_offload.{name}", condition) for name in unread.options)


def unused_keys(s: CheckContext) -> dict[str, str]:
    """Return the keys that the user changed without effect, each with the reason."""
    # Another rule reports keys of a critic that is not there.
    judged = [key for key in s.changed_keys if roles.has_critic(s.config) or not key.startswith("critic.")]
    return {key: why for key in judged if (why := _why_unused(s, key)) is not None}


def _why_unused(s: CheckContext, key: str) -> str | None:
    return next((each.why for each in conditions()[key] if each.holds(s)), None)


def declared_limits_hold(s: CheckContext) -> Faults:
    """A key that declares so is at most another one, or divides it or the number of processes. Null and -1 set nothing."""
    for key, limit in LIMITED.items():
        value = s.value(key)
        if value in (None, -1) or not _is_judged(s, key):
            continue
        if keys := COUNTED.get(limit, ()):
            most = processes(s.config) if limit == "processes" else roles.sampling_processes(s.config)
            if limit != "processes" and (own := s.config.trainer.n_rollout_gpus):  # groups do not cross machines
                most, limit, keys = own, f"{limit} of a machine", ("trainer.n_rollout_gpus",)
            got, remedy = f"{key}={value}, {most} process(es)", f", or change {keys[0]}"
        else:
            most, got, remedy = s.value(limit), "", ""
        if LEAVES[key].info.at_most and value > most:
            yield s.fault(f"{key} is larger than {limit}", f"at most {most}", f"set {key}={most}, or less", key, limit)
        elif not LEAVES[key].info.at_most and (value == 0 or most % value):
            what = f"{key} does not divide {f'the {limit}' if keys else limit}"
            nearest = next((each for each in range(min(value, most), 0, -1) if most % each == 0), 1)
            yield s.fault(
                what, f"a divisor of {most}", f"set {key}={nearest}{remedy}", key, *(keys or (limit,)), got=got
            )


def declared_needs_are_met(s: CheckContext) -> Faults:
    """A key that is set has what it needs: a package, and values of other keys. One fault joins the needs of one reason."""
    # With the actor's values in place of the critic's nulls
    filled = replace(s, config=replace(s.config, critic=roles.critic_settings(s.config)))
    for key, leaf in LEAVES.items():
        if not (leaf.info.needs or leaf.info.package) or not _is_judged(s, key):
            continue
        value, users = s.value(key), leaf.info.package_for
        module = leaf.info.package.partition(">")[0].replace("-", "_")
        given = value if isinstance(value, tuple) else (value,)
        uses = value != leaf.default if not users else not {*users}.isdisjoint(given)
        if module and uses and module not in s.machine.packages:
            remedy = f"`pip install '{leaf.info.package}'`, or set {key}={as_text(leaf.default)}"
            yield s.fault(f"the package {module} is not installed", f"the package {module}", remedy, key)
        failed: dict[str, list[tuple[str, Need]]] = {}
        for need in (each for each in leaf.info.needs if each.when(filled.value(key))):
            unmet = [place for place, found in _others(filled, key, need.key) if not need.met(found)]
            failed.setdefault(need.what, []).extend((place, need) for place in dict.fromkeys(unmet))
        for what, places in failed.items():
            if places:
                yield _unmet(filled, what, key, leaf.default, places)


def list_entries_agree(s: CheckContext) -> Faults:
    """In each entry of a list of sections, every key has an effect and what it needs."""
    lists = {key: s.value(key) for key, leaf in LEAVES.items() if section_in(leaf.hint)}
    for key, place, entry in [(key, place, each) for key, found in lists.items() for place, each in enumerate(found)]:
        known, prefix = children(type(entry)()), f"{key}[{place}]"
        for name, leaf in known.items():
            value = getattr(entry, name)
            got = f"{prefix}.{name}={as_text(without_secrets({name: value})[name])}"
            for unused in leaf.info.unused:
                if value != leaf.default and unused.holds(getattr(entry, unused.key)):
                    what, expected = f"{prefix}.{name} has no effect", f"{prefix}.{unused.key} beside it"
                    yield s.fault(what, expected, f"set {unused.key} too, or remove {name}", key, got=got)
            for need in leaf.info.needs:
                if need.when(value) and not need.met(getattr(entry, need.key)):
                    remedy = f"set {prefix}.{need.key}{need.expected}, or remove {name}"
                    yield s.fault(f"{prefix}: {need.what}", f"{need.key}{need.expected}", remedy, key, got=got)


def _unmet(s: CheckContext, what: str, key: str, default: Any, places: list[tuple[str, Need]]) -> Fault:
    expected = ", ".join(f"{place}{need.expected}" for place, need in places)
    remedy = "set " + " ".join(f"{place}={need.example}" if need.example else place for place, need in places)
    if not places[0][1].when(default):
        remedy += f", or {key}={as_text(default)}"
    return s.fault(what, expected, remedy, *dict.fromkeys((key, *(place for place, _ in places))))


def _is_judged(s: CheckContext, key: str) -> bool:
    return (roles.has_critic(s.config) or not key.startswith("critic.")) and _why_unused(s, key) is None


def _others(s: CheckContext, key: str, other: str) -> Iterator[tuple[str, Any]]:
    """Yield the key that another one means, and its value; of a role's key one for each role that it belongs to."""
    if not other.startswith("role."):
        place = next(each for each in (f"{key.rpartition('.')[0]}.{other}", other) if each in LEAVES)
        yield place, s.value(place)
        return
    _, part, *rest = other.split(".")
    for role in roles.sharded_roles(s.config):
        if key.startswith((f"{role.key}.", f"{role.model_key}.", f"{role.fsdp_key}.")):
            places = {"strategy": role.strategy_key, "model": role.model_key, "fsdp": role.fsdp_key}
            place = ".".join([places.get(part, f"{role.key}.{part}"), *rest])
            yield place, role.strategy if part == "strategy" else s.value(place)


def _limit(key: str) -> str:
    info = LEAVES[key].info
    limit = info.at_most or info.divides
    beside = f"{key.rpartition('.')[0]}.{limit}"
    return beside if beside in LEAVES else limit


LIMITED = {key: limit for key in LEAVES if (limit := _limit(key))}
"""The keys that declare a limit, and the key that holds it, or `processes`."""
