"""Updates of engines with `save=auto` in which a layer runs out of memory."""

import logging

import torch
import torch.distributed as dist
from rank_tools import build, make_batch, own_share, policy, weights_of

from rlx.config.schema import ActivationOffloadConfig
from rlx.engine import oom_retry
from rlx.engine.micro_batch import MicroBatchRule
from rlx.engine.objectives import totals_of

PLENTY = 1 << 40
RULE = MicroBatchRule(rows=3)


class Layer:
    """Hooks of a layer: noise from the random generator, and out of memory where asked for."""

    def __init__(self, engine, where=None, times=1):
        self.engine, self.where, self.times = engine, where, times
        self.peaks = []  # that the plans of all passes have predicted
        self.is_armed = self.is_backward = False
        first, last = engine.sharded.units[1].module, engine.sharded.units[-1].module
        first.mlp.register_forward_hook(self.disturb)
        engine.root.register_forward_pre_hook(lambda *_: self.note(False))
        last.register_forward_hook(self.await_backward)

    def note(self, is_backward):
        self.is_backward = is_backward

    def await_backward(self, module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: self.note(True))

    def disturb(self, module, args, output):
        self.peaks.append(plan.prediction.peak_bytes if (plan := self.engine.offload.plan()) else 0)
        self.fail("recomputation" if self.is_backward else "forward")
        output = output * (1 + 0.1 * torch.randn_like(output))
        if output.requires_grad:
            output.register_hook(lambda gradient: self.fail("backward"))
        return output

    def fail(self, here):
        if self.is_armed and here == self.where and self.times:
            self.times -= 1
            raise torch.OutOfMemoryError(f"out of memory in {here}. Tried to allocate 1 GiB")


def enable(folder, strategy, budget=PLENTY):
    options = ActivationOffloadConfig(save="auto", min_bytes=0, max_device_bytes=budget)
    return build(folder, strategy=strategy, model={"enable_activation_offload": True, "activation_offload": options})


def share():
    return own_share(make_batch(), (8,) if dist.get_world_size() == 1 else (5, 3))


def repeated(folder, strategy, where, budget, failing, times=1):
    """Weights after four updates, the fourth of which fails on some ranks, against undisturbed ones; and what was said."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rlx.engine.oom_retry").addHandler(handler)
    found, peaks = [], []
    for disturbed in (False, True):
        torch.manual_seed(dist.get_rank())
        engine = enable(folder, strategy, budget)
        layer = Layer(engine, where, times)
        for number in range(5):
            layer.is_armed = disturbed and number == 3 and dist.get_rank() in failing
            layer.peaks.clear()
            try:
                metrics = engine.update(share(), RULE, policy())
            except torch.OutOfMemoryError as error:
                return str(error)
        peaks.append(max(layer.peaks))
        found.append((metrics, weights_of(engine), torch.get_rng_state()))
    logging.getLogger("rlx.engine.oom_retry").removeHandler(handler)
    (metrics, weights, state), (metrics_then, weights_then, state_then) = found
    is_equal = metrics == metrics_then and torch.equal(state, state_then)
    is_equal = is_equal and all(torch.equal(weights[name], weights_then[name]) for name in weights)
    return is_equal, peaks, said


def behind_the_last_collective(folder):
    """The passes of one rank fail when they are done; those of the other do not."""
    engine = enable(folder, "fsdp2")
    runs = []

    def passes():
        runs.append(engine._passes(parts, policy(), totals))
        if len(runs) == 1 and dist.get_rank() == 0 and len(counts) == 3:
            raise torch.OutOfMemoryError("late. Tried to allocate 1 GiB")
        return runs[-1]

    engine.root.train()
    own, counts = share(), []
    for _ in range(4):
        parts = list(engine.cutter.micro_batches(own, RULE))
        totals = totals_of(own, policy(), engine.cutter.copies, engine.device)
        runs.clear()
        engine._oom_retry.run(passes)
        counts.append(len(runs))
        engine._step(engine.optimizer, engine.optim)
    return counts


def out_of_reach(folder):
    """One rank fails while the other waits for it in a collective."""
    engine = enable(folder, "fsdp2")
    oom_retry.PEERS_WAIT_S = 0.5

    def passes():
        if dist.get_rank() == 0:
            raise torch.OutOfMemoryError("early. Tried to allocate 1 GiB")
        dist.barrier()

    try:
        engine._oom_retry.run(passes)
    except RuntimeError as error:
        if dist.get_rank() == 0:
            dist.barrier()
        return type(error).__name__, str(error)
    finally:
        oom_retry.PEERS_WAIT_S = 120.0
