"""Turn the command line into the typed tree with Hydra's compose API.

Hydra reads the YAML files and parses the overrides. The typed tree alone decides which keys exist, so that one run reports all
faults, and an unknown key with the nearest known one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlx.config.compose.build import MISSING, build, not_a_group
from rlx.config.faults import ConfigError, Fault
from rlx.config.schema import PPOConfig
from rlx.config.schema.tree import LEAVES, describe_expected, plain_type
from rlx.config.secrets import HIDDEN, override_without_secrets, without_secrets

CONFIG_NAME = "ppo"
DEFAULT_GROUPS = {"experiment": "arithmetic"}
OPTIONS = ("--check", "--tree", "--on", "--help")
MODEL_KEY = "actor_rollout_ref.model.path"
WORD = re.compile(r"(?<![^\[,\s])(?<![^\[,]\s)[\w.+-]+(?=\s*(?:[\],]|$))")
WEIGHTED = re.compile(r"^(\+*custom_reward_function)=\[")  # a list means its parts
LOW_HIGH = re.compile(r"(?<![\w.'\"])[\d.]+(?:e[+-]?\d+)?_[\d.]+(?:e[+-]?\d+)?(?![\w'\"])", re.IGNORECASE)


@dataclass(frozen=True)
class Composed:
    """A command line after it was read."""

    partial: PPOConfig  # the tree as far as it could be read; without faults it is `config`
    set_keys: frozenset[str]  # dotted names of the keys that the command line sets (not the packaged YAML files)
    faults: tuple[Fault, ...]  # keys and overrides that could not be read
    from_environment: Mapping[str, Any] = field(default_factory=dict)  # key -> its text with `${oc.env:NAME}`
    # Overrides whose key or group is given once more with another value, and that later override; without secrets.
    repeated: Mapping[str, str] = field(default_factory=dict)

    @property
    def config(self) -> PPOConfig:
        if self.faults:
            raise ConfigError(self.faults)
        return self.partial

    @property
    def broken(self) -> frozenset[str]:
        return frozenset(key for fault in self.faults for key in fault.keys)

    @property
    def yaml(self) -> str:
        """The whole resolved tree as YAML, without secrets; values from the environment stay `${oc.env:NAME}`."""
        tree = OmegaConf.create(asdict(self.partial))
        for key, text in self.from_environment.items():
            OmegaConf.update(tree, key, text)
        return OmegaConf.to_yaml(OmegaConf.create(without_secrets(OmegaConf.to_container(tree))))


def config_folder() -> Path:
    """Return the folder of YAML files: inside the package after installation from a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    candidates = (package / "configs", package.parent / "configs")
    for folder in candidates:
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise FileNotFoundError(f"{CONFIG_NAME}.yaml is in none of {[str(c) for c in candidates]}; reinstall rlx")


def group_choices() -> dict[str, list[str]]:
    """Return the files of each group: `{"experiment": ["arithmetic", ...]}`."""
    folders = sorted(folder for folder in config_folder().iterdir() if folder.is_dir())
    found = {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}
    return {name: files for name, files in found.items() if files}


def compose(overrides: Sequence[str]) -> Composed:
    """Compose `configs/ppo.yaml`, its groups and the overrides (`key=value`, `group=file`) into the typed tree.

    Without `experiment=` and a model path that is the experiment `arithmetic`, which needs nothing but this package.
    """
    faults: list[Fault] = []
    groups: dict[str, str | None] = {}
    values: list[Override] = []
    given: dict[str, list[str]] = {}
    known_groups = group_choices()
    for text in _rejoined(overrides, faults):
        parsed = _parse(text, faults)
        if parsed is not None and not isinstance(parsed.value(), dict):  # mappings are merged
            given.setdefault(parsed.key_or_group, []).append(override_without_secrets(text))
        if parsed is not None and parsed.key_or_group in known_groups:
            groups |= _choose(parsed, faults)
        elif parsed is not None:
            values.append(parsed)
    set_keys = frozenset(key for value in values for key in _leaf_keys(value.key_or_group, value.value()))
    if MODEL_KEY not in set_keys:
        groups = {**DEFAULT_GROUPS, **groups}
    from_environment: dict[str, Any] = {}
    tree = _resolved(_merged(groups, values, faults), "", faults, from_environment)
    config, misfits = build(tree)
    broken = {key for fault in (*faults, *misfits) for key in fault.keys}
    read = {key: text for key, text in from_environment.items() if broken.isdisjoint(_leaf_keys(key, None))}
    repeated = {text: texts[-1] for texts in given.values() for text in texts if text != texts[-1]}
    return Composed(config, set_keys, (*faults, *misfits), read, repeated)


def _rejoined(overrides: Sequence[str], faults: list[Fault]) -> list[str]:
    """Return the overrides, those joined that come in pieces; add a fault for each.

    Examples: an unquoted $@ makes two arguments of a list, `data.train_files=['a',` and `'b']`; `key = 4` is three; `key 4` lacks `=`.
    """
    grouped: list[list[str]] = []
    for text in (WEIGHTED.sub(r"\1.parts=[", each) for each in overrides):
        if grouped and _goes_on("".join(grouped[-1]), text):
            grouped[-1].append(text)
        else:
            grouped.append([text])
    joined = [("" if "=" in "".join(pieces) else "=").join(pieces) for pieces in grouped]
    for whole, pieces in zip(joined, grouped, strict=True):
        if len(pieces) > 1:
            shown = override_without_secrets(whole)
            got = shown.replace("=", " ", 1) if HIDDEN in shown else override_without_secrets(" ".join(pieces))
            remedy = f'write it as one argument: "{shown}"; in a script write "$@" with its quotes'
            key = shown.partition("=")[0]
            faults.append(Fault(f"{key}: the override is in pieces", got, "key=value", remedy, (key,)))
    return joined


def _goes_on(text: str, piece: str) -> bool:
    """Whether an argument belongs to the one before it, which has an open bracket or no value."""
    if re.match(r"--|[\w.+/@]+=", piece):
        return False
    if "=" not in text:
        known = {*group_choices(), *LEAVES}
        is_name = [not known.isdisjoint({each, *_leaf_keys(each, None)}) for each in (text, piece)]
        return piece.startswith("=") or is_name == [True, False]
    return re.fullmatch(r"[\w.+/@]+=", text) is not None or sum(map(text.count, "[{")) > sum(map(text.count, "]}"))


def _parse(text: str, faults: list[Fault]) -> Override | None:
    """Return one override as Hydra reads it. If it is invalid or of a kind that one run cannot use, add a fault; return None."""
    if text.startswith("-"):
        faults.append(_unknown_option(text))
        return None
    try:
        parsed = OverridesParser.create().parse_override(_with_quoted_texts(text))
    except HydraException:
        key, equals, _ = text.partition("=")
        remedy = f"quote a value that holds special characters: \"{key}='...'\"" if equals else "write key=value"
        if any(text.count(opened) > text.count(closed) for opened, closed in ("[]", "{}")):
            remedy = f"a bracket is not closed: close it, or {remedy}"
        shown = override_without_secrets(text)
        faults.append(Fault("an override cannot be read", repr(shown), "key=value or group=file", remedy))
        return None
    key, shown = parsed.key_or_group, override_without_secrets(text)
    if parsed.is_sweep_override():
        remedy = f"for a list write {key}=[{shown.partition('=')[2]}]; for a sweep start one run per value"
        faults.append(Fault(f"{key} is a sweep over several values", shown, "one value", remedy))
    elif parsed.package is not None or "/" in key:
        known = ", ".join(group_choices())
        faults.append(Fault(f"there is no group {parsed.get_key_element()}", shown, f"one of {known}", "remove it"))
    elif parsed.is_delete():
        faults.append(Fault(f"{key} cannot be deleted", shown, "key=value", f"set {key} to the value you want"))
    elif parsed.is_hydra_override():
        remedy = "remove it; the run's folder is trainer.default_local_dir"
        faults.append(Fault(f"{key} belongs to Hydra's launcher", shown, "a key of rlx", remedy))
    else:
        return parsed
    return None


def _unknown_option(text: str) -> Fault:
    name = text.partition("=")[0]
    near = get_close_matches(name.replace("_", "-"), OPTIONS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"write a key without dashes: {name.lstrip('-')}=VALUE"
    if re.match(r"--config-(path|name|dir)$|-c[pnd]$", name):
        remedy = "remove it: rlx reads no YAML file of yours; write its values behind the command, as key=value"
    expected = ", ".join((*OPTIONS, "key=value"))
    return Fault(f"there is no option {name}", override_without_secrets(text), expected, remedy)


def _with_quoted_texts(text: str) -> str:
    """Return an override of a key that takes text with its words in quotes, as Hydra makes 1.1 of 1.10 and 15 of 1_5.

    Null stays where the key may be null, and a number among bounds, which has one form.
    """
    key, equals, value = text.partition("=")
    leaf = LEAVES.get(key.lstrip("+"))
    if leaf is not None and leaf.info.bounds:
        return key + equals + LOW_HIGH.sub(r"'\g<0>'", value)
    if leaf is None or re.search(r"['\"\\$(]", value):
        return text
    if leaf.info.joined and "," in value and not value.startswith("["):
        return f"{key}='{value}'"
    kind, is_optional = plain_type(leaf.hint)
    is_text = kind is str or (get_origin(kind) is tuple and get_args(kind)[0] is str)
    if not is_text or (is_optional and value.strip().lower() == "null"):
        return text
    return key + equals + WORD.sub(r"'\g<0>'", value)


def _choose(override: Override, faults: list[Fault]) -> dict[str, str | None]:
    """Return the chosen file of a group; for an unknown one the nearest, so that the rest can still be checked."""
    group, choice = override.key_or_group, override.value()
    known = group_choices()[group]
    if choice is None or (isinstance(choice, str) and choice in known):
        return {group: choice}
    near = get_close_matches(str(choice), known, n=1)
    remedy = f"did you mean {group}={near[0]}?" if near else f"choose one of the files in {config_folder() / group}"
    faults.append(Fault(f"{group} has no file {choice!r}", str(override.input_line), ", ".join(known), remedy))
    return {group: near[0] if near else DEFAULT_GROUPS[group]}


def _leaf_keys(key: str, value: Any) -> set[str]:
    """Return the leaves that an override sets: a mapping sets those it names, a key below a mapping sets the mapping."""
    for known in LEAVES:
        if key == known or key.startswith(f"{known}."):
            return {known}
    if isinstance(value, dict):
        return {leaf for name, child in value.items() for leaf in _leaf_keys(f"{key}.{name}", child)}
    return {key}


@cache
def _files_on_defaults(*chosen: str) -> DictConfig:
    """Return defaults and YAML files without overrides. Cached, because Hydra reads them slowly and they do not change in a run."""
    with initialize_config_dir(config_dir=str(config_folder()), version_base="1.3"):
        files = hydra_compose(CONFIG_NAME, overrides=list(chosen))
    tree = OmegaConf.create(asdict(PPOConfig()))
    tree.merge_with(files)
    OmegaConf.set_struct(tree, False)
    return tree


def _merged(groups: dict[str, str | None], values: list[Override], faults: list[Fault]) -> DictConfig:
    files = (f"{group}={choice}" for group, choice in groups.items() if choice is not None)
    tree = deepcopy(_files_on_defaults(*files))
    for override in values:
        key, value = override.key_or_group, override.value()
        if (fault := _misplaced(key, value)) is not None:
            faults.append(fault)
            continue
        try:
            # Like `++key=value` in Hydra: unknown keys reach the typed tree, which finds the nearest known name.
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
        except OmegaConfBaseException as error:
            remedy = "look for the key in docs/configuration.md"
            faults.append(Fault(f"{key} cannot be set", str(error).splitlines()[0], "key=value", remedy, (key,)))
    return tree


def _misplaced(key: str, value: Any) -> Fault | None:
    """Return the fault of an override that gives a value to a group or keys to a value; None if it does neither."""
    below = tuple(leaf for leaf in LEAVES if leaf.startswith(f"{key}."))
    if below and not isinstance(value, dict):
        return not_a_group(key, value, below)
    for leaf, known in LEAVES.items():
        if key.startswith(f"{leaf}.") and not isinstance(known.default, dict):
            got, expected = override_without_secrets(f"{key}={value}"), f"{leaf}=<{describe_expected(known)}>"
            return Fault(f"{leaf} has no keys below it", got, expected, f"set {leaf} itself", (leaf,))
    return None


def _resolved(tree: DictConfig, prefix: str, faults: list[Fault], from_environment: dict[str, Any]) -> dict[str, Any]:
    """Return the tree as dictionaries with `${...}` replaced. A value that cannot be resolved adds a fault and is left out.

    `from_environment` gets the texts that name an environment variable, by key.
    """
    plain: dict[str, Any] = {}
    raw: Any = OmegaConf.to_container(tree)
    names: Iterable[Any] = tree  # also numbers, of `logit_bias`
    for name in names:
        key = f"{prefix}{name}"
        try:
            value = MISSING if OmegaConf.is_missing(tree, name) else tree[name]
            value = OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            remedy = "name a key of the tree, or a resolver of OmegaConf such as ${oc.env:NAME}"
            faults.append(Fault(f"{key} cannot be resolved", reason, "a value", remedy, (key,)))
        else:
            if isinstance(value, DictConfig):
                plain[name] = _resolved(value, f"{key}.", faults, from_environment)
                continue
            plain[name] = value
            if "${oc.env:" in str(raw[name]):
                from_environment[key] = raw[name]
    return plain
