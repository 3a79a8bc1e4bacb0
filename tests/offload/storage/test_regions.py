import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.offload.storage.offloader import in_one_piece
from rlx.offload.storage.tensor_bytes import TensorLayout, VersionProbe, is_parameter, is_plain, region_of, span_bytes


@st.composite
def looks(draw):
    """A tensor that looks at a storage in some way: permuted, sliced, strided, broadcast, shifted, of any dtype."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.uint8]))
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    base = torch.arange(draw(st.integers(8, 15)) + 5**4, dtype=torch.int64).to(dtype)
    tensor = base[draw(st.integers(0, 7)) :][: torch.Size(shape).numel()].reshape(shape)
    for dim in range(tensor.dim()):
        step = draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 1)) % tensor.shape[dim], None, step),)]
    if tensor.dim():
        tensor = tensor.permute(*draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 4)), *tensor.shape)
    return tensor


@settings(deadline=None, max_examples=200)
@given(tensor=looks())
def test_a_layout_comes_back_exactly_on_copied_bytes(tensor):
    region = region_of(tensor)
    copied = in_one_piece(tensor, region).clone(memory_format=torch.contiguous_format)
    again = TensorLayout(tensor).restore(copied, region.start)
    assert (again.shape, again.stride(), again.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(again, tensor)
    start, stop = span_bytes(tensor)
    assert region.start <= start <= stop <= region.start + region.nbytes <= tensor.untyped_storage().nbytes()
    assert region.nbytes <= max(2 * (stop - start), stop - start + 512)


def test_broadcast_tensors_are_not_written_out():
    wide = torch.randn(16).expand(1000, 16)
    assert span_bytes(wide) == (0, 64)
    assert region_of(wide).nbytes == 64


def test_one_range_for_all_that_look_at_it():
    fused = torch.randn(8, 3, 16)
    q, k, v = fused.unbind(1)
    assert region_of(q) == region_of(k) == region_of(v) == region_of(fused.transpose(0, 2))
    small = torch.randn(100_000)[70_000:70_010]
    assert region_of(small).nbytes < 1100


def test_a_write_makes_another_range():
    x = torch.randn(4)
    before = region_of(x)
    x.add_(1)
    assert region_of(x) != before


def test_parts_with_version_counters_of_their_own_are_other_ranges_once_written_to():
    first, second = torch.randn(4, 8).unsafe_chunk(2, -1)
    assert region_of(first) == region_of(second)
    first.add_(1)
    second.add_(1)
    assert region_of(first) != region_of(second)
    assert region_of(first) == region_of(first.t()) == region_of(first.detach())


def test_a_probe_sees_writes_and_keeps_no_memory():
    x = torch.randn(100)
    probe = VersionProbe(x)
    assert probe.is_untouched
    assert probe.alias.untyped_storage().nbytes() == 0
    x.view(10, 10)[0].add_(1)
    assert not probe.is_untouched
    probe = VersionProbe(x)
    x.exp()
    assert probe.is_untouched


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.randn(3, 3).to_sparse(),
        torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
        torch.randn(3).as_subclass(type("Sub", (torch.Tensor,), {})),
    ],
    ids=["conj", "neg", "sparse", "nested", "subclass"],
)
def test_tensors_that_bytes_do_not_describe_are_not_plain(tensor):
    assert not is_plain(tensor)


def test_views_of_a_parameter_are_told():
    linear = torch.nn.Linear(3, 3)
    assert is_parameter(linear.weight)
    assert is_parameter(linear.weight.t())
    assert not is_parameter(linear(torch.ones(1, 3)))
