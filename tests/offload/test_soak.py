"""Two hundred steps of varying length, with dropped graphs and exceptions among them: nothing may grow."""

import contextlib
import gc
import random
from collections import Counter

import psutil
import pytest
import torch

from rlx.offload.storage.arena import host_arena
from rlx.offload.storage.disk import extent_files

STEPS, WARM_UP, LONGEST = 200, 50, 96
MIB = 1 << 20


class Soak:
    """A model that trains step by step, each step of another kind and length."""

    def __init__(self, toys):
        self.toys = toys
        self.model = toys.stack(lambda: toys.attend(64, dropout=0.1, attention_dropout=0.1), blocks=3, width=64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.lengths = random.Random(0)

    def loss(self, number):
        # The longest come in the warm-up, so that reserved memory may not grow after it.
        length = LONGEST if number % 25 == 0 else self.lengths.randint(1, LONGEST)
        return self.model(self.toys.tokens(2, length, 64, seed=number))

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
            place = ("q", "o", "mlp.up")[number // 10 % 3]
            hook = self.model.layers[1].get_submodule(place).register_forward_pre_hook(lambda *_: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                self.loss(number)
            hook.remove()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


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


@pytest.mark.slow
def test_nothing_grows(toys, enable, tmp_path):
    run, process, seen = Soak(toys), psutil.Process(), []
    handle = enable(run.model, True, save="attention", tier="disk", directory=str(tmp_path))
    objects()  # asking for the class of everything fills caches of abstract classes, an entry for each class there is
    for number in range(STEPS + 1):
        if number in (WARM_UP, STEPS):
            for file in extent_files():
                file.drain()
            assert handle.stats().held_bytes == 0
            arenas = [(arena.reserved_bytes, arena.allocations) for arena in (host_arena(False), host_arena(True))]
            reserved = arenas, handle.stats().disk_reserved_bytes
            seen.append((reserved, objects(), process.memory_info().rss))
        run.step(number)
    (reserved, (ours, tensors, everything), resident), (reserved_now, now, resident_now) = seen
    assert reserved_now == reserved
    assert now[0] == ours  # slots, calls, offloaded ranges
    assert now[1] - tensors < 32  # the arena keeps some in its free blocks
    assert now[2] - everything < 50
    assert resident_now - resident < 6 * MIB  # the inputs of the layers, leaked in each step, would be 11
