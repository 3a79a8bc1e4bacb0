"""The engine's methods, one by one."""

import dataclasses
import gc
from collections import Counter

import torch
import torch.distributed as dist
from rank_tools import FP64, ROWS, SPLIT_BYTES, Gradients, P, build, make_batch, own_share, policy, value, weights_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlx.config.schema import FSDPConfig, MixedPrecisionConfig, ModelConfig
from rlx.engine.fsdp_units import local, whole
from rlx.engine.micro_batches import MicroBatch, MicroBatchRule
from rlx.engine.objectives import totals_of
from rlx.engine.optimizer_state import OptimizerStateOnHost
from rlx.models.loading import load_model
from rlx.models.lora import adapters_off
from rlx.offload import host_arena


def per_token(folder, strategy, shares):
    """log_probs, entropy and values of this rank's share in order, cut by tokens."""
    cut = MicroBatchRule(tokens=20)
    share = own_share(make_batch(), shares)
    found = build(folder, strategy=strategy, optim=None).log_probs(share, cut, temperature=0.7)
    return found | {"values": build(folder, strategy=strategy, optim=None, head="value").values(share, cut)}


def naive_per_token(folder):
    """The same from each row alone, whole and without padding."""
    batch = make_batch()
    found = {
        name: torch.zeros(batch["response_mask"].shape, dtype=torch.float64)
        for name in ("log_probs", "entropy", "values")
    }
    for head in ("lm", "value"):
        model = load_model(ModelConfig(path=folder), head, torch.float64)
        for row, (ids, real) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
            length = int(real[P:].sum())
            with torch.no_grad():
                said = model(input_ids=ids[real][None]).logits[0, int(real[:P].sum()) - 1 :][:length]
            if head == "value":
                found["values"][row, :length] = said[:, 0]
                continue
            every = (said / 0.7).log_softmax(-1)
            found["log_probs"][row, :length] = every.gather(-1, ids[real][-length:, None])[:, 0] if length else 0
            found["entropy"][row, :length] = -(every.exp() * every).sum(-1)
    return found


def weights_and_names(folder, strategy, head):
    """The stream of a fresh engine, of a trained one, and the model that was loaded."""
    engine = build(folder, strategy=strategy, head=head)
    fresh = list(engine.weights.full())
    objective = {"lm": policy, "value": value}[head]()
    engine.update(own_share(make_batch(), shares_for_world()), ROWS, objective)
    model = load_model(ModelConfig(path=folder), head, torch.float64)
    return fresh, weights_of(engine), model.state_dict(), [name for name, _ in model.named_parameters()]


def exported(folder, strategy):
    """After an update: log-probs of this rank's share, and those that a plain model with the exported weights gives."""
    engine = build(folder, strategy=strategy)
    share = own_share(make_batch(), shares_for_world())
    for _ in range(2):
        engine.update(share, ROWS, policy())
    trained = engine.log_probs(share, ROWS, temperature=1.0, with_entropy=False)["log_probs"]
    model = load_model(ModelConfig(path=folder), "lm", torch.float64)
    model.load_state_dict(weights_of(engine), strict=False)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    plain = build(folder, strategy=strategy, optim=None)
    expected = torch.zeros_like(trained)
    for row, (ids, real) in enumerate(zip(share["input_ids"], share["attention_mask"], strict=True)):
        length = int(real[P:].sum())
        with torch.no_grad():
            every = model(input_ids=ids[real][None]).logits[0, int(real[:P].sum()) - 1 :][:length].log_softmax(-1)
        expected[row, :length] = every.gather(-1, ids[real][-length:, None])[:, 0] if length else 0
    untrained = plain.log_probs(share, ROWS, temperature=1.0, with_entropy=False)["log_probs"]
    return trained, expected, untrained


def gathered(shapes):
    """Tensors of these shapes; each from its shards, which are over all processes; and from one that each process has."""
    tensors = [torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) for shape in shapes]
    plain = init_device_mesh("cpu", (dist.get_world_size(),))
    hybrid = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    ways = [(plain, [Shard(0)]), (hybrid, [Replicate(), Shard(0)])]
    shards = [[distribute_tensor(tensor, *way) for way in ways] for tensor in tensors]
    for each in shards:
        assert whole(each[1]).data_ptr() != each[1].to_local().data_ptr()
    return tensors, [[whole(one) for one in each] for each in shards]


class _Names(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen[operation.name()] += 1
        return operation(*args, **(kwargs or {}))


def operations_of_the_stream(folder):
    """Names of the operations that give the weights."""
    engine = build(folder, optim=None)
    with _Names() as names:
        for _ in engine.weights.full():
            pass
    return names.seen


def shares_for_world():
    return (8,) if dist.get_world_size() == 1 else (5, 3)


def trained(folder, strategy, steps=2, fsdp=None, model=None):
    """Losses, gradients and weights of some updates."""
    engine = build(folder, dataclasses.replace(FP64, **(fsdp or {})), strategy, model=model)
    gradients = Gradients(engine)
    share = own_share(make_batch(), shares_for_world())
    metrics = [engine.update(share, MicroBatchRule(rows=3), policy()) for _ in range(steps)]
    return metrics, gradients.seen, weights_of(engine), engine.memory.stats()


def non_finite_step(folder, strategy):
    """A step whose loss is NaN on the last rank only, then a usual one; and the same without the bad one, one step later."""
    split = dataclasses.replace(FP64, optimizer_state=SPLIT_BYTES)
    engine, other = build(folder, split, strategy), build(folder, strategy=strategy)
    other.stepper.updates = 1
    good = own_share(make_batch(), shares_for_world())
    bad = good
    if dist.get_rank() == dist.get_world_size() - 1:
        bad = good.with_(advantages=torch.full_like(good["advantages"], torch.nan))
    before = weights_of(engine)
    first = engine.update(bad, ROWS, policy())
    between = weights_of(engine)
    second, alone = engine.update(good, ROWS, policy()), other.update(good, ROWS, policy())
    return first, second, alone, before, between, weights_of(engine), weights_of(other)


def clipped(folder, strategy):
    """Gradients before and after clipping to norm 0.01."""
    free, bound = build(folder, strategy=strategy), build(folder, strategy=strategy, grad_clip=0.01)
    seen = [Gradients(engine) for engine in (free, bound)]
    share = own_share(make_batch(), shares_for_world())
    metrics = [engine.update(share, ROWS, policy()) for engine in (free, bound)]
    return metrics, [gradients.seen[0] for gradients in seen]


def offloaded(folder, strategy, fsdp, model, checkpoint_folder):
    """Three cycles of log-probs, rest, update and rest, the last from a checkpoint, with all offloaded at rest and without.

    Returns:
        For both: metrics and weights; of the offloaded one: who holds how much of the arena, at first and after each cycle,
        the arena's size after each cycle, and the bytes of parameters with state, and of gradients, after each cycle.
    """
    results, arena = [], host_arena(False)
    for offloads in (False, True):
        flags = dataclasses.replace(FP64, param_offload=offloads, optimizer_offload=offloads, **fsdp)
        engine = build(folder, flags, strategy, model=model, name="actor")
        if offloads:  # several pieces
            engine.stepper.on_host = OptimizerStateOnHost(
                engine.stepper.optimizer, arena, "actor_optimizer_state", engine.device, piece_bytes=20_000
            )
        gradients = []
        engine.stepper.optimizer.register_step_pre_hook(
            lambda *_, root=engine.root, seen=gradients: seen.extend(
                local(p.grad).untyped_storage() for p in root.parameters() if p.grad is not None
            )
        )
        share = own_share(make_batch(), shares_for_world())
        engine.memory.to_host()
        engine.memory.to_host()  # a second rest changes nothing
        arena.trim()
        metrics, holders, room, left = [], [arena.holders()], [], []
        for cycle in range(3):
            engine.log_probs(share, ROWS, 1.0)
            if strategy == "fsdp2" and dist.get_world_size() > 1:
                assert all(isinstance(p, DTensor) for p in engine.root.parameters()), (
                    "log_probs has left parameters gathered"
                )
            engine.memory.to_host()
            metrics.append(engine.update(share, ROWS, policy()))
            # What FSDP2 keeps no reference to is gone, but for this one.
            kept = sum(storage.nbytes() for storage in gradients) if strategy == "fsdp" else 0
            if cycle == 1:
                engine.weights.save(f"{checkpoint_folder}/{strategy}-{offloads}", ("model", "optimizer"))
                engine.weights.load(f"{checkpoint_folder}/{strategy}-{offloads}")
            engine.memory.to_host()
            holders.append(arena.holders())
            room.append((arena.reserved_bytes, arena.allocations))
            state = [x for s in engine.stepper.optimizer.state.values() for name, x in s.items() if name != "step"]
            tensors = [local(tensor).untyped_storage() for tensor in (*engine.root.parameters(), *state)]
            left.append([sum(storage.nbytes() for storage in tensors), kept])
            gradients.clear()
        results.append((metrics, weights_of(engine)))
        del engine
        gc.collect()
    return results, holders, room, left


def reference(folder, strategy, lora):
    """Log-probs of a separate reference and of a trained policy with its adapters off, with them, and off once more."""
    engine = build(folder, strategy=strategy, model={"lora_rank": 2, "lora": lora})
    share = own_share(make_batch(), shares_for_world())

    def log_probs(of):
        return of.log_probs(share, ROWS, 0.7, with_entropy=False)["log_probs"]

    with adapters_off(engine.root):
        untrained = log_probs(engine)
    for _ in range(2):
        engine.update(share, ROWS, policy())
    with adapters_off(engine.root):
        off = log_probs(engine)
    return log_probs(build(folder, strategy=strategy, optim=None)), off, log_probs(engine), untrained


def small_updates_on_bf16(folder, rows):
    """Types of what is trained, its gradients and moments; the share of A that two steps of lr 1e-6 change; the base's types."""
    engine = build(folder, FSDPConfig(model_dtype="bf16"), lr=1e-6, model={"lora_rank": 2})
    share = own_share(make_batch(), shares_for_world())
    before = dict(engine.weights.adapters())
    gradients = set()
    engine.stepper.optimizer.register_step_pre_hook(lambda *_: gradients.update(local(p.grad).dtype for p in trained()))

    def trained():
        return [p for p in engine.root.parameters() if p.requires_grad]

    for _ in range(2):
        engine.update(share, MicroBatchRule(rows=rows), policy())
    after = dict(engine.weights.adapters())
    of_a = [(before[name] != after[name]).double().mean().item() for name in before if "lora_A" in name]
    types = {p.dtype for p in trained()} | gradients
    types |= {local(state["exp_avg"]).dtype for state in engine.stepper.optimizer.state.values()}
    return types, min(of_a), {p.dtype for p in engine.root.parameters() if not p.requires_grad}


def weights_are_copies(folder: str) -> list[bool]:
    """Whether streamed weights have memory of their own, with all of each shard on every process (fsdp_size=1)."""
    engine = build(folder, dataclasses.replace(FP64, fsdp_size=1))
    own = {local(p).untyped_storage().data_ptr() for p in engine.root.parameters()}
    return [tensor.untyped_storage().data_ptr() not in own for _, tensor in engine.weights.full()]


def sums_over_micro_batches(folder: str, strategy: str, reduce_dtype: str) -> tuple[torch.dtype, bool, float]:
    """Return the type of the summed gradients, whether they equal the sum of the gradients of each micro-batch in this type,
    and the error of the sum in bf16 relative to them.
    """
    precision = MixedPrecisionConfig(reduce_dtype=reduce_dtype)
    engine = build(folder, FSDPConfig(model_dtype="bf16", mixed_precision=precision), strategy)
    engine.root.train()
    objective, batch = policy(), make_batch(24)
    totals = totals_of(batch, objective, engine.batcher.copies, engine.device)
    parts = list(engine.batcher.micro_batches(batch, MicroBatchRule(rows=1)))

    def gradient(chosen: list[MicroBatch]) -> torch.Tensor:
        engine._passes(chosen, objective, totals)
        flat = torch.cat([local(p.grad).flatten() for p in engine.root.parameters() if p.grad is not None])
        engine.sharded.drop_gradients(engine.stepper.optimizer)
        return flat.clone()

    each = [gradient([part]) for part in parts]
    summed = gradient(parts)
    expected, narrow = each[0].to(summed.dtype), each[0].clone()
    for one in each[1:]:
        expected, narrow = expected + one, narrow + one
    return summed.dtype, torch.equal(summed, expected), ((narrow - summed).norm() / summed.norm()).item()


def scores(folder, strategy, shares):
    """This rank's scores, cut by rows and by tokens, with the parameters offloaded in between."""
    engine = build(folder, strategy=strategy, head="score", optim=None, model={"enable_gradient_checkpointing": False})
    share = own_share(make_batch(), shares)
    found = [engine.scores(share, MicroBatchRule(rows=3))]
    engine.memory.to_host()
    return [*found, engine.scores(share, MicroBatchRule(tokens=20))]


def in_tiles(folder, strategy, model):
    """Log-probs, gradient norms of two updates, weights after them and all-gathers of the second."""
    engine = build(folder, FP64, strategy, model=model)
    share = own_share(make_batch(), (8,) if dist.get_world_size() == 1 else (5, 3))
    micro = MicroBatchRule(rows=3)
    before = engine.log_probs(share, micro, 1.0)["log_probs"]
    first = engine.update(share, micro, policy())
    with _Names() as names:
        second = engine.update(share, micro, policy())
    gathers = sum(count for name, count in names.seen.items() if "allgather" in name.replace("_", ""))
    return before, (first["grad_norm"], second["grad_norm"]), weights_of(engine), gathers


def collectives(folder, fsdp, head, model):
    """Counts of the operations of an update in four micro-batches, its metrics and gradients."""
    engine = build(folder, dataclasses.replace(FP64, **fsdp), head=head, model=model)
    gradients, share = Gradients(engine), own_share(make_batch(), (4, 4))
    with _Names() as names:
        metrics = engine.update(share, MicroBatchRule(rows=1), value() if head == "value" else policy())
    return names.seen, metrics, gradients.seen
