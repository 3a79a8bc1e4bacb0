"""Attention over a tree against the definition: every sequence in a row of its own, all scores in one matrix."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlx.models import tree_attention as attention
from rlx.models.prefix_tree import ROOT, Tree
from rlx.models.tree_attention import CpuFlash, CudaFlash, CudnnFlash, tree_attention

TREES = {
    "a prompt and its responses": ([5, 3, 1, 6], [ROOT, 0, 0, 0]),
    "two groups and a row alone": ([4, 2, 3, 1, 5, 7], [ROOT, ROOT, 0, 0, 1, ROOT]),
    "turns that fork deeper": ([3, 2, 4, 1, 5, 2, 6], [ROOT, 0, 0, 1, 1, 3, 2]),
    "children before their aunts": ([2, 3, 4, 5], [ROOT, 0, 1, 0]),
    "rows alone": ([3, 4], [ROOT, ROOT]),
}


def tensors(tokens, value_width=8, heads=4, key_heads=2, width=8, dtype=torch.float64, device="cpu", by_heads=False):
    source = torch.Generator().manual_seed(0)
    shapes = (heads, width), (key_heads, width), (key_heads, value_width)
    made = [torch.randn(1, tokens, h, w, generator=source, dtype=torch.float64) for h, w in shapes]
    laid = [x.to(device, dtype).transpose(1, 2) for x in made]
    return [(x.contiguous() if by_heads else x).requires_grad_() for x in laid]


def by_hand(query, key, value, tree, window, scaling):
    """The definition, for each segment with the keys of its path."""
    bounds, results = list(pairwise(tree.starts)), []
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    for segment, (first, stop) in enumerate(bounds):
        path = [slice(*bounds[each]) for each in (*tree.ancestors(segment), segment)]
        k, v = (torch.cat([x[:, :, part] for part in path], dim=2) for x in (key, value))
        behind = torch.arange(k.shape[2] - (stop - first), k.shape[2])[:, None] - torch.arange(k.shape[2])
        seen = ((behind >= 0) & (behind < (window or k.shape[2]))).to(query.device)
        scores = (query[:, :, first:stop] @ k.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
        results.append(scores.softmax(-1) @ v)
    return torch.cat(results, dim=2).transpose(1, 2)


def agree(inputs, tree, window=None):
    got = tree_attention(*inputs, tree, scaling=0.3, window=window)
    expected = by_hand(*inputs, tree, window, 0.3)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    grads = [torch.autograd.grad((x * weights).sum(), inputs) for x in (got, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("copied", [0, 3])
@pytest.mark.parametrize("value_width", [8, 4])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("name", TREES)
def test_like_the_definition_with_gradients(name, window, value_width, copied, monkeypatch):
    monkeypatch.setattr(attention, "COPIED", copied)
    tree = Tree(*TREES[name])
    agree(tensors(tree.starts[-1], value_width), tree, window)


@pytest.mark.parametrize("copied", [0, 3])
@pytest.mark.parametrize("name", TREES)
def test_large_pairs_go_to_a_kernel_of_their_own(name, copied, monkeypatch):
    """The calls of a GPU, where a second kernel takes large pairs of round lengths, with a kernel of the CPU in its place."""
    seen = []

    class Large(CpuFlash):
        def forward(self, query, key, value, call):
            seen.append((call.query_lengths, call.key_lengths, call.is_causal))
            return super().forward(query, key, value, call)

    monkeypatch.setattr(attention, "COPIED", copied)
    monkeypatch.setattr(attention, "ROUND", 2)
    monkeypatch.setattr(attention, "LARGE", 2 * 2 * 4 * 8)  # 2 x 2 scores of 4 heads of width 8
    monkeypatch.setattr(attention, "kernels_for", lambda query, key, value: [CpuFlash(), Large()])
    tree = Tree(*TREES[name])
    agree(tensors(tree.starts[-1]), tree)
    assert seen
    for queries, keys, is_causal in seen:
        assert len(queries) == len(keys) == 1 and queries[0] % 2 == keys[0] % 2 == 0 and queries[0] * keys[0] >= 4
        assert queries == keys or not is_causal


@pytest.fixture
def both_kernels(monkeypatch):
    """cuDNN's kernel where there is one, also for heads for which another is chosen."""
    if torch.cuda.get_device_capability() >= (9, 0):
        monkeypatch.setattr(attention, "kernels_for", lambda query, key, value: [CudaFlash(), CudnnFlash()])


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "key_heads"), [(64, 8), (64, 2), (128, 8), (128, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(("side", "copied"), [(2**15, 0), (128, 0), (128, 100)])
def test_kernels_of_a_gpu_are_near_the_definition(
    window, side, copied, width, key_heads, dtype, both_kernels, monkeypatch
):
    monkeypatch.setattr(attention, "COPIED", copied)
    monkeypatch.setattr(attention, "LARGE", side**2 * 8 * width)
    monkeypatch.setattr(attention, "ROUND", 128)
    for lengths, parents in (([300, 200, 128, 64, 1, 33, 290], [ROOT, 0, 0, 1, 1, 3, 2]), ([256, 300], [ROOT, 0])):
        tree = Tree(lengths, parents)
        shape = {"heads": 8, "key_heads": key_heads, "width": width, "value_width": width}
        near(tensors(tree.starts[-1], **shape, dtype=dtype, device="cuda"), tree, window)


def near(inputs, tree, window=None, attend=tree_attention):
    """A kernel's results and gradients are as near to the definition in fp64 as its dtype allows."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got, expected = attend(*inputs, tree, 0.1, window), by_hand(*exact, tree, window, 0.1)
    close = 4 * torch.finfo(inputs[0].dtype).eps
    assert (got - expected).norm() <= close * expected.norm()
    weights = torch.randn_like(expected)
    grads = [torch.autograd.grad((x * weights).sum(), of) for x, of in ((got.double(), inputs), (expected, exact))]
    for one, other in zip(*grads, strict=True):
        assert (one - other).norm() <= close * other.norm()


def by_torch(query, key, value, tree, scaling, window):
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1], "is_causal": True}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "key_heads"), [(64, 8), (64, 2), (128, 8), (128, 2)])
@pytest.mark.parametrize("torch_is_first", [False, True])
def test_plans_of_a_gpu_are_for_one_layout(torch_is_first, width, key_heads, both_kernels, monkeypatch):
    """torch and the tree use the same plans, which another layout of the output would make wrong for one of them."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("cuDNN's kernel is used from compute capability 9.0 on")
    monkeypatch.setattr(attention, "LARGE", 128**2 * 8 * width)
    monkeypatch.setattr(attention, "ROUND", 128)
    tokens = 384 + 128 * torch_is_first  # another plan in each case
    shape = {"heads": 8, "key_heads": key_heads, "width": width, "value_width": width, "dtype": torch.bfloat16}
    both = [tree_attention, by_torch]
    for by_heads in (False, True):
        for attend in both[::-1] if torch_is_first else both:
            near(tensors(tokens, **shape, device="cuda", by_heads=by_heads), Tree([tokens]), None, attend)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_gradients_on_a_gpu_are_the_same_again_where_torch_is_told_so(width):
    tree = Tree([4096, 511, 300, 2000], [ROOT, 0, 0, 0])
    shape = {"heads": 8, "key_heads": 2, "width": width, "value_width": width, "dtype": torch.bfloat16}
    inputs = tensors(tree.starts[-1], **shape, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(tree_attention(*inputs, tree).float().square().sum(), inputs) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for again in found[1:] for x, y in zip(again, found[0], strict=True))
