"""Two hundred steps of varying length, with dropped graphs and exceptions among them: nothing may grow."""

import gc
import random
from collections import Counter

import psutil
import pytest
import torch

from rlx.offload.storage.arena import host_arena
from rlx.offload.storage.disk import extent_files

STEPS, WARM_UP = 200, 50
MIB = 1 << 20


class Interrupt(Exception):
    """Raised in the middle of a step."""


class Soak:
    """A model that trains step by step, each step of another kind and length."""

    def __init__(self, toys, device, longest):
        self.toys = toys
        self.device = device
        self.longest = longest
        self.model = toys.stack(lambda: toys.attend(64, dropout=0.1, attention_dropout=0.1), blocks=3, width=64).to(
            device
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.lengths = random.Random(0)

    def loss(self, number):
        # The longest come in the warm-up, so that reserved memory may not grow after it.
        length = self.longest if number % 25 == 0 else self.lengths.randint(1, self.longest)
        return self.model(self.toys.tokens(2, length, 64, seed=number).to(self.device))

    def step(self, number):
        loss = self.loss(number)
        if number % 10 == 3:
            return  # never comes to backward
        if number % 10 == 5:
            torch.autograd.grad(loss, self.model.layers[2].v.weight)  # the layers below it do not
            return
        if number % 10 == 7:
            loss.backward(retain_graph=True)
        if number % 10 == 8:
            self.interrupted(number)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def interrupted(self, number):
        def raises(*_):
            raise Interrupt

        place = ("q", "o", "mlp.up")[number // 10 % 3]
        hook = self.model.layers[1].get_submodule(place).register_forward_pre_hook(raises)
        try:
            self.loss(number)
        except Interrupt:
            pass
        finally:
            hook.remove()


def objects():
    """How many objects of each class of the engine there are, and tensors, and all that Python collects.

    Not counted are the arena's own, which follow from how its free ranges lie.
    """
    gc.collect()
    alive = gc.get_objects()
    ours = Counter(str(type(found)) for found in alive if str(type(found).__module__).startswith("rlx.offload"))
    ours = {name: count for name, count in ours.items() if ".arena." not in name and ".ranges." not in name}
    tensors = sum(issubclass(type(found), torch.Tensor) for found in alive)
    return ours, tensors, len(alive)


def soak(toys, enable, mode, device, longest, figures):
    """Run the steps; `figures()` after the warm-up and at the end, with the engine's objects and the arena's state."""
    run = Soak(toys, device, longest)
    handle = enable(run.model, **mode)
    seen = []
    objects()  # asking for the class of everything fills caches of abstract classes, an entry for each class there is
    for number in range(STEPS + 1):
        if number in (WARM_UP, STEPS):
            for file in extent_files():
                file.drain()
            assert handle.stats().held_bytes == 0
            arenas = [(arena.reserved_bytes, arena.allocations) for arena in (host_arena(False), host_arena(True))]
            files = handle.stats().disk_reserved_bytes
            seen.append((arenas, files, objects(), figures()))
        run.step(number)
    (arenas, files, before, figures_before), (arenas_now, files_now, after, figures_now) = seen
    assert arenas_now == arenas
    assert files_now == files
    assert after[0] == before[0]  # Slots, calls, offloaded ranges
    assert after[1] - before[1] < 32  # the arena keeps some in its free blocks
    assert after[2] - before[2] < 50
    return figures_before, figures_now


@pytest.mark.slow
@pytest.mark.parametrize("mode", [("attention", "disk")], ids="-".join, indirect=True)
def test_nothing_grows(toys, enable, mode):
    process = psutil.Process()
    before, after = soak(toys, enable, mode, "cpu", 96, lambda: process.memory_info().rss)
    assert after - before < 6 * MIB  # the inputs of the layers, leaked in each step, would be 11
