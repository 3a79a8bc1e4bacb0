"""Saving and loading."""

import gc
import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rank_tools import FP64, ROWS, SPLIT_BYTES, build, make_batch, own_share, policy, value, weights_of

from rlx.checkpoint.manifest import CheckpointError
from rlx.config.schema import FSDPConfig, LoraConfig, OptimConfig
from rlx.engine.fsdp_units import local
from rlx.engine.optimizer_state import OptimizerStateOnHost
from rlx.errors import StorageError
from rlx.models.loading import load_tokenizer
from rlx.offload import host_arena

ALL = ("model", "optimizer", "extra")


def share():
    return own_share(make_batch(), (8,) if dist.get_world_size() == 1 else (5, 3))


def stopped(folder, strategy, out, lora=0, contents=ALL, updates=2, head="lm"):
    """Some updates, a checkpoint (saved twice, so that one replaces another), two more updates: metrics and weights."""
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    engine = build(folder, strategy=strategy, head=head, model={"lora_rank": lora}, tokenizer=tokenizer)
    objective = {"lm": policy, "value": value}[head]()
    engine.weights.save(out, contents)
    for _ in range(updates):
        engine.update(share(), ROWS, objective)
    engine.weights.save(out, contents)
    saved = weights_of(engine)
    metrics = [engine.update(share(), ROWS, objective) for _ in range(2)]
    return metrics, saved, weights_of(engine)


def never_saved(folder):
    """The first two updates of an engine that writes nothing."""
    engine = build(folder)
    return [engine.update(share(), ROWS, policy()) for _ in range(2)], weights_of(engine)


def resumed(folder, strategy, out, lora=0, used=False):
    """The same two updates by a new engine that loads the checkpoint; `used`: it has done other things before."""
    engine = build(folder, strategy=strategy, model={"lora_rank": lora})
    if used:
        for _ in range(3):
            engine.update(share(), ROWS, policy())
        engine.log_probs(share(), ROWS, 1.0)
    engine.weights.load(out)
    log_probs = engine.log_probs(share(), ROWS, 1.0)["log_probs"]
    loaded = weights_of(engine)
    metrics = [engine.update(share(), ROWS, policy()) for _ in range(2)]
    return metrics, loaded, weights_of(engine), log_probs


def adapters_on_bf16(folder, out):
    """State of an engine that trained DoRA on a bf16 base, and of one that continues from its checkpoint."""
    kind = {"lora_rank": 2, "lora": LoraConfig(use_dora=True)}
    first, second = (build(folder, FSDPConfig(model_dtype="bf16"), model=kind) for _ in range(2))
    for _ in range(2):
        first.update(share(), ROWS, policy())
    first.weights.save(out, ALL)
    second.weights.load(out)
    return [
        {name: local(p).clone() for name, p in engine.root.named_parameters()}
        | {
            f"{i} {key}": local(x)
            for i, s in enumerate(engine.stepper.optimizer.state.values())
            for key, x in s.items()
        }
        for engine in (first, second)
    ]


def exported(folder, strategy, out, lora=0, head="lm"):
    """A checkpoint with a Hugging Face folder after an update, and what the engine says of a sequence."""
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    engine = build(folder, strategy=strategy, head=head, model={"lora_rank": lora}, tokenizer=tokenizer)
    engine.update(share(), ROWS, {"lm": policy, "value": value}[head]())
    engine.weights.save(out, ("model", "hf_model"))
    engine.root.eval()
    with torch.no_grad():
        return engine.root(input_ids=torch.arange(3, 20)[None]).logits


def warnings_of_loading(folder, out):
    """What is logged when a checkpoint is loaded."""
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("rlx").addHandler(handler)
    build(folder).weights.load(out)
    logging.getLogger("rlx").removeHandler(handler)
    return told


def rescaled(folder, out):
    """The message with which adapters are refused that an engine would scale otherwise."""
    build(folder, model={"lora_rank": 2, "lora_alpha": 8}).weights.save(out, ("model",))
    try:
        build(folder, model={"lora_rank": 2, "lora_alpha": 4}).weights.load(out)
    except CheckpointError as error:
        return str(error)


def refusal(folder, out, head="lm", dtype="fp64"):
    """The message with which a checkpoint is refused."""
    engine = build(folder, FSDPConfig(model_dtype=dtype) if dtype == "bf16" else FP64, head=head)
    try:
        engine.weights.load(out)
    except ValueError as error:
        return str(error)


def in_small_pieces(engine, device_bytes=0):
    """Let an engine step its state in pieces of 4 kB, so that some parameters are divided."""
    place = engine.stepper.optimizer, host_arena(pinned=False), "model_optimizer_state", engine.device
    engine.stepper.on_host = OptimizerStateOnHost(*place, piece_bytes=4096, device_bytes=device_bytes)
    assert len(engine.stepper.on_host.pieces) > len(list(engine.root.parameters()))


def saved_beside_training(folder, strategy, out, offload):
    """Two checkpoints of the same state: one written at once, and one whose writing begins after all that follows could run.

    Meanwhile the engine computes log-probs and begins an update, whose step waits. Returns the update's metrics.
    """
    gc.collect()  # engines of other tests hold blocks under the same names
    fsdp = replace(FP64, param_offload=offload, optimizer_offload=offload)
    engine = build(folder, fsdp, strategy=strategy)
    if offload:
        in_small_pieces(engine)
    for _ in range(2):
        engine.update(share(), ROWS, policy())
    engine.memory.to_host()
    engine.weights.save(out + "/at_once", ALL)
    held_up, was_read = threading.Event(), []
    engine.weights._writer._thread.submit(held_up.wait)
    engine.weights.begin_save(out + "/beside", ALL, in_background=True)
    assert not engine.weights.is_written
    engine.log_probs(share(), ROWS, 1.0)
    engine.memory.to_host()
    # The writer may begin only when the step comes to its wait.
    wait, live_read = engine.stepper._before_step, engine.weights._writer._pending.live_read
    engine.stepper._before_step = lambda: (held_up.set(), wait(), was_read.append(live_read.done()))
    metrics = engine.update(share(), ROWS, policy())
    assert was_read == [True], "the step waits until the state has been read"
    engine.memory.to_host()
    assert not os.path.exists(out + "/beside"), "it appears when it is whole"
    engine.weights.finish_save()
    host = host_arena(pinned=False).holders()
    assert not host.get("model_checkpoint"), "the staging is free again"
    if offload:
        held = sum(each._offloaded.block.nbytes for each in engine.stepper.on_host.offloads)
        assert host["model_optimizer_state"] == held, "the blocks that were lent are free again"
    return metrics


def with_masters(folder, strategy, out, in_background):
    """bf16 weights with fp32 masters: metrics and weights of two updates after a save, and by engines that load it.

    The masters of the engine that saves are split over device and host, as those of the second one; the third one has all on the
    device.
    """
    found = []
    for loads, stays in ((False, SPLIT_BYTES), (True, SPLIT_BYTES), (True, "device")):
        engine = build(folder, FSDPConfig(model_dtype="bf16", optimizer_state=stays), strategy=strategy, lr=1e-5)
        if stays == SPLIT_BYTES:
            in_small_pieces(engine, SPLIT_BYTES)
            assert engine.stepper.on_host.staying and engine.stepper.on_host.pieces
        if loads:
            engine.weights.load(out)
        else:
            engine.update(share(), ROWS, policy())
            engine.weights.begin_save(out, ALL, in_background)
            engine.weights.finish_save()
        assert {value.dtype for state in engine.stepper.optimizer.state.values() for value in state.values()} == {
            torch.float32
        }
        metrics = [engine.update(share(), ROWS, policy()) for _ in range(2)]
        found.append((metrics, weights_of(engine)))
    return found


def widened(folder, out):
    """A checkpoint of bf16 moments without masters, continued by an engine with masters.

    Returns:
        Whether masters equal the weights and moments those that were saved; and what an engine without masters says of the
        checkpoint of one with them.
    """
    narrow = OptimConfig(lr=1e-2, master_weights=False, allow_lossy_updates=True)
    lossy = build(folder, FSDPConfig(model_dtype="bf16"), optim=narrow)
    lossy.update(share(), ROWS, policy())
    lossy.weights.save(out + "/narrow", ALL)
    engine = build(folder, FSDPConfig(model_dtype="bf16", optimizer_state=SPLIT_BYTES), lr=1e-5)
    engine.weights.load(out + "/narrow")
    engine.memory.to_device()
    same = []
    pairs = zip(lossy.root.parameters(), engine.root.parameters(), strict=True)
    for before, after in pairs:
        old, new = lossy.stepper.optimizer.state[before], engine.stepper.optimizer.state[after]
        same += [torch.equal(local(new["master"]), local(before).float())]
        same += [torch.equal(local(new[name]), local(old[name]).float()) for name in ("exp_avg", "exp_avg_sq", "step")]
    engine.memory.to_host()
    engine.update(share(), ROWS, policy())
    engine.weights.save(out + "/masters", ALL)
    try:
        build(folder, FSDPConfig(model_dtype="bf16"), optim=narrow).weights.load(out + "/masters")
    except CheckpointError as error:
        return all(same), str(error)


def damaged(folder, out):
    """What an engine says of a checkpoint that does not fit."""
    engine = build(folder)
    before = weights_of(engine)
    try:
        engine.weights.load(out)
    except CheckpointError as error:
        after = weights_of(engine)
        return str(error), all(torch.equal(before[name], after[name]) for name in before)


def fills_the_disk(folder, out, left_bytes, in_background):
    """The message of a save on a disk that holds an older one and has `left_bytes` more than the tensors need."""
    engine, out = build(folder), Path(out)
    filler, first = out.parent / "filler", dist.get_rank() == 0
    if first:
        filler.unlink(missing_ok=True)
    engine.weights.save(out.parent / "older", ALL)
    tensors_bytes = sum(tensor.nbytes for tensor in engine.root.state_dict().values())
    if first:
        os.truncate(filler, 0) if filler.exists() else filler.touch()
        free_bytes = shutil.disk_usage(out.parent).free
        filler.write_bytes(bytes(free_bytes - tensors_bytes - left_bytes + 4096 * (left_bytes == 0)))
    dist.barrier()
    try:
        engine.weights.begin_save(out, ALL, in_background)
        engine.weights.finish_save()
    except StorageError as error:
        return str(error)
