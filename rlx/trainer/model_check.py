"""Look at local model folders before anything starts: the JSON files, the tokenizer and the headers of the weights.

What `transformers` finds on loading, such as missing weights, is reported by `rlx.trainer.start.prepare` and by the workers.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from rlx.checkpoint.manifest import few
from rlx.config.faults import Fault
from rlx.config.machine import Machine
from rlx.config.schema import ARITHMETIC, MODEL_JSON_FILES, TOKENIZER_FILES, PPOConfig
from rlx.config.schema.roles import ModelRole, sharded_roles

POLICY, JUDGE = "actor_rollout_ref.model.path", "reward_model.model.path"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")


def check_models(config: PPOConfig, broken: frozenset[str], machine: Machine) -> tuple[Fault, ...]:
    """Return the faults of each model folder of this machine; reads no weights.

    Folders that are missing or without a config.json are reported by a rule of the configuration and skipped here, as is what the
    rule of the reward model judges. Keys that could not be read, `broken`, are not judged. A folder without weights serves to plan,
    and for a machine that is only named every folder does.
    """
    paths = {role.model.path or "": f"{role.model_key}.path" for role in reversed(sharded_roles(config))}
    faults: list[Fault] = []
    for path, key in paths.items():
        folder = Path(path).expanduser()
        if path and key not in broken and (folder / "config.json").is_file():
            faults += _of_json(folder, key) if key != JUDGE else ()
            if machine.name is None:
                faults += _of_tokenizer(folder) if key == POLICY else ()
                faults += _of_weights(folder, key)
    return tuple(faults)


def local_roles(config: PPOConfig) -> list[ModelRole]:
    """Return the roles whose model is a folder of this machine."""
    return [role for role in sharded_roles(config) if role.model.path and Path(role.model.path).expanduser().is_dir()]


def tries_start(config: PPOConfig) -> bool:
    """Whether this machine has what `faults_at_start` looks at: a folder of a model, or files of rows."""
    return bool(local_roles(config)) or {*config.data.train_files, *config.data.val_files} != {ARITHMETIC}


def _of_json(folder: Path, key: str) -> Iterator[Fault]:
    for file in (folder / name for name in MODEL_JSON_FILES if (folder / name).exists()):
        try:
            found = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            yield _fault("a file of the model cannot be read", f"{file}: {error}", "a JSON object", key)
        else:
            if not isinstance(found, dict):
                got = f"{file}: a JSON {type(found).__name__}"
                yield _fault("a file of the model holds something else", got, "a JSON object", key)


def _of_tokenizer(folder: Path) -> Iterator[Fault]:
    has_weights = any((folder / name).exists() for name in WEIGHTS)
    if has_weights and not any((folder / name).exists() for name in TOKENIZER_FILES):
        remedy = "save the tokenizer that the model was trained with in its folder (save_pretrained)"
        expected = f"one of {', '.join(TOKENIZER_FILES)}"
        yield Fault("the model's folder has no tokenizer", f"{POLICY}={folder}", expected, remedy, (POLICY,))


def _of_weights(folder: Path, key: str) -> Iterator[Fault]:
    from safetensors import SafetensorError, safe_open

    faults = []
    try:
        for file in _weights_in(folder):
            try:
                with safe_open(file, "np"):  # it compares the header with the file's length
                    pass
            except (OSError, SafetensorError) as error:
                size = f", {file.stat().st_size:,} bytes" if file.is_file() else ""
                faults.append(f"{file}{size}: {error}")
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        faults.append(f"{folder / INDEX}: {type(error).__name__}: {error}")
    if faults:
        yield _fault("the model's weights cannot be read", few(faults), "whole files in safetensors' format", key)


def _weights_in(folder: Path) -> list[Path]:
    """Return the files that transformers reads, none if they are of another kind; raises an error for a broken index."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [folder / SINGLE] if (folder / SINGLE).is_file() else []
    return sorted({folder / name for name in json.loads((folder / INDEX).read_text())["weight_map"].values()})


def _fault(what: str, got: str, expected: str, key: str) -> Fault:
    return Fault(what, got, expected, f"restore the file, from the hub or a copy, or correct {key}", (key,))
