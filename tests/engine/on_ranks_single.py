"""What test_single.py runs in one process."""

import contextlib
import dataclasses
from pathlib import Path

import torch
from rank_tools import FP64, ROWS, Gradients, build, make_batch, policy, weights_of

from rlx.checkpoint.tensors import load_all
from rlx.config.schema import MixedPrecisionConfig
from rlx.engine.micro_batches import MicroBatchRule


def both(folder: str, stored: str, compute: str, rows: int, model: dict) -> list:
    """Return log-probs, metrics, gradients and weights of two updates, without FSDP2 and with it."""
    mixed = MixedPrecisionConfig(param_dtype=compute, reduce_dtype="fp32")
    found = []
    for reshards in ("auto", True):
        fsdp = dataclasses.replace(FP64, model_dtype=stored, mixed_precision=mixed, reshard_after_forward=reshards)
        engine = build(folder, fsdp, model=model)
        gradients, batch = Gradients(engine), make_batch()
        metrics = [engine.update(batch, MicroBatchRule(rows=rows), policy()) for _ in range(2)]
        log_probs = engine.log_probs(batch, ROWS, 1.0)["log_probs"]
        found.append((type(engine.sharded).__name__, log_probs, metrics, gradients.seen, weights_of(engine)))
    return found


def kinds(folder: str, settings: list[dict]) -> list[str]:
    """Return what holds the model in one process, with these settings of FSDP."""
    fp32 = dataclasses.replace(FP64, model_dtype="fp32")
    return [type(build(folder, dataclasses.replace(fp32, **each)).sharded).__name__ for each in settings]


def wide_norms(folder: str, stored: str) -> list[torch.Tensor]:
    """Return gradients of a row in one micro-batch, and of the row twice in two; some weights are multiplied with fp32."""
    mixed = MixedPrecisionConfig(param_dtype="bf16")
    engine = build(folder, dataclasses.replace(FP64, model_dtype=stored, mixed_precision=mixed), lr=0.0)
    for unit in engine.sharded.units[1:]:
        norm = unit.module.self_attn.q_norm
        norm.forward = lambda x, norm=norm: (norm.weight * x.float()).to(x.dtype)
    gradients, batch = Gradients(engine), make_batch(4)
    for rows in ([0], [0, 0]):
        engine.update(batch.rows(rows), MicroBatchRule(rows=1), policy())
    return gradients.seen


def interrupted(folder: str, checkpoint: str) -> tuple[set[torch.dtype], bool]:
    """Return of an engine whose backward and forward failed: the types that it saves, and whether its updates are as usual."""
    mixed = MixedPrecisionConfig(param_dtype="bf16")
    fsdp = dataclasses.replace(FP64, model_dtype="fp32", mixed_precision=mixed)
    engine, usual = build(folder, fsdp), build(folder, fsdp)
    batch, norm = make_batch(), engine.sharded.units[2].module.input_layernorm
    hooks = [
        lambda: norm.register_forward_hook(lambda *_: 1 / 0),
        lambda: norm.register_full_backward_hook(lambda *_: 1 / 0),
    ]
    for add in hooks:
        hook = add()
        with contextlib.suppress(ZeroDivisionError):
            engine.update(batch, ROWS, policy())
        hook.remove()
    hook = norm.register_forward_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        engine.log_probs(batch, ROWS, 1.0)
    hook.remove()
    engine.weights.save(checkpoint, ("model",))
    saved = load_all(Path(checkpoint) / "model").values()
    return {x.dtype for x in saved}, engine.update(batch, ROWS, policy()) == usual.update(batch, ROWS, policy())


def own_memory(folder: str) -> list[bool]:
    """Return whether torch can free each parameter's memory."""
    engine = build(folder, dataclasses.replace(FP64, model_dtype="fp32"))  # as in the file
    return [parameter.untyped_storage().resizable() for parameter in engine.root.parameters()]


def wide_inputs(folder: str) -> list[set[torch.dtype]]:
    """Return the types that layers get from an embedding that widens its result, without FSDP2 and with it."""
    found = []
    for reshards in ("auto", True):
        mixed = MixedPrecisionConfig(param_dtype="bf16")
        fsdp = dataclasses.replace(FP64, model_dtype="fp32", mixed_precision=mixed, reshard_after_forward=reshards)
        engine = build(folder, fsdp)
        seen: set[torch.dtype] = set()
        engine.root.get_input_embeddings().register_forward_hook(lambda own, args, output: output.float())
        for unit in engine.sharded.units[1:]:
            norm = unit.module.input_layernorm
            norm.register_forward_pre_hook(lambda own, args, seen=seen: seen.add(args[0].dtype))
        engine.log_probs(make_batch(), ROWS, 1.0)
        found.append(seen)
    return found
