"""A model folder with the dequantised base, from which samplers that take adapters alone read their weights."""

from pathlib import Path

import torch.distributed as dist

from rlx.engine.engine import Engine
from rlx.errors import storing
from rlx.identity import machine_identity
from rlx.scratch import scratch_folder


class DequantizedBase:
    """The base of a quantised actor in full, in a temporary folder of each machine; all processes make it together.

    A sampler with the original weights would give other log-probs than the trainer. The folder stays as long as this process,
    because a sampler that failed reads it again.

    Args:
        engine: of the actor, with a quantised base.

    Attributes:
        path: a folder for `from_pretrained`, below `$TMPDIR`.

    Raises:
        StorageError: the folder has no room.
    """

    def __init__(self, engine: Engine) -> None:
        machine = machine_identity()
        machines: list[str] = [machine] * dist.get_world_size()
        dist.all_gather_object(machines, machine)
        is_writer = machines.index(machine) == dist.get_rank()
        self._folder = scratch_folder("dequantized") if is_writer else None
        weights = {name: tensor.cpu() for name, tensor in engine.weights.base() if is_writer}
        paths: list[str] = [""] * len(machines)
        if self._folder is not None:
            with storing(Path(self._folder.name)):
                engine.weights.folder_parts.write_with_weights(Path(self._folder.name), weights)
        dist.all_gather_object(paths, self._folder.name if self._folder is not None else "")
        self.path = paths[machines.index(machine)]
