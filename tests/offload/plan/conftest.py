"""A decoder layer with the proportions of a real one, in units in which its forward takes one second."""

from dataclasses import replace

import pytest

from rlx.offload.plan.costs import LayerCost, Operation


@pytest.fixture(scope="session")
def decoder_layer():
    """`decoder_layer(attention=0.2)`: cost of a layer whose attention takes that share of forward; 10 bytes are one input."""

    def cost(attention=0.2):
        linear = 1 - attention - 0.1
        shares = {"q": 0.08, "k": 0.02, "v": 0.02, "attention": attention, "o": 0.08, "gate": 0.27, "up": 0.27}
        sizes = {"q": 10, "k": 2, "v": 2, "attention": 10, "o": 10, "gate": 50, "up": 50}
        operations, at = [], 0.0
        for name, share in shares.items():
            seconds = share if name == "attention" else share * linear
            at += seconds
            operations.append(Operation(name, at, seconds, sizes[name]))
        down = 0.26 * linear
        whole = LayerCost(1.0, 2.1, 1 - down, 10, 300, 430, 180)
        return replace(whole, operations=tuple(replace(op, at=op.at / (at + down + 0.1)) for op in operations))

    return cost
