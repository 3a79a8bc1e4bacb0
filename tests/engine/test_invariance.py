"""A mini-batch's gradient is one number, however it is cut into micro-batches and over processes, padded and ordered."""

import pytest

from rlx.engine.micro_batches import MicroBatchRule

ROWS = [MicroBatchRule(rows=rows) for rows in (8, 4, 2, 1, 3)]
TOKENS = [MicroBatchRule(tokens=tokens) for tokens in (30, 5)]
CHANGES = [((8,), ROWS[4], "left"), ((8,), ROWS[4], "right"), ((8,), TOKENS[0], "reordered")]
ONE_PROCESS = [*(((8,), cut, None) for cut in (*ROWS, *TOKENS)), *CHANGES]
TWO_PROCESSES = [
    *((shares, ROWS[2], None) for shares in ((4, 4), (5, 3), (8, 0), (0, 8))),
    ((5, 3), TOKENS[0], None),
    ((3, 5), TOKENS[0], "reordered"),
]
LOSSES = ("cispo", "geo_mean", "gspo", "sapo")
TOLERANCE = 1e-10


def agree(results, want):
    for number, (gradient, figures, equal) in enumerate(zip(*results, strict=True)):
        loss, expected = want[equal]
        assert (gradient - expected).norm() <= TOLERANCE * expected.norm(), (number, figures)
        assert figures["loss"] == pytest.approx(loss, rel=TOLERANCE)
        assert figures["grad_norm"] == pytest.approx(expected.norm().item(), rel=TOLERANCE)
        _, metrics, equals = results
        for name, figure in metrics[equals.index(equal)].items():
            assert name == "tokens_saved" or figures[name] == pytest.approx(figure, rel=1e-9, abs=1e-12), name


@pytest.fixture(scope="module", params=["policy", "corrected", "value"])
def kind(request):
    return request.param


WAYS = {
    "policy": ("fsdp2", None, True),
    "corrected": ("fsdp", "attention", "auto"),
    "value": ("fsdp2", "boundary", False),
}


@pytest.fixture(scope="module")
def way(kind):
    """Strategy, what is kept of activations, and whether prompts are shared."""
    return WAYS[kind]


@pytest.fixture(scope="module")
def expected(kind, model_folder, one_rank):
    return one_rank("invariance", "naive", model_folder, (kind,))[0]


@pytest.fixture(scope="module")
def expected_of_losses(model_folder, one_rank):
    return one_rank("invariance", "naive", model_folder, LOSSES)[0]


def test_one_process_by_any_cut(way, kind, expected, model_folder, one_rank):
    (results,) = one_rank("invariance", "cut_gradients", model_folder, (kind,), way[0], ONE_PROCESS)
    agree(results, expected)


def test_two_processes_with_any_shares(way, kind, expected, model_folder, two_ranks):
    for results in two_ranks("invariance", "cut_gradients", model_folder, (kind,), way[0], TWO_PROCESSES):
        agree(results, expected)


def test_every_policy_loss_in_two_processes(expected_of_losses, model_folder, two_ranks):
    cases = TWO_PROCESSES[-2:]
    for results in two_ranks("invariance", "cut_gradients", model_folder, LOSSES, "fsdp2", cases):
        agree(results, expected_of_losses)


@pytest.mark.slow
def test_four_processes_of_which_some_have_no_rows_or_the_same(model_folder, one_rank, four_ranks):
    """A loss of tokens and one of sequences, in processes that only this test needs: each on its own rows, each pair on its
    own, all on the same.
    """
    kinds = ("policy", "gspo")
    dealt = [(1, (3, 0, 4, 1), "reordered"), (2, (8, 0), "left"), (2, (3, 5), None), (4, (8,), None)]
    calls = [
        (model_folder, kinds, "fsdp2", [(shares, TOKENS[0], change)], together) for together, shares, change in dealt
    ]
    expected = one_rank("invariance", "naive", model_folder, kinds)[0]
    for of_rank in four_ranks("invariance", "several", calls):
        for results in of_rank:
            agree(results, expected)


SHARED = [((8,), ROWS[2], None), ((8,), TOKENS[1], "reordered")]


@pytest.mark.slow
def test_two_processes_that_share_every_sequence(way, kind, expected, model_folder, two_ranks):
    strategy, offload, _ = way
    for results in two_ranks("invariance", "cut_gradients", model_folder, (kind,), strategy, SHARED, 2, offload):
        agree(results, expected)


@pytest.fixture(scope="module")
def expected_of_groups(kind, model_folder, one_rank):
    return one_rank("invariance", "naive_of_groups", model_folder, (kind,))[0]


# All groups whole; cut into parts; two rows of a group apart; more micro-batches than groups; rows of groups in any order.
GROUPS = [((8,), ROWS[0], None), ((8,), ROWS[2], None), ((8,), TOKENS[0], "left"), ((8,), TOKENS[1], "reordered")]


def test_prompts_that_are_computed_once(way, kind, expected_of_groups, model_folder, one_rank):
    arguments = (model_folder, (kind,), way[0], GROUPS, 1, None, way[2] or True)
    (results,) = one_rank("invariance", "grouped_gradients", *arguments)
    agree(results, expected_of_groups)
    saved = [figures["tokens_saved"] for figures in results[1]]
    assert max(saved) > 0.2 > min(saved), "a small limit parts groups"


@pytest.mark.slow
def test_prompts_that_are_computed_once_in_two_processes(way, kind, expected_of_groups, model_folder, two_ranks):
    cases = [((5, 3), ROWS[0], None), ((4, 4), ROWS[2], None), ((8, 0), TOKENS[0], None)]
    arguments = (model_folder, (kind,), way[0], cases, 1, "boundary", True)
    for results in two_ranks("invariance", "grouped_gradients", *arguments):
        agree(results, expected_of_groups)


@pytest.mark.slow
def test_prompts_that_are_computed_once_in_processes_that_share_them(
    way, kind, expected_of_groups, model_folder, two_ranks
):
    strategy, offload, _ = way
    cases = [((8,), ROWS[0], None), ((8,), TOKENS[0], "reordered")]
    arguments = (model_folder, (kind,), strategy, cases, 2, offload, True)
    for results in two_ranks("invariance", "grouped_gradients", *arguments):
        agree(results, expected_of_groups)
        assert max(figures["tokens_saved"] for figures in results[1]) > 0.2


@pytest.fixture(scope="module")
def expected_of_conversations(kind, model_folder, one_rank):
    return one_rank("invariance", "naive_of_conversations", model_folder, (kind,))[0]


def test_conversations_of_several_rows(way, kind, expected_of_conversations, model_folder, one_rank):
    cases = [((8,), ROWS[0], None), ((8,), ROWS[3], "reordered"), ((8,), TOKENS[0], None)]
    arguments = (model_folder, (kind,), "fsdp2", cases, 1, None, way[2], True)
    (results,) = one_rank("invariance", "grouped_gradients", *arguments)
    agree(results, expected_of_conversations)


def test_conversations_of_several_rows_in_two_processes(way, kind, expected_of_conversations, model_folder, two_ranks):
    """Rows of a conversation are on both."""
    cases = [((4, 4), ROWS[2], None), ((5, 3), TOKENS[0], "reordered"), ((8, 0), ROWS[1], "reordered")]
    arguments = (model_folder, (kind,), way[0], cases, 1, None, "auto", True)
    for results in two_ranks("invariance", "grouped_gradients", *arguments):
        agree(results, expected_of_conversations)


@pytest.mark.slow
def test_conversations_of_several_rows_in_processes_that_share_them(
    kind, expected_of_conversations, model_folder, two_ranks
):
    arguments = (model_folder, (kind,), "fsdp2", [((8,), TOKENS[1], "reordered")], 2, None, True, True)
    for results in two_ranks("invariance", "grouped_gradients", *arguments):
        agree(results, expected_of_conversations)
