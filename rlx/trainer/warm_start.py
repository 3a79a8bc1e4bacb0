"""Cache `builtin:tiny` after its training by imitation, so that it is trained once."""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import torch

from rlx.config.check.folders import warm_starts_folder
from rlx.config.schema import PPOConfig
from rlx.models.loading import without_progress_bar
from rlx.trainer.demonstrations import demonstrated

CODE = ("models/tiny", "data/arithmetic", "trainer/demonstrations", "environments/guessing", "trainer/imitation")
"""The modules on which the trained model depends."""


def warm_start(config: PPOConfig) -> Path:
    """Return the folder of the warm-started tiny model and its tokenizer; the folder is made once and reused.

    The model learns demonstrations of the training problems of `builtin:arithmetic` by imitation until its greedy accuracy on
    problems of neither split reaches `warm_start.target_accuracy`. For conversations of several turns
    the accuracy is the share whose turns are all as good as the demonstrated ones. Each turn is decoded behind the demonstrated
    turns before it and its own demonstrated first token. The training takes this process's accelerator, if there is one and
    `trainer.device` allows it. The folder's name is a hash of all inputs of its contents. The folder appears only when it is
    complete.

    Raises DataError: the generator cannot make that many problems. OSError: the cache directory cannot be written.
    """
    folder = warm_starts_folder(config) / f"warm_start_{_fingerprint(config)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made first, so that an unwritable folder shows before training.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}_", dir=folder.parent))
    try:
        # Imported only when a model is to be trained, because transformers' models take seconds.
        from rlx.models.tiny import make_tiny
        from rlx.trainer.imitation import imitate

        most, target = config.warm_start.max_steps, config.warm_start.target_accuracy
        print(
            f"warm start: the tiny model learns by imitation until it solves {target:.0%} of held-out problems, for at most "
            f"{most} step(s); it is cached in {folder}",
            flush=True,  # outside of a terminal the bar comes at its end
        )
        model, tokenizer = make_tiny(config.actor_rollout_ref.model.tiny)
        accuracy, steps = imitate(config, model, tokenizer, _device(config))
        model.to("cpu")
        with without_progress_bar():
            model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        (unfinished / "warm_start.json").write_text(json.dumps({"accuracy": accuracy, "steps": steps}))
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _device(config: PPOConfig) -> torch.device:
    found = None if config.trainer.device == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    return found or torch.device("cpu")


def _publish(unfinished: Path, folder: Path) -> None:
    """Rename the folder. If another process was faster, keep its folder, which has the same contents."""
    unfinished.chmod(0o755)
    try:
        os.rename(unfinished, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _fingerprint(config: PPOConfig) -> str:
    """Return sixteen hexadecimal digits that depend on model, task, training, their code, the device and torch's version."""
    training = {key: value for key, value in asdict(config.warm_start).items() if key != "cache_dir"}
    code = [files("rlx").joinpath(f"{module}.py").read_text(encoding="utf-8") for module in CODE]
    parts = [
        asdict(config.actor_rollout_ref.model.tiny),
        asdict(config.data.arithmetic),
        training,
        [name, config.environment.kwargs] if (name := demonstrated(config.environment)) else None,
        code,
        _device(config).type,
        torch.__version__,
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()
