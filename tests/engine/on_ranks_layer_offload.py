"""An engine whose frozen weights stream, beside one with resident weights."""

import dataclasses
import shutil
from pathlib import Path

import torch.distributed as dist
from rank_tools import FP64, ROWS, build, make_batch, policy, value, weights_of

from rlx.config.schema import ActivationOffloadConfig
from rlx.engine import build as building

ACTIVATIONS = ActivationOffloadConfig(min_bytes=0)
LORA = {"lora_rank": 2, "lora_alpha": 8}


def compared(folder, checkpoint_folder, head, save, weights_in=None):
    """Per-token figures, metrics of updates and weights, after a rest on the host, and from a checkpoint; both ways.

    Returns:
        For both: a list of tensors and numbers. Of the streaming one: streamed bytes, those fetched, and bytes of trained weights.
    """
    saving = {"enable_gradient_checkpointing": save not in (None, "all"), "enable_activation_offload": save is not None}
    if save is not None:
        saving["activation_offload"] = dataclasses.replace(ACTIVATIONS, save=save)
    objective = {"lm": policy, "value": value}[head]()
    batch, results = make_batch(), []
    for streams in (False, True):
        model = LORA | saving | {"layer_offload": streams, "layer_offload_directory": weights_in if streams else None}
        flags = dataclasses.replace(FP64, param_offload=True, optimizer_offload=True)
        engine, other = (build(folder, flags, model=model, head=head) for _ in range(2))
        found = [per_token(engine, head, batch), engine.update(batch, ROWS, objective)]
        engine.memory.to_host()
        found += [engine.update(batch, ROWS, objective), weights_of(engine)]
        path = f"{checkpoint_folder}/{streams}"
        engine.weights.save(path, ("model", "optimizer", "extra", "hf_model"))
        per_token(other, head, batch)  # its last layers are on the device
        other.weights.load(path)
        shutil.rmtree(path)
        found += [per_token(other, head, batch), other.update(batch, ROWS, objective), weights_of(other)]
        results.append(found)
    stats = other.memory.streaming.stats()
    frozen = sum(p.nbytes for p in other.root.parameters() if not p.requires_grad)
    return results, other.memory.streaming.streamed_bytes, stats.copied_bytes, frozen


def shared(folder, scratch, machines, weights_in=None):
    """Figures of engines on all processes: resident, streamed, and streamed from a checkpoint; and the names of shared memory.

    With two machines each process believes to be on one of its own. With `weights_in` a file there takes the place of memory.
    """
    batch, results, found = make_batch(), [], building.machine_identity
    building.machine_identity = lambda: f"{found()}-{dist.get_rank() % machines}"
    try:
        for streams in (False, True):
            model = LORA | {
                "layer_offload": streams,
                "layer_offload_directory": weights_in,
                "enable_activation_offload": True,
                "activation_offload": ACTIVATIONS,
            }
            engine, other = (build(folder, model=model) for _ in range(2))
            results.append([per_token(engine, "lm", batch), engine.update(batch, ROWS, policy()), weights_of(engine)])
            engine.weights.save(f"{scratch}/{streams}", ("model", "optimizer", "extra"))
            results[-1].append(engine.update(batch, ROWS, policy()))
        other.weights.load(f"{scratch}/True")
        loaded = [*results[-1][:2], weights_of(other), other.update(batch, ROWS, policy())]
    finally:
        building.machine_identity = found
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    where = weights_in or "frozen"
    names = {parts[5] for parts in maps if len(parts) > 5 and where in parts[5]}
    return *results, loaded, names


def reference(folder, head):
    """Per-token figures of a model that is never trained, resident and streamed."""
    engines = [build(folder, model={"layer_offload": streams}, head=head, optim=None) for streams in (False, True)]
    assert engines[1].memory.streaming.streamed_bytes > 0
    assert engines[0].memory.streaming is None
    return [per_token(engine, head, make_batch()) for engine in engines]


def per_token(engine, head, batch):
    if head == "value":
        return {"values": engine.values(batch, ROWS)}
    return engine.log_probs(batch, ROWS, 0.7)
