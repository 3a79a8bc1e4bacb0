"""Log-probs and entropy from logits, and from hidden states and the head's weight."""

import functools
import math
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlx.models import log_probs as module
from rlx.models.log_probs import head_log_probs, head_replaced, token_log_probs

F64 = torch.float64


@pytest.fixture(params=[1, 50, 1 << 24])
def chunk_elements(request, monkeypatch):
    """One token at a time, a few, and all at once."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)


def reference(logits, ids, temperature):
    """Straight from the definitions, in the widest type."""
    every = (logits.to(F64) / temperature).log_softmax(dim=-1)
    return every.gather(-1, ids.unsqueeze(-1)).squeeze(-1), torch.special.entr(every.exp()).sum(dim=-1)


def make(shape, dtype=F64, scale=3.0, seed=0):
    source = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(*shape, generator=source, dtype=F64)).to(dtype)
    return logits, torch.randint(shape[-1], shape[:-1], generator=source)


def test_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=F64)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1]), 1.0, True)
    assert log_probs.item() == pytest.approx(math.log(0.75), abs=1e-15)
    assert entropy.item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75), abs=1e-15)
    # At half the temperature the odds are squared: 9 to 1.
    assert token_log_probs(logits, torch.tensor([0]), 0.5, False)[0].item() == pytest.approx(math.log(0.1), abs=1e-15)


@pytest.mark.usefixtures("chunk_elements")
@pytest.mark.parametrize("shape", [(5, 11), (3, 4, 11), (2, 3, 2, 11), (0, 11), (2, 0, 11), (0, 3, 11)])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_like_log_softmax_with_gradients(shape, temperature):
    logits, ids = make(shape)
    before = logits.clone()
    logits.requires_grad_()
    got, expected = token_log_probs(logits, ids, temperature, True), reference(logits, ids, temperature)
    weights = torch.randn(2, *shape[:-1], generator=torch.Generator().manual_seed(1), dtype=F64)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == ids.shape and torch.allclose(a, b, rtol=0, atol=1e-13)
    gradients = [torch.autograd.grad((weights[0] * lp + weights[1] * h).sum(), logits)[0] for lp, h in (got, expected)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-13) and torch.equal(logits, before)


@pytest.mark.parametrize("scale", [0.1, 3.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_dtypes(dtype, scale):
    logits, ids = make((4, 65), dtype, scale if dtype != torch.float16 else min(scale, 1e3))
    logits.requires_grad_()
    wide = F64 if dtype == F64 else torch.float32
    log_probs, entropy = token_log_probs(logits, ids, 0.7, True)
    assert (log_probs.dtype, entropy.dtype) == (wide, wide)
    exact = reference(logits, ids, 0.7)
    assert torch.allclose(log_probs.double(), exact[0], rtol=2e-7, atol=1e-5)
    assert torch.allclose(entropy.double(), exact[1], rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(log_probs.sum(), logits)
    (exact_gradient,) = torch.autograd.grad(exact[0].sum(), logits)
    assert gradient.dtype == dtype
    assert torch.allclose(gradient, exact_gradient, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)


@pytest.mark.usefixtures("chunk_elements")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_impossible_tokens(temperature):
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [0.0, -torch.inf, -torch.inf]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1, 0]), temperature, True)
    assert log_probs.tolist() == [-math.inf, 0.0]
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0])
    (1e6 * entropy.sum() + log_probs.sum()).backward()
    # Row 0: [i = k] - p_k from the log-prob, nothing from the entropy at its maximum over the possible tokens.
    expected = [[-0.5 / temperature, 1 / temperature, -0.5 / temperature], [0.0, 0.0, 0.0]]
    assert torch.allclose(logits.grad, torch.tensor(expected), rtol=0, atol=0.2)
    assert logits.grad[1].tolist() == [0.0, 0.0, 0.0] and logits.grad[0, 1] == 1 / temperature


def test_large_logits():
    logits = torch.tensor([[1e6, 1e6 - 1, -1e30], [3e38, -3e38, 0.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits, torch.tensor([1, 0]), 1.0, True)
    assert log_probs.tolist() == pytest.approx([-1 - math.log1p(math.exp(-1)), 0.0], abs=1e-6)
    p = 1 / (1 + math.e)
    assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p), 0.0], abs=1e-6)
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


def test_entropy_for_the_log_only_changes_no_gradient():
    logits, ids = make((3, 9), torch.float32)
    logits.requires_grad_()
    gradients = [
        torch.autograd.grad(token_log_probs(logits, ids, 0.9, flag)[0].sum(), logits)[0] for flag in (False, True)
    ]
    assert torch.equal(*gradients)
    assert token_log_probs(logits, ids, 0.9, False)[1] is None
    with torch.no_grad():
        assert token_log_probs(logits, ids, 0.9, True)[1].grad_fn is None


def largest_allocation(run):
    """Bytes of the largest single allocation while `run` runs, backward included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    return max(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_no_full_copy_in_fp32_in_forward_and_backward(monkeypatch, temperature, with_entropy):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3200)
    whole, ids = make((4, 10, 320), torch.bfloat16)
    whole.requires_grad_()
    view, view_ids = whole[:, 2:8], ids[:, 2:8]  # no contiguous memory: must not be copied either
    results = []

    def forward():
        results[:] = [x for x in token_log_probs(view, view_ids, temperature, with_entropy) if x is not None]

    def backward():
        torch.autograd.grad(sum(x.sum() for x in results), view)

    view_bytes = view.numel() * view.element_size()
    assert largest_allocation(lambda: view.float()) == 2 * view_bytes
    assert largest_allocation(forward) <= 3200 * 4 < view_bytes
    assert largest_allocation(backward) == view_bytes


def test_errors():
    logits, ids = make((2, 3, 5))
    with pytest.raises(ValueError, match=r"got logits \(2, 3, 5\) and ids \(2, 2\)"):
        token_log_probs(logits, ids[:, :2], 1.0, False)
    for temperature in (0.0, -1.0, math.nan, math.inf, 1e-45):
        with pytest.raises(ValueError, match="temperature: got"):
            token_log_probs(logits, ids, temperature, False)
    hidden, weight, ids = make_head()
    with pytest.raises(ValueError, match=r"got hidden \(2, 4, 6\), weight \(13, 5\) and ids \(2, 4\)"):
        head_log_probs(hidden, weight[:, :5], ids, 1.0, False)


@pytest.fixture(params=[(1, 1), (320, 20), (1 << 24, 40), (1 << 24, 1 << 24)])
def head_chunk(request, monkeypatch):
    """One token at a time, chunks of a few with a ragged end and in slices of one, one chunk in slices, all at once."""
    monkeypatch.setattr(module, "HEAD_CHUNK_BYTES", request.param[0])
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param[1])


def make_head(dtype=F64, tokens=(2, 4), vocabulary=13, width=6):
    source = torch.Generator().manual_seed(3)
    hidden = torch.randn(*tokens, width, generator=source, dtype=F64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=source, dtype=F64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(vocabulary, tokens, generator=source)


@pytest.mark.usefixtures("head_chunk")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("dtype", "exact", "close"), [(F64, 1e-13, 1e-13), (torch.float32, 2e-6, 1e-5), (torch.bfloat16, 2e-6, 0.01)]
)
def test_head_like_logits(dtype, exact, close, temperature):
    """Those of a head in fp32 or wider, also from hidden states and weights in bf16, whose gradients are rounded."""
    hidden, weight, ids = make_head(dtype)
    got = head_log_probs(hidden, weight, ids, temperature, True)
    assert got[0].dtype == got[1].dtype == torch.promote_types(dtype, torch.float32)
    wide = torch.promote_types(dtype, torch.float32)
    expected = token_log_probs(hidden.to(wide) @ weight.to(wide).T, ids, temperature, True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=exact)
    loss = [(2 * lp - 3 * h).sum() for lp, h in (got, reference(hidden.to(F64) @ weight.to(F64).T, ids, temperature))]
    for a, b in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in loss), strict=True):
        assert a.dtype == dtype
        assert (a - b).norm() <= close * b.norm()


def test_head_sums_the_gradients_of_its_chunks_in_fp32(monkeypatch):
    """As far from the exact one as rounding each product once makes it: a sum in bf16 would be ten times as far."""
    hidden, weight, ids = make_head(torch.bfloat16, tokens=(96,))
    wide = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(head_log_probs(hidden.double(), wide, ids, 1.0, False)[0].sum(), wide)
    monkeypatch.setattr(module, "HEAD_CHUNK_BYTES", 2 * 13 * 6)
    (gradient,) = torch.autograd.grad(head_log_probs(hidden, weight, ids, 1.0, False)[0].sum(), weight)
    assert (gradient - exact).norm() <= 0.003 * exact.norm()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_head_holds_one_chunk_of_logits(monkeypatch, with_entropy):
    """In fp32, and in backward its gradient in bf16."""
    hidden, weight, ids = make_head(torch.bfloat16, tokens=(64,), vocabulary=1000, width=8)
    monkeypatch.setattr(module, "HEAD_CHUNK_BYTES", 16_000 * 6)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 4000)
    results = []

    def forward():
        results[:] = [x for x in head_log_probs(hidden, weight, ids, 0.7, with_entropy) if x is not None]

    def backward():
        torch.autograd.grad(sum(x.sum() for x in results), (hidden, weight))

    assert largest_allocation(forward) == 16_000 * 4
    assert largest_allocation(backward) == 16_000 * 2 == 8000 * 4  # also the sum of the weight's gradient


@pytest.mark.parametrize("rows", [2, 8])
def test_head_with_a_retained_graph(monkeypatch, rows):
    """The gradient takes the place of the logits that forward left: the second time they are computed again."""
    monkeypatch.setattr(module, "HEAD_CHUNK_BYTES", rows * 13 * 8)
    hidden, weight, ids = make_head()
    log_probs, entropy = head_log_probs(hidden, weight, ids, 0.8, True)
    loss = (log_probs + 0.1 * entropy).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_passes_give_what_slices_give_and_hold_one_chunk(monkeypatch, dtype, with_entropy):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.compiler.reset()  # torch compiles a function eight times, which other tests may have used up
    hidden, weight, ids = make_head(dtype, tokens=(500,), vocabulary=32_000, width=64)
    chunk = 200 * 32_000 * (6 if dtype == torch.bfloat16 else 4)
    monkeypatch.setattr(module, "HEAD_CHUNK_BYTES", chunk)
    found, peaks = [], []
    for can_compile in (True, True, False):  # the first run compiles, and makes the workspace of matrix products
        monkeypatch.setattr(module._read_pass, "_may_compile", can_compile)
        monkeypatch.setattr(module._differentiate_pass, "_may_compile", can_compile)
        inputs = [x.detach().cuda().requires_grad_() for x in (hidden, weight)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        figures = [x for x in head_log_probs(*inputs, ids.cuda(), 0.9, with_entropy) if x is not None]
        gradients = torch.autograd.grad(sum((i + 1) * x.sum() for i, x in enumerate(figures)), inputs)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append([*figures, *gradients])
        assert (module._read_pass._may_compile, module._differentiate_pass._may_compile) == (can_compile, can_compile)
    assert peaks[1] <= chunk + 1.1 * (weight.numel() * (4 + dtype.itemsize) + hidden.nbytes) + 2**20
    for compiled, sliced in zip(found[1], found[2], strict=True):
        assert compiled.dtype == sliced.dtype
        assert (compiled - sliced).norm() <= (2e-3 if dtype == torch.bfloat16 else 2e-6) * sliced.norm()


def test_head_frozen_or_without_graph():
    hidden, weight, ids = make_head()
    log_probs, _ = head_log_probs(hidden, weight.detach(), ids, 1.0, False)
    (gradient,) = torch.autograd.grad(log_probs.sum(), hidden)
    both = torch.autograd.grad(head_log_probs(hidden, weight, ids, 1.0, False)[0].sum(), (hidden, weight))
    assert torch.equal(gradient, both[0])
    (of_weight,) = torch.autograd.grad(head_log_probs(hidden.detach(), weight, ids, 1.0, False)[0].sum(), weight)
    assert torch.equal(of_weight, both[1])
    with torch.no_grad():
        assert head_log_probs(hidden, weight, ids, 1.0, True)[1].grad_fn is None


def test_head_replaced_gives_log_probs_and_is_itself_again():
    hidden, weight, ids = make_head()
    head = torch.nn.Linear(6, 13, bias=False, dtype=F64)
    head.weight = torch.nn.Parameter(weight.detach())
    with head_replaced(head, ids, 0.5, with_entropy=True):
        log_probs, entropy = head(hidden).unbind(-1)
    expected = token_log_probs(head(hidden), ids, 0.5, True)
    torch.testing.assert_close((log_probs, entropy), expected, rtol=0, atol=1e-13)
    with pytest.raises(ValueError, match="head_log_probs: got hidden"), head_replaced(head, ids[:1], 0.5, True):
        head(hidden)
    assert head(hidden).shape == (2, 4, 13)


def test_head_of_no_tokens():
    hidden, weight, ids = make_head(torch.bfloat16, tokens=(0,))
    log_probs, entropy = head_log_probs(hidden, weight, ids, 1.0, True)
    gradients = torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden, weight))
    assert log_probs.shape == entropy.shape == (0,) and gradients[0].shape == hidden.shape and not gradients[1].any()


def with_new_passes(monkeypatch, compiler):
    monkeypatch.setattr(module, "_can_be_compiled_for", lambda logits: True)
    monkeypatch.setattr(torch, "compile", compiler)
    for name in ("_read_pass", "_differentiate_pass"):
        used = getattr(module, name)
        overwrites = name == "_differentiate_pass"
        monkeypatch.setattr(module, name, module._Pass(used._function, used._only_compiled, overwrites))


def figures_of(hidden, weight, ids, with_entropy=True):
    found = [x for x in head_log_probs(hidden, weight, ids, 0.7, with_entropy) if x is not None]
    return [*found, *torch.autograd.grad(sum((i + 1) * x.sum() for i, x in enumerate(found)), (hidden, weight))]


COMPILES = """
import torch
from rlx.models.log_probs import head_log_probs
hidden, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4096, 152_064))
head_log_probs(hidden, weight, torch.arange(4096, device="cuda"), 1.0, False)[0].sum().backward()
print(torch.cuda.host_memory_stats()["allocated_bytes.peak"])
"""


@pytest.mark.gpu
def test_compiling_keeps_no_page_locked_copy_of_the_logits(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # the fastest variants are kept there
    ran = subprocess.run([sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    # Copies of 256 tokens' logits in fp32 and gradients in bf16, in blocks of 256 and 128 MiB; all logits have 2.5 GB.
    assert int(ran.stdout) <= 2**28 + 2**27


def test_a_compiler_that_fails_is_told_once_and_changes_nothing(monkeypatch, caplog):
    given = make_head()
    expected = figures_of(*given)

    def no_compiler(function, **options):
        def call(*args):
            raise FileNotFoundError("gcc: no such file\nand more")

        return call

    with_new_passes(monkeypatch, no_compiler)
    for _ in range(2):
        for a, b in zip(figures_of(*given), expected, strict=True):
            assert torch.equal(a, b)
    text = "log-probs take longer: torch.compile does not work here (FileNotFoundError: gcc: no such file)"
    assert [record.getMessage() for record in caplog.records] == [text] * 2  # forward's pass and backward's


@pytest.fixture
def dynamo(monkeypatch):
    """As on a GPU, but what the compiler has traced runs as it is."""
    torch.compiler.reset()
    with_new_passes(monkeypatch, functools.partial(torch.compile, backend="eager"))
    yield
    torch.compiler.reset()


def assert_exact(found, hidden, weight, ids, with_entropy=True):
    """`found` of `figures_of` against the definitions in fp64."""
    wide = [x.detach().to(F64).requires_grad_() for x in (hidden, weight)]
    exact = reference(wide[0] @ wide[1].T, ids, 0.7)[: 1 + with_entropy]
    loss = sum((i + 1) * x.sum() for i, x in enumerate(exact))
    for a, b in zip(found, [*exact, *torch.autograd.grad(loss, wide)], strict=True):
        assert (a - b).norm() <= {torch.bfloat16: 0.05, torch.float32: 1e-5, F64: 1e-13}[
            hidden.dtype
        ] * b.norm() + 1e-12


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("first", [False, True])
def test_where_the_compiler_lets_a_function_run_as_it_is_nothing_is_done_twice(caplog, first):
    """Some compilers complain of that when the gradient has taken the place of the logits already."""
    given = make_head()
    if first:
        assert_exact(figures_of(*given), *given)
    with FlopCounterMode(display=False):
        assert_exact(figures_of(*given), *given)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("rlx.")]
    assert len(said) == 2 and all("a mode is on in which it does nothing" in text for text in said)
    assert_exact(figures_of(*given), *given)
    assert module._read_pass._has_compiled == module._differentiate_pass._has_compiled == first


@pytest.mark.usefixtures("dynamo")
def test_more_kinds_of_calls_than_are_compiled():
    for dtype in (F64, torch.float32, torch.bfloat16):
        for with_entropy in (True, False):
            for tokens in (50, 7, 1, 0):
                given = make_head(dtype, tokens=(tokens,))
                assert_exact(figures_of(*given, with_entropy), *given, with_entropy)
    assert module._read_pass._may_compile and module._differentiate_pass._may_compile


def test_head_under_autocast():
    """As a linear map: in autocast's type, whatever it is given in."""
    hidden, weight, ids = make_head(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, _ = head_log_probs(hidden.bfloat16(), weight, ids, 1.0, False)
    expected, _ = token_log_probs(hidden.bfloat16().float() @ weight.bfloat16().float().T, ids, 1.0, False)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-6)
    (gradient,) = torch.autograd.grad(log_probs.sum(), weight)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_head_with_large_and_impossible_logits(dtype):
    """Log-probs near 0 keep their digits beside logits of a million; a logit of -inf has no share in anything."""
    hidden = torch.tensor([[1.0], [1.0]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1e6], [1e6 - 1], [-torch.inf]], dtype=dtype, requires_grad=True)
    log_probs, entropy = head_log_probs(hidden, weight, torch.tensor([1, 0]), 1.0, True)
    p = 1 / (1 + math.e)
    assert log_probs.tolist() == pytest.approx([math.log(p), math.log(1 - p)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([-p * math.log(p) - (1 - p) * math.log(1 - p)] * 2, abs=1e-6)
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), weight)
    assert gradient.isfinite().all() and gradient[2].item() == 0
