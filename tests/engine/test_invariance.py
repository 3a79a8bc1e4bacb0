"""A mini-batch's gradient is one number, however it is cut into micro-batches and over processes."""

import pytest

from rlx.engine.micro_batch import MicroBatchRule

ROWS = [MicroBatchRule(rows=rows) for rows in (8, 4, 2, 1, 3)]
TOKENS = [MicroBatchRule(tokens=tokens) for tokens in (30, 5)]
ONE_PROCESS = [((8,), cut) for cut in (*ROWS, *TOKENS)]
TWO_PROCESSES = [(shares, ROWS[2]) for shares in ((4, 4), (5, 3), (8, 0), (0, 8))] + [((5, 3), TOKENS[0])]
TOLERANCE = 1e-10


def agree(got, metrics, want, per_mode):
    for number, (gradient, figures) in enumerate(zip(got, metrics, strict=True)):
        loss, expected = want[number // per_mode]
        assert (gradient - expected).norm() <= TOLERANCE * expected.norm(), (number, figures)
        assert figures["loss"] == pytest.approx(loss, rel=TOLERANCE)
        assert figures["grad_norm"] == pytest.approx(expected.norm().item(), rel=TOLERANCE)
        for name, figure in metrics[number - number % per_mode].items():
            assert figures[name] == pytest.approx(figure, rel=1e-9, abs=1e-12), name


@pytest.fixture(scope="module", params=["policy", "corrected", "value"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def expected(kind, model_folder, one_rank):
    return one_rank("invariance", "naive", model_folder, kind)[0]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_one_process_by_any_cut(strategy, kind, expected, model_folder, one_rank):
    ((gradients, metrics),) = one_rank("invariance", "cut_gradients", model_folder, kind, strategy, ONE_PROCESS)
    agree(gradients, metrics, expected, len(ONE_PROCESS))


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_two_processes_with_any_shares(strategy, kind, expected, model_folder, two_ranks):
    for gradients, metrics in two_ranks("invariance", "cut_gradients", model_folder, kind, strategy, TWO_PROCESSES):
        agree(gradients, metrics, expected, len(TWO_PROCESSES))
