"""Rules about the machine's devices, packages and files. Each rule yields the faults it finds."""

import re
from collections.abc import Iterator
from pathlib import Path

from rlx.config.check.context import CheckContext, Faults
from rlx.config.check.folders import is_hub_name, runs_folder, warm_starts_folder, why_not_writable
from rlx.config.faults import Fault
from rlx.config.machine import on_accelerator
from rlx.config.schema import ARITHMETIC
from rlx.config.schema.roles import TINY, has_critic, is_tiny, sharded_roles, trained_roles

GPUS, NODES, MODEL = "trainer.n_gpus_per_node", "trainer.nnodes", "actor_rollout_ref.model.path"
FOR_GPUS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
DATA_KINDS = (".parquet", ".jsonl")


# Devices and cluster


def cluster_answers(s: CheckContext) -> Faults:
    """The driver can join the named cluster."""
    cluster = s.machine.cluster
    if cluster is not None and cluster.error is not None:
        remedy = "start the cluster (docs/cluster.md), or unset RAY_ADDRESS to run on this machine alone"
        expected = "the head of a running cluster, <host>:<port> (port 6379 by default)"
        yield Fault("the Ray cluster cannot be joined", f"{cluster.address}: {cluster.error}", expected, remedy)


def nodes_need_a_cluster(s: CheckContext) -> Faults:
    """A run on several machines needs a cluster to join."""
    nodes = s.config.trainer.nnodes
    if nodes > 1 and s.machine.cluster is None:
        remedy = f"start Ray on each machine and set RAY_ADDRESS (docs/cluster.md), or set {NODES}=1"
        got = f"{NODES}={nodes}, RAY_ADDRESS not set"
        yield Fault("several machines need a Ray cluster to join", got, "RAY_ADDRESS=<host>:<port>", remedy, (NODES,))


def gpus_suffice(s: CheckContext) -> Faults:
    """Each process needs a GPU of its own; on CPU the number of processes is free."""
    trainer, cluster = s.config.trainer, s.machine.cluster
    if not on_accelerator(s.config, s.machine) or (cluster is not None and cluster.error):
        return
    nodes, per_node, offered = trainer.nnodes, trainer.n_gpus_per_node, s.machine.node_gpus
    if nodes > 1 and cluster is None:
        nodes = 1  # `nodes_need_a_cluster` reports the missing cluster
    if sum(gpus >= per_node for gpus in offered) >= nodes:
        return
    where = "this machine has" if cluster is None else f"the cluster at {cluster.address} has"
    best = max(offered, default=0)
    remedy = f"set {GPUS}={best}" if best and nodes == 1 else f"lower {GPUS} or {NODES}, or set trainer.device=cpu"
    yield Fault(
        "more GPUs are asked for than there are",
        f"{GPUS}={per_node} on {nodes} machine(s); {where} {_per_machine(offered)}",
        f"at least {per_node} GPU(s) on each of {nodes} machine(s)",
        remedy,
        (GPUS, NODES, "trainer.device"),
    )


def _per_machine(gpus: tuple[int, ...]) -> str:
    """Return `2 GPUs`, or `4 + 4 + 0 GPUs` for several machines."""
    return f"{' + '.join(str(n) for n in gpus) or '0'} GPU(s)"


# Packages


def packages_are_installed(s: CheckContext) -> Faults:
    """Optional packages that the configuration needs are installed."""
    adapters = [f"{role.model_key}.lora_rank" for role in trained_roles(s.config) if role.model.lora_rank > 0]
    models = dict.fromkeys(role.model_key for role in sharded_roles(s.config))  # actor and reference share one
    flash = [
        f"{key}.attn_implementation" for key in models if s.value(f"{key}.attn_implementation") == "flash_attention_2"
    ]
    liger = [f"{role.model_key}.use_liger" for role in trained_roles(s.config) if role.model.use_liger]
    trackers = ["trainer.logger"] if "wandb" in s.config.trainer.logger else []
    needs = (
        ("peft", adapters, "`pip install 'rlx[lora]'`, or set it to 0"),
        ("wandb", trackers, "`pip install wandb`, or take wandb out of the list"),
        ("flash_attn", flash, "`pip install flash-attn --no-build-isolation`, or set it to sdpa"),
        ("liger_kernel", liger, "`pip install liger-kernel`, or set it to False"),
    )
    for package, keys, remedy in needs:
        for key in keys:
            if package not in s.machine.packages:
                got = f"{key}={s.value(key)}"
                yield Fault(f"the package {package} is not installed", got, f"the package {package}", remedy, (key,))


def liger_has_an_accelerator(s: CheckContext) -> Faults:
    """liger's kernels run on GPUs only."""
    for role in trained_roles(s.config):
        key = f"{role.model_key}.use_liger"
        if role.model.use_liger and not on_accelerator(s.config, s.machine):
            got, remedy = f"{key}=True, trainer.device={s.config.trainer.device}", f"set {key}=False"
            yield Fault("liger's kernels need a GPU", got, "a CUDA device", remedy, (key, "trainer.device"))


def attention_has_an_accelerator(s: CheckContext) -> Faults:
    """flash-attn's kernels run on GPUs only, flex_attention has no backward on CPU. Another rule reports a missing package."""
    if on_accelerator(s.config, s.machine):
        return
    for model in dict.fromkeys(role.model_key for role in sharded_roles(s.config)):
        key = f"{model}.attn_implementation"
        name = s.value(key)
        is_missing = name == "flash_attention_2" and "flash_attn" not in s.machine.packages
        if name in FOR_GPUS and not is_missing:
            got, remedy = f"{key}={name}, trainer.device={s.config.trainer.device}", f"set {key}=sdpa"
            yield Fault("this kernel of attention needs a GPU", got, "a CUDA device", remedy, (key, "trainer.device"))


# Files


def models_exist(s: CheckContext) -> Faults:
    """Every role names a model, and a model folder exists."""
    paths = {MODEL: s.config.actor_rollout_ref.model.path}
    if has_critic(s.config) and s.config.critic.model.path is not None:
        paths["critic.model.path"] = s.config.critic.model.path
    for key, path in paths.items():
        keys = (key,)
        expected = f"a Hugging Face folder, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or {TINY}"
        if path is None:
            yield Fault("there is no model", f"{key}=null", expected, f"set {key}", keys)
        elif path.startswith("builtin:") and path != TINY:
            yield Fault("there is no such built-in model", f"{key}={path}", expected, f"set {key}={TINY}", keys)
        elif path == TINY and not is_tiny(s.config):
            remedy = f"set {key}=null: the critic starts from the actor's model"
            alone = f"null, or a model of its own; {TINY} if {MODEL} is {TINY} too"
            yield Fault("the built-in critic judges the built-in policy only", f"{key}={path}", alone, remedy, keys)
        elif path != TINY and not _is_model(path):
            remedy = f"correct {key}; relative paths start at {Path.cwd()}"
            yield Fault(
                "the model folder does not exist or has no config.json", f"{key}={path}", expected, remedy, keys
            )


def _is_model(path: str) -> bool:
    """Whether this is a model folder or has the form of a hub name; the hub is not asked."""
    folder = Path(path).expanduser()
    if folder.exists():
        return (folder / "config.json").is_file()
    return is_hub_name(path)


def data_files_exist(s: CheckContext) -> Faults:
    """Prompts are there."""
    for name in ("train_files", "val_files"):
        key = f"data.{name}"
        files: tuple[str, ...] = s.value(key)
        expected = f"files ending in {' or '.join(DATA_KINDS)}, or {ARITHMETIC}"
        if not files:
            yield Fault(f"{key} is empty", f"{key}=[]", expected, f"name at least one file in {key}", (key,))
        for file in files:
            if file == ARITHMETIC:
                continue
            if file.startswith("builtin:"):
                yield Fault(
                    "there is no such built-in task", f"{key}={file}", expected, f"set {key}={ARITHMETIC}", (key,)
                )
            elif not Path(file).expanduser().is_file():
                remedy = f"correct {key}; relative paths start at {Path.cwd()}"
                yield Fault("a data file does not exist", f"{key}={file}", expected, remedy, (key,))
            elif Path(file).suffix not in DATA_KINDS:
                remedy = "convert it to Parquet or JSON lines"
                yield Fault("a data file is of an unknown kind", f"{key}={file}", expected, remedy, (key,))


def user_code_exists(s: CheckContext) -> Faults:
    """The files of a user's dataset class, reward function and policy loss exist."""
    custom = s.config.data.custom_cls
    if (custom.path is None) != (custom.name is None):
        keys = ("data.custom_cls.path", "data.custom_cls.name")
        got = f"{keys[0]}={custom.path}, {keys[1]}={custom.name}"
        yield Fault("a dataset class needs file and name", got, "both or neither", f"set {' and '.join(keys)}", keys)
    for key in ("data.custom_cls.path", "custom_reward_function.path", "actor_rollout_ref.actor.policy_loss.path"):
        path = s.value(key)
        if path is not None and not (Path(path).expanduser().is_file() and Path(path).suffix == ".py"):
            remedy = f"correct {key}; relative paths start at {Path.cwd()}"
            yield Fault("a file of your own does not exist", f"{key}={path}", "a Python file", remedy, (key,))


def checkpoint_exists(s: CheckContext) -> Faults:
    """The checkpoint to resume from exists and is finished."""
    trainer, key = s.config.trainer, "trainer.resume_from_path"
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is not None:
        folder = Path(trainer.resume_from_path).expanduser()
        if not re.fullmatch(r"global_step_\d+", folder.name) or not (folder / "driver.json").is_file():
            remedy = f"correct {key}; checkpoints are in <run folder>/checkpoints"
            got = f"{key}={trainer.resume_from_path}"
            expected = "a folder named global_step_N with a driver.json, which is written last"
            what = "does not exist" if not folder.is_dir() else "is none, or not finished"
            yield Fault(f"the checkpoint to resume from {what}", got, expected, remedy, (key,))


def folders_can_be_written(s: CheckContext) -> Faults:
    """The driver can write to its folders, or make them."""
    for key, folder in _written_folders(s):
        wrong = why_not_writable(folder)
        if wrong is not None:
            value = s.value(key) or f"null, which means {folder}"
            got, expected = f"{key}={value}: {wrong}", "a folder that is writable, or can be made"
            remedy = f"change {key}, or let this user write there"
            yield Fault("the run cannot write to this folder", got, expected, remedy, (key,))


def _written_folders(s: CheckContext) -> Iterator[tuple[str, Path]]:
    """Yield each folder with the key that names it."""
    trainer = s.config.trainer
    for name in ("rollout_data_dir", "validation_data_dir"):
        if s.value(f"trainer.{name}") is not None:
            yield f"trainer.{name}", Path(s.value(f"trainer.{name}")).expanduser().absolute()
    checkpoint = Path(trainer.resume_from_path or "").expanduser().absolute()
    if trainer.resume_mode != "resume_path":
        yield "trainer.default_local_dir", runs_folder(s.config)
    elif checkpoint.is_dir():  # the resumed run continues in its own folder
        yield "trainer.resume_from_path", checkpoint.parent.parent
    made = warm_starts_folder(s.config)
    # A read-only cache is enough if it has a warm start; only the warm start itself can tell whether it is the right one.
    if is_tiny(s.config) and not any(made.glob("warm_start_*")):
        yield "warm_start.cache_dir", made


MACHINE_RULES = (
    cluster_answers,
    nodes_need_a_cluster,
    gpus_suffice,
    packages_are_installed,
    liger_has_an_accelerator,
    attention_has_an_accelerator,
    models_exist,
    data_files_exist,
    user_code_exists,
    checkpoint_exists,
    folders_can_be_written,
)
