"""Each mode: tensors on one storage that do not share a version counter, as `torch.unsafe_chunk` and `nn.GRU` make them."""

import pytest
import torch
from torch import nn


def parts_written_before_attention(m, x):
    q, k, v = (part.mul_(by) for part, by in zip(m.qkv(x).unsafe_chunk(3, -1), (0.5, 0.7, 1.1), strict=True))
    return x + m.o(m.attend(q, k, v))


def parts_written_and_read_in_turn(m, x):
    first, second = torch.unsafe_chunk(m.up(x), 2, -1)
    first.mul_(0.5).tanh_()
    y = first * first.exp()
    second.mul_(0.3).tanh_()
    return x + y * second * second.exp()


def parts_of_the_output_projection(m, x):
    first, second = m.o(m.attend(m.q(x), m.k(x), m.v(x))).unsafe_split_with_sizes([4, 12], -1)
    first.mul_(3.0).tanh_()
    return x + torch.cat([first, second], -1)


LAYERS = (parts_written_before_attention, parts_written_and_read_in_turn, parts_of_the_output_projection)


@pytest.mark.parametrize("layer", LAYERS)
def test_parts_that_do_not_know_of_each_others_writes(compare_layer, saving, layer):
    compare_layer(layer, **saving)


def test_a_recurrent_layer(compare, toys, mode):
    def forward(self, x):
        return x + self.lin(self.gru(x)[0])

    model = toys.of(forward, width=16)
    for block in model.layers:
        block.gru = nn.GRU(16, 16, batch_first=True)
    compare(model, toys.read, **mode)


def test_halves_as_inputs_of_layers(compare, toys, every_mode):
    def step(model):
        x = model.embed(toys.tokens())
        for layer in model.layers:
            first, second = torch.cat([x, 2 * x], -1).unsafe_chunk(2, -1)
            first.mul_(0.5)
            first = layer(first)
            second.mul_(0.3)
            x = first + layer(second)
        return model.head(x).sum()

    compare(toys.stack(lambda: toys.block(16), width=16), step, **every_mode)


def test_aliases_that_nobody_has_written_to_are_copied_once(compare, toys):
    """flash-attn saves detached parts of one fused projection."""

    class Parts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, qkv):
            q, k, v = (part.detach() for part in qkv.chunk(3, -1))
            ctx.save_for_backward(q, k, v)
            return q * k * v

        @staticmethod
        def backward(ctx, grad):
            q, k, v = ctx.saved_tensors
            return torch.cat([grad * k * v, grad * q * v, grad * q * k], -1)

    model = toys.stack(lambda: toys.kit(lambda m, x: x + Parts.apply(m.qkv(x))), blocks=1, width=16)
    x = toys.tokens(rows=1)
    stats = compare(model, lambda model: model(x), enable_ckpt=False, save="all")
    assert stats.offloaded_bytes == 4 * x.nbytes  # the layer's input and one projection, three times as wide
