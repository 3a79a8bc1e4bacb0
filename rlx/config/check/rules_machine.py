"""Rules about the machine's devices, packages and files."""

import os
from pathlib import Path

from rlx.config.check import folders
from rlx.config.check.declared import OWN, CheckContext, Faults
from rlx.config.schema import ARITHMETIC
from rlx.config.schema.roles import TINY, has_critic, is_tiny, sharded_roles, trained_roles
from rlx.program import program
from rlx.row_files import DATA_KINDS, SAVED, SPLITS, data_kind, data_parts
from rlx.step_folders import step_of

GPUS, SAMPLING = "trainer.n_gpus_per_node", "trainer.n_rollout_gpus"
NODES, DEVICE = "trainer.nnodes", "trainer.device"
MODEL = "actor_rollout_ref.model.path"
FOR_GPUS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
LONGEST_RAY_FOLDER = 26


def cluster_can_be_joined(s: CheckContext) -> Faults:
    cluster, nodes = s.machine.cluster, s.config.trainer.nnodes
    if cluster is not None and cluster.error is not None:
        remedy = "start the cluster (docs/cluster.md), or unset RAY_ADDRESS to run on this machine alone"
        expected = "the head of a running cluster, <host>:<port> (port 6379 by default)"
        got = f"{cluster.address}: {cluster.error}"
        yield s.fault("the Ray cluster cannot be joined", expected, remedy, got=got)
    if nodes > 1 and cluster is None and s.machine.name is None:
        remedy = f"start Ray on each machine and set RAY_ADDRESS (docs/cluster.md), or set {NODES}=1"
        what, got = "several machines need a Ray cluster to join", f"{NODES}={nodes}, RAY_ADDRESS not set"
        yield s.fault(what, "RAY_ADDRESS=<host>:<port>", remedy, NODES, got=got)


def gpus_suffice(s: CheckContext) -> Faults:
    """Each process needs a GPU of its own; on CPU the number of processes is free."""
    trainer, cluster = s.config.trainer, s.machine.cluster
    if not s.on_accelerator or (cluster is not None and cluster.error):
        return
    per_node, offered, own = trainer.processes_per_node, s.machine.node_gpus, trainer.n_rollout_gpus
    # All machines are like one that is named; another rule reports a missing cluster.
    nodes = 1 if cluster is None else trainer.nnodes
    if sum(gpus >= per_node for gpus in offered) >= nodes:
        return
    remedy = f"set {DEVICE}=cpu"
    if best := max(offered, default=0):
        remedy = f"set {GPUS}={best}" if nodes == 1 else f"lower {GPUS} or {NODES}, or {remedy}"
        if own:
            remedy = f"lower {GPUS} or {SAMPLING}, which add up"
    if s.machine.name is not None:
        kind = s.machine.name.partition("x")[2]  # of 4xh100: h100
        remedy += f", or plan for a machine with {per_node}: --on {per_node}x{kind}"
    found = " + ".join(map(str, offered)) or "0"  # per machine: 4 + 4 + 0
    sampling = f" and {SAMPLING}={own}" * (own > 0)
    got = f"{GPUS}={trainer.n_gpus_per_node}{sampling} on {nodes} machine(s); {s.machine.label} has {found} GPU(s)"
    expected = f"at least {per_node} GPU(s) on each of {nodes} machine(s)"
    keys = (GPUS, *[SAMPLING] * (own > 0), NODES, DEVICE)
    yield s.fault("more GPUs are requested than available", expected, remedy, *keys, got=got)


def ray_has_a_short_folder(s: CheckContext) -> Faults:
    """The path of Ray's sockets below its folder is no longer than Linux allows."""
    if s.machine.cluster is not None or s.machine.name is not None:
        return
    given = s.config.ray_kwargs.ray_init.get("_temp_dir")
    name = "RAY_TMPDIR" if given is None else "ray_kwargs.ray_init._temp_dir"
    length = len(os.fsencode(os.path.abspath(os.path.expanduser(str(given or os.environ.get("RAY_TMPDIR") or "/tmp")))))
    if length > LONGEST_RAY_FOLDER:
        expected = f"at most {LONGEST_RAY_FOLDER} bytes: Ray adds 81 for its sockets, whose path has at most 107"
        what, remedy = "the path of Ray's folder is too long", f"set {name} to a short path, such as /tmp"
        yield s.fault(what, expected, remedy, got=f"{name} of {length} bytes")


def kernels_have_an_accelerator(s: CheckContext) -> Faults:
    """liger's and flash-attn's kernels run on GPUs only, and flex_attention has no backward on CPU."""
    if s.on_accelerator:
        return
    for key in (f"{role.model_key}.use_liger" for role in trained_roles(s.config) if role.model.use_liger):
        yield s.fault("liger's kernels need a GPU", "a CUDA device", f"set {key}=False", key, DEVICE)
    # Actor and reference share a key.
    for key in dict.fromkeys(f"{role.model_key}.attn_implementation" for role in sharded_roles(s.config)):
        kernel = s.value(key)
        is_missing = kernel == "flash_attention_2" and "flash_attn" not in s.machine.packages  # another rule reports it
        if kernel in FOR_GPUS and not is_missing:
            yield s.fault("this kernel of attention needs a GPU", "a CUDA device", f"set {key}=sdpa", key, DEVICE)


def models_exist(s: CheckContext) -> Faults:
    """Every role names a model, and a model folder exists; the hub is not asked."""
    expected = f"a Hugging Face folder, a hub name such as Qwen/Qwen2.5-0.5B-Instruct, or {TINY}"
    for key in (MODEL, "critic.model.path"):
        path = s.value(key)
        if key != MODEL and (path is None or not has_critic(s.config)):
            continue
        if path is None:
            yield s.fault("there is no model", expected, f"set {key}", key)
        elif path == TINY and not is_tiny(s.config):
            remedy = f"set {key}=null: the critic starts from the actor's model"
            alone = f"null, or a model of its own; {TINY} if {MODEL} is {TINY} too"
            yield s.fault("the built-in critic judges the built-in policy only", alone, remedy, key)
        elif path.startswith("builtin:") and path != TINY:
            yield s.fault("there is no such built-in model", expected, f"set {key}={TINY}", key)
        elif path != TINY:
            folder = Path(path).expanduser()
            if not ((folder / "config.json").is_file() if folder.exists() else folders.is_hub_name(path)):
                what = "the model folder does not exist or has no config.json"
                yield s.fault(what, expected, folders.correct_path(key), key)


def data_files_exist(s: CheckContext) -> Faults:
    for key in ("data.train_files", "data.val_files"):
        expected = f"files ending in {', '.join(DATA_KINDS)}, a folder or pattern of them, a URL, or {ARITHMETIC}"
        if not s.value(key):
            yield s.fault(f"{key} is empty", expected, f"name at least one file in {key}", key)
        for file in (each for each in s.value(key) if each != ARITHMETIC):
            if file.startswith("builtin:"):
                what, remedy = "there is no such built-in task", f"set {key}={ARITHMETIC}"
            elif not (parts := data_parts(file)):
                what, remedy, folder = "a data file does not exist", folders.correct_path(key), Path(file).parent
                if folder.name == "gsm8k":
                    remedy = f"run `{program('gsm8k')} --out {folder}`, or {remedy}"
                if (Path(file).expanduser() / SPLITS).is_file():
                    what, remedy = "a data set with several splits was named", f"name a split: {key}={file}/train"
            elif not {*map(data_kind, parts)} <= {*DATA_KINDS, SAVED}:
                what, remedy = "a data file is of an unknown kind", "convert it to Parquet or JSON lines (docs/data.md)"
            else:
                continue
            yield s.fault(what, expected, remedy, key, got=f"{key}={file}")


def user_code_exists(s: CheckContext) -> Faults:
    own = ("data.custom_cls", OWN, "environment", "actor_rollout_ref.actor.policy_loss")
    paths = {f"{each}.path": s.value(f"{each}.path") for each in own}
    paths |= {f"{OWN}.parts[{place}].path": part.path for place, part in enumerate(s.value(f"{OWN}.parts"))}
    for key, path in paths.items():
        if path is not None and not folders.is_python_file(path):
            what, got, remedy = "a file of your own does not exist", f"{key}={path}", folders.correct_path(key)
            yield s.fault(what, "a Python file", remedy, key.partition("[")[0], got=got)


def checkpoint_exists(s: CheckContext) -> Faults:
    trainer, key = s.config.trainer, "trainer.resume_from_path"
    named = trainer.resume_from_path
    if trainer.resume_mode == "resume_path" and named is not None and not folders.is_url(named):
        folder = Path(named).expanduser()
        if step_of(folder) is None or not (folder / "driver.json").is_file():
            remedy = f"correct {key}; checkpoints are in <run folder>/checkpoints"
            what = "does not exist" if not folder.is_dir() else "is none, or not finished"
            expected = "a folder named global_step_N with a driver.json"
            yield s.fault(f"the checkpoint to resume from {what}", expected, remedy, key)


def folders_can_be_written(s: CheckContext) -> Faults:
    trainer, keys = s.config.trainer, ("trainer.rollout_data_dir", "trainer.validation_data_dir")
    written = [(key, Path(s.value(key)).expanduser().absolute()) for key in keys if s.value(key) is not None]
    checkpoint = Path(trainer.resume_from_path or "").expanduser().absolute()
    if trainer.resume_mode != "resume_path":
        written.append(("trainer.default_local_dir", folders.runs_folder(s.config)))
    elif checkpoint.is_dir():  # the resumed run continues in its own folder
        written.append(("trainer.resume_from_path", checkpoint.parent.parent))
    made = folders.warm_starts_folder(s.config)
    # A read-only cache is enough if it has a warm start; only the warm start itself can tell whether it is the right one.
    if is_tiny(s.config) and not any(made.glob("warm_start_*")):
        written.append(("warm_start.cache_dir", made))
    for key, folder in written:
        if (wrong := folders.why_not_writable(folder)) is not None:
            value = s.value(key) or f"null, which means {folder}"
            got, expected = f"{key}={value}: {wrong}", "a folder that is writable, or can be made"
            remedy = f"change {key}, or let this user write there"
            yield s.fault("the run cannot write to this folder", expected, remedy, key, got=got)


MACHINE_RULES = (
    *(cluster_can_be_joined, gpus_suffice, ray_has_a_short_folder, kernels_have_an_accelerator, models_exist),
    *(data_files_exist, user_code_exists, checkpoint_exists, folders_can_be_written),
)
