from itertools import pairwise

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rlx.models.packed_attention import LONG_TOKENS, packed_attention
from rlx.models.packed_attention import _attention as transformers_attention
from rlx.models.prefix_tree import Tree

STARTS = [0, 1, 9, 14]


def tensors(dtype=torch.float64, device="cpu", starts=STARTS, heads=4, key_heads=2, width=8, value_width=8):
    source = torch.Generator().manual_seed(0)
    shapes = (heads, width), (key_heads, width), (key_heads, value_width)
    made = [torch.randn(1, h, starts[-1], w, generator=source, dtype=torch.float64) for h, w in shapes]
    return [x.to(device, dtype).requires_grad_() for x in made]


def by_hand(query, key, value, starts, window, scaling):
    """The definition: softmax over the scores that are not masked, all sequences in one matrix."""
    tokens = torch.arange(query.shape[2], device=query.device)
    sequence = torch.bucketize(tokens, torch.tensor(starts, device=query.device), right=True)
    behind = tokens[:, None] - tokens
    seen = (sequence[:, None] == sequence) & (behind >= 0) & (behind < (window or len(tokens)))
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("value_width", [8, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_like_the_definition_with_gradients(window, value_width):
    inputs = tensors(value_width=value_width)
    starts = torch.tensor(STARTS, dtype=torch.int32)
    got = packed_attention(*inputs, starts, Tree([1, 8, 5]), scaling=0.3, window=window)
    expected = by_hand(*inputs, STARTS, window, 0.3)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad((x * expected.detach()).sum(), inputs) for x in (got, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("starts", [[0, 9], STARTS, None])
def test_models_get_contiguous_results(starts, window):
    """AFMoE, for example, looks at them as (B, T, H * D)."""
    inputs = tensors(starts=starts or [0, 9])
    packed = {}
    if starts:
        lengths = [stop - start for start, stop in pairwise(starts)]
        packed = {"cu_seq_lens_q": torch.tensor(starts, dtype=torch.int32), "sequence_tree": Tree(lengths)}
    output, _ = transformers_attention(torch.nn.Module(), *inputs, None, sliding_window=window, **packed)
    assert output.is_contiguous() and output.shape[1] == inputs[0].shape[2]


class Seen(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def test_it_is_one_function_to_who_watches():
    with Seen() as mode:
        mode.functions = []
        packed_attention(*tensors(), torch.tensor(STARTS, dtype=torch.int32), Tree([1, 8, 5]))
    assert mode.functions[-1] is packed_attention


@pytest.mark.gpu
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("window", "starts", "by_kernel"),
    [
        (None, [0, 1, 300, 301, 812, 1000], True),
        (64, [0, 1, 300, 301, 812, 1000], True),
        (64, [0, 2 * LONG_TOKENS], True),
        (None, [0, 100], False),
        (None, [0, LONG_TOKENS, 2 * LONG_TOKENS], False),
        (None, [0, LONG_TOKENS - 7, 2 * LONG_TOKENS + 9], True),
    ],
)
def test_kernels_are_near_the_definition(window, starts, by_kernel, key_heads, dtype):
    inputs = tensors(dtype, "cuda", starts, heads=8, key_heads=key_heads, width=64, value_width=64)
    lengths = Tree([b - a for a, b in pairwise(starts)])
    at = torch.tensor(starts, dtype=torch.int32, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = packed_attention(*inputs, at, lengths, scaling=0.125, window=window)
    assert any("varlen" in event.key for event in profile.key_averages()) == by_kernel
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = by_hand(*exact, starts, window, 0.125)
    close = 4 * torch.finfo(dtype).eps
    assert (got - expected).norm() <= close * expected.norm()
    weights = torch.randn_like(expected)
    grads = [torch.autograd.grad((x * weights).sum(), of) for x, of in ((got.double(), inputs), (expected, exact))]
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= close * b.norm()
