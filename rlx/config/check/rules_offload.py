"""Faults of activation offloading that cannot work, and warnings about useless combinations."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from rlx.config.check.context import CheckContext, Faults
from rlx.config.faults import Fault
from rlx.config.forecast.memory_forecast import MemoryForecast
from rlx.config.schema import ModelConfig
from rlx.config.schema.roles import ModelRole, has_frozen_layers, sharded_roles, trained_roles
from rlx.config.schema.tree import as_text
from rlx.offload.runtime.options import OffloadOptions, folder_problem

COMPILE = "actor_rollout_ref.actor.use_torch_compile"


def offloading_roles(s: CheckContext) -> list[ModelRole]:
    """Return the roles that offload activations; the reference has no backward and therefore offloads none."""
    return [role for role in trained_roles(s.config) if role.model.enable_activation_offload]


def offload_options(model: ModelConfig) -> OffloadOptions:
    """Return a model's options for the offloading engine, unchecked."""
    return OffloadOptions.unchecked(**vars(model.activation_offload))


def layers_can_stream(s: CheckContext) -> Faults:
    """Frozen weights stream under FSDP2, into layers that the activation engine recomputes, if any does."""
    roles = [role for role in sharded_roles(s.config) if role.model.layer_offload]
    for role in roles:
        key = f"{role.model_key}.layer_offload"
        if role.trained and role.model.enable_gradient_checkpointing and not role.model.enable_activation_offload:
            engine = f"{role.model_key}.enable_activation_offload"
            what = "transformers' checkpointing would keep streamed weights on the device"
            expected = "recomputation by the activation engine"
            yield s.fault(what, expected, f"set {engine}=True, or {key}=False", engine, key)
        folder = role.model.layer_offload_directory
        if folder is not None and s.machine.cluster is None and (problem := folder_problem(folder)):
            what, remedy = (
                "frozen weights that go to disk have no usable folder",
                f"make it, or set {key}_directory=null",
            )
            got = f"{key}_directory={folder}, which {problem}"
            yield s.fault(what, "a folder of this machine that is writable", remedy, f"{key}_directory", got=got)
    for model in {role.model_key for role in roles} - {role.model_key for role in roles if has_frozen_layers(role)}:
        key, rank = f"{model}.layer_offload", f"{model}.lora_rank"
        what, remedy = "layer offloading has nothing to move", f"set {rank} to train adapters, or {key}=False"
        yield s.fault(f"{what}: every weight is trained", "frozen weights", remedy, key, rank)


def offload_options_agree(s: CheckContext) -> Faults:
    """The engine accepts its options. On a cluster each worker checks the folder of its own machine at its start."""
    for role in offloading_roles(s):
        yield from _faults_of_options(role, checks_folder=s.machine.cluster is None)


def _faults_of_options(role: ModelRole, checks_folder: bool) -> Faults:
    def key_of(option: str) -> str:
        name = "enable_gradient_checkpointing" if option == "enable_ckpt" else f"activation_offload.{option}"
        return f"{role.model_key}.{name}"

    for fault in offload_options(role.model).faults(
        role.model.enable_gradient_checkpointing,
        checks_folder,
        assignment=lambda option, value: f"{key_of(option)}={as_text(value)}",
    ):
        yield Fault(fault.what, fault.got, fault.expected, fault.remedy, tuple(map(key_of, fault.options)))


OFFLOAD_RULES = (layers_can_stream, offload_options_agree)


def offload_warnings(s: CheckContext) -> Iterator[str]:
    """Warn of combinations that offload less than they seem to."""
    for role in sharded_roles(s.config):
        if role.model.layer_offload_directory is not None and not role.model.layer_offload:
            yield f"{role.model_key}.layer_offload_directory has no effect without {role.model_key}.layer_offload=True"
    for role in offloading_roles(s):
        options, prefix = offload_options(role.model), f"{role.model_key}.activation_offload"
        attention = role.model.attn_implementation
        if options.save == "attention" and attention == "eager":
            yield (
                f"{prefix}.save=attention finds nothing to keep in {role.model_key}.attn_implementation=eager, which is no "
                "fused kernel: its layers are offloaded as with boundary; use sdpa or flash_attention_2"
            )
        if options.max_host_bytes == 0 and not options.uses_disk:
            yield f"{prefix}.max_host_bytes=0 keeps every activation on the device: nothing is offloaded"


def disk_warnings(s: CheckContext) -> Iterator[str]:
    """Warn of folders with less room than this machine's processes will write. Call it only if every key could be read."""
    forecast, count = MemoryForecast.of(s.config, s.machine), s.config.trainer.n_gpus_per_node
    for role, memory in forecast.streaming:
        folder, key = role.model.layer_offload_directory, f"{role.model_key}.layer_offload_directory"
        is_here = s.machine.cluster is None and s.machine.name is None
        if folder is not None and is_here and not folder_problem(folder):
            yield from _lack_of_room(key, folder, memory.streamed, "the machine's processes are")
    for role in offloading_roles(s):
        folder, writes = role.model.activation_offload.directory, offload_options(role.model).uses_disk
        is_known = s.machine.cluster is None and s.machine.name is None and role.name not in forecast.unknown
        if not writes or not is_known or folder is None or folder_problem(folder):
            continue
        needed = forecast.phase(f"update_{role.name}").disk * count
        yield from _lack_of_room(
            f"{role.model_key}.activation_offload.directory", folder, needed, f"the {count} process(es) are"
        )


def _lack_of_room(key: str, folder: str, needed: float, who: str) -> Iterator[str]:
    free = shutil.disk_usage(Path(folder).expanduser()).free
    if needed > free:
        yield (
            f"{key}={folder} has {free / 1e9:.1f} GB free, and {who} estimated to write {needed / 1e9:.1f} GB to it; a full "
            "disk ends the run"
        )
