"""Convert a role's checkpoint to a Hugging Face folder in one process: `python -m rlx.export CHECKPOINT_DIR OUT_DIR`."""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlx.checkpoint.folders import MANIFEST, RemoteFolder, replacing
from rlx.checkpoint.role import read_adapters, read_description, read_weights
from rlx.errors import ExplainedError, storing
from rlx.models.hf_folder import FolderParts
from rlx.models.lora import CONFIG, write_adapters
from rlx.program import program
from rlx.step_folders import step_of, steps_in

AGAIN = "export again"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def export(
    checkpoint: Path,
    out: Path,
    trust_remote_code: bool = False,
    only_adapters: bool = False,
    dtype: str | None = None,
) -> str:
    """Write a folder that `from_pretrained` loads; return what to tell the user beside its name.

    Args:
        checkpoint: of one role, such as `.../global_step_N/actor`.
        out: does not exist yet, or is empty.
        trust_remote_code: allow the model to bring its own code.
        only_adapters: write the adapters in peft's format instead of the model with the adapters merged in.
        dtype: of the weights, one of DTYPES; None: that of the model that the run began with, unless it is the wider one.

    Raises CheckpointError: there is no checkpoint, it is damaged, or it has no model or no adapters; ModelError: the checkpoint's
    description of the model cannot be read; ValueError: `out` is not empty.
    """
    head = read_description(checkpoint).head
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not empty; name a folder that does not exist yet")
    if only_adapters:
        adapters, kind, base = read_adapters(checkpoint)
        folder_parts = FolderParts.read(checkpoint / "card", head, trust_remote_code)
        with storing(out, AGAIN), replacing(out) as partial:
            write_adapters(partial, adapters, kind, base)
            if folder_parts.tokenizer is not None:
                folder_parts.tokenizer.save_pretrained(partial)
        if base is None:
            return f"set base_model_name_or_path in {CONFIG}: the checkpoint does not name the model below the adapters"
        return f"adapters of {base}"
    weights = read_weights(checkpoint)  # first, because it checks all files
    folder_parts = FolderParts.read(checkpoint / "card", head, trust_remote_code)
    own = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    written = folder_parts.narrower(own) if dtype is None else DTYPES[dtype]
    with storing(out, AGAIN), replacing(out) as partial:
        folder_parts.write_with_weights(partial, weights, written)
    names = {kind: name for name, kind in DTYPES.items()}
    if written.itemsize < own.itemsize:
        more = f"; --dtype {names[own]} keeps all digits" if own in names else ""
        return f"in {names[written]}, the type of the model before training{more}" if dtype is None else ""
    return ""


@contextmanager
def _local(checkpoint: str, role: str) -> Iterator[Path]:
    """Yield the local folder of a role; one in object storage is downloaded to a temporary folder."""
    if "://" not in checkpoint:
        if not Path(checkpoint).exists():
            raise ValueError(_missing(Path(checkpoint)))
        if steps := steps_in(Path(checkpoint) / "checkpoints") or steps_in(Path(checkpoint)):
            listed = ", ".join(map(str, steps.values()))
            raise ValueError(f"{checkpoint}: holds checkpoints, expected one of them: {listed}")
        folder = Path(checkpoint) / role
        if step_of(Path(checkpoint)) is not None and not folder.is_dir():
            raise ValueError(_missing(folder))
        yield folder if folder.is_dir() else Path(checkpoint)
        return
    remote = RemoteFolder(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        remote.download(role if remote.has(f"{role}/{MANIFEST}") else "", Path(folder) / role)
        yield Path(folder) / role


def _missing(checkpoint: Path) -> str:
    """Return the message for a folder that does not exist, with the roles or steps that are beside it."""
    beside = checkpoint.parent
    if step_of(beside) is not None and beside.is_dir():
        roles = ", ".join(sorted(found.parent.name for found in beside.glob(f"*/{MANIFEST}")))
        return f"{checkpoint}: does not exist; the run saved no {checkpoint.name}, {beside} has {roles or 'no role'}"
    steps = ", ".join(step.name for step in steps_in(beside).values())
    return f"{checkpoint}: does not exist; {f'{beside} has {steps}' if steps else 'name a global_step_N of a run'}"


def _trial(out: Path, trust_remote_code: bool) -> str:
    """Return the command that asks the exported model a question."""
    question: Any = "What is 7 + 5?"
    if "chat_template" in (out / "tokenizer_config.json").read_text() or (out / "chat_template.jinja").exists():
        question = [{"role": "user", "content": question}]
    options = ", trust_remote_code=True" * trust_remote_code
    # In double quotes, which a shell leaves alone within single ones
    pipeline = f'transformers.pipeline("text-generation", {json.dumps(str(out))}{options})'
    code = f"import transformers; print({pipeline}({json.dumps(question)}))"
    return shlex.join(["python", "-c", code])


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 if a folder is not as expected."""
    parser = argparse.ArgumentParser(prog=program("export"), description=__doc__)
    parser.add_argument(
        "checkpoint", help="a run's .../global_step_N, or the folder of one role in it; a path or a URL"
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--role", default="actor", help="which role of a global_step_N folder (default: actor)")
    parser.add_argument("--trust-remote-code", action="store_true", help="the model brings its own code")
    parser.add_argument("--adapters", action="store_true", help="write adapters alone, in peft's format")
    parser.add_argument(
        "--dtype", choices=[*DTYPES], help="type of the weights (default: the model's own before training)"
    )
    chosen = parser.parse_args(arguments)
    try:
        with _local(chosen.checkpoint, chosen.role) as folder:
            told = export(folder, chosen.out, chosen.trust_remote_code, chosen.adapters, chosen.dtype)
            head = read_description(folder).head
    except (ValueError, ExplainedError, OSError) as error:
        print(f"{program('export')}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {chosen.out}{told and f' ({told})'}")
    if head == "lm" and (chosen.out / "tokenizer_config.json").exists():
        print(f"to try it:\n{_trial(chosen.out, chosen.trust_remote_code)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
