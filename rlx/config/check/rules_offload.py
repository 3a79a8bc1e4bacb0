"""Combinations of activation offloading that cannot work, and those that work to no purpose."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlx.config.check.context import CheckContext, Faults
from rlx.config.faults import Fault
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.schema import ActivationOffloadConfig
from rlx.config.schema.roles import ModelRole, trained_roles

RECOMPUTING = ("boundary", "attention", "auto")
# The least with which the engine can write to disk: 24 buffers of one page; tier cpu spends a quarter of its cap on them.
LEAST_HOST_BYTES = {"disk": 24 * 4096, "cpu": 4 * 24 * 4096}


def offloading_roles(s: CheckContext) -> list[ModelRole]:
    """The roles whose activations leave the device; the reference has no backward, and none to move."""
    return [role for role in trained_roles(s.config) if role.model.enable_activation_offload]


def writes_to_disk(options: ActivationOffloadConfig) -> bool:
    """Whether anything goes to the directory: the disk tier, or what the cap of host memory leaves over."""
    return options.tier == "disk" or (options.directory is not None and options.max_host_bytes is not None)


def offload_needs_fsdp(s: CheckContext) -> Faults:
    """The engine hooks into layers that FSDP wraps."""
    for role in offloading_roles(s):
        if role.strategy not in ("fsdp", "fsdp2"):
            key = f"{role.model_key}.enable_activation_offload"
            remedy = f"set {role.key}.strategy=fsdp2, or {key}=False"
            got = f"{role.key}.strategy={role.strategy}, {key}=True"
            yield Fault("activation offloading needs FSDP", got, "strategy fsdp or fsdp2", remedy, (key,))


def offload_without_compile(s: CheckContext) -> Faults:
    """A compiled layer saves its activations where the engine cannot see them."""
    policy = s.config.actor_rollout_ref
    if policy.model.enable_activation_offload and policy.actor.use_torch_compile:
        keys = ("actor_rollout_ref.model.enable_activation_offload", "actor_rollout_ref.actor.use_torch_compile")
        yield Fault(
            "activation offloading cannot be combined with compiled layers",
            ", ".join(f"{key}=True" for key in keys),
            "one of the two",
            f"set {keys[1]}=False, or {keys[0]}=False",
            keys,
        )


def tiling_without_compile(s: CheckContext) -> Faults:
    """A compiled layer would leave its graph at each MLP and norm."""
    policy = s.config.actor_rollout_ref
    if policy.model.tiled_mlp and policy.actor.use_torch_compile:
        keys = ("actor_rollout_ref.model.tiled_mlp", "actor_rollout_ref.actor.use_torch_compile")
        got, remedy = f"{keys[0]}={policy.model.tiled_mlp}, {keys[1]}=True", f"set {keys[1]}=False, or {keys[0]}=0"
        yield Fault("tiles cannot be combined with compiled layers", got, "one of the two", remedy, keys)


def offload_saves_what_is_there(s: CheckContext) -> Faults:
    """What is offloaded agrees with what is recomputed, and with where it goes."""
    for role in offloading_roles(s):
        save, recompute = role.model.activation_offload.save, role.model.enable_gradient_checkpointing
        key, flag = f"{role.model_key}.activation_offload.save", f"{role.model_key}.enable_gradient_checkpointing"
        if save is not None and (save in RECOMPUTING) != recompute:
            instead = "boundary, attention or auto" if recompute else "all"
            remedy = f"set {flag}={not recompute}, or {key} to {instead}"
            what = "boundary, attention and auto recompute layers, all recomputes nothing"
            yield Fault(what, f"{key}={save}, {flag}={recompute}", "both to agree", remedy, (key, flag))


def offload_has_a_directory(s: CheckContext) -> Faults:
    """What goes to disk has a folder to go to. On a cluster each worker looks for it on its own machine, as it starts."""
    is_local = s.machine.cluster is None
    for role in offloading_roles(s):
        options, prefix = role.model.activation_offload, f"{role.model_key}.activation_offload"
        if not writes_to_disk(options):
            continue
        wrong = _wrong_with(options.directory, is_local)
        if wrong is None:
            continue
        key = f"{prefix}.directory"
        instead = f"{prefix}.tier=cpu" if options.tier == "disk" else f"{key}=null to keep the rest on the device"
        remedy = f"make a folder on a fast disk and set {key} to it, or set {instead}"
        what, expected = "activations that go to disk have no usable folder", "a writable folder that exists"
        yield Fault(what, f"{key}={wrong}", expected, remedy, (key, f"{prefix}.tier", f"{prefix}.max_host_bytes"))


def offload_has_staging_memory(s: CheckContext) -> Faults:
    """What goes to disk passes through host memory, of which the cap leaves enough."""
    for role in offloading_roles(s):
        options, prefix = role.model.activation_offload, f"{role.model_key}.activation_offload"
        cap, least, key = options.max_host_bytes, LEAST_HOST_BYTES.get(options.tier, 0), f"{prefix}.max_host_bytes"
        if writes_to_disk(options) and cap is not None and cap < least:
            what, remedy = "too little host memory to write to disk from", f"set {key}={1 << 30}, say, or null"
            keys = (key, f"{prefix}.tier", f"{prefix}.directory")
            yield Fault(what, f"{key}={cap}", f"at least {least}", remedy, keys)


def _wrong_with(directory: str | None, is_local: bool) -> str | None:
    """The directory and what is wrong with it; None if nothing is, or it is not on this machine."""
    if directory is None:
        return "null"
    folder = Path(directory).expanduser()
    if not is_local or (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return None
    reason = "does not exist" if not folder.exists() else "is not writable" if folder.is_dir() else "is no folder"
    return f"{directory}, which {reason}"


OFFLOAD_RULES = (
    offload_needs_fsdp,
    offload_without_compile,
    tiling_without_compile,
    offload_saves_what_is_there,
    offload_has_a_directory,
    offload_has_staging_memory,
)


def offload_warnings(s: CheckContext) -> Iterator[str]:
    """Combinations that work, but do not what they seem to."""
    for role in offloading_roles(s):
        options, prefix = role.model.activation_offload, f"{role.model_key}.activation_offload"
        attention = role.model.attn_implementation
        if options.save == "attention" and attention == "eager":
            yield (
                f"{prefix}.save=attention finds nothing to keep in {role.model_key}.attn_implementation=eager, which is no "
                "fused kernel: its layers are offloaded as with boundary; use sdpa or flash_attention_2"
            )
        if options.max_host_bytes == 0 and not writes_to_disk(options):
            yield f"{prefix}.max_host_bytes=0 keeps every activation on the device: nothing is offloaded"


def disk_warnings(s: CheckContext) -> Iterator[str]:
    """Folders that may be too small; every key must have been read."""
    for role in offloading_roles(s):
        if writes_to_disk(role.model.activation_offload):
            yield from _too_little_room(s, role)


def _too_little_room(s: CheckContext, role: ModelRole) -> Iterator[str]:
    """The folder on this machine has less room than its processes are estimated to need; nobody knows the latter exactly."""
    options, forecast = role.model.activation_offload, MemoryForecast.of(s.config, s.machine)
    if (
        role.name in forecast.unknown
        or s.machine.cluster is not None
        or options.directory is None
        or _wrong_with(options.directory, True)
    ):
        return
    needed = forecast.phase(f"update_{role.name}").disk * s.config.trainer.n_gpus_per_node
    free = shutil.disk_usage(Path(options.directory).expanduser()).free
    if needed > free:
        yield (
            f"{role.model_key}.activation_offload.directory={options.directory} has {free / 1e9:.1f} GB free, and the "
            f"{s.config.trainer.n_gpus_per_node} process(es) are estimated to write {needed / 1e9:.1f} GB to it; a full "
            "disk ends the run"
        )
