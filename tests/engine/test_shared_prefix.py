"""Rows that fork at several depths and share what comes before, against the same rows apart; also in tiles, and over processes."""

import pytest
import torch
from test_forward import LANGUAGE_MODELS, KeepsFp64, made, said

from rlx.data.batch import Batch
from rlx.engine.forward import Distribution, Forward
from rlx.engine.micro_batches import pack, row_lengths
from rlx.models.packed_attention import packed_attention
from rlx.offload import OffloadOptions, enable_activation_offloading, enable_tiling, register_attention

P, R, VOCAB = 5, 8, 61
BOTH = Distribution(0.7, with_entropy=True)


@pytest.fixture(scope="module")
def turns():
    """Two prompts that begin alike; responses to the first fork after a turn, and after another one."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([[R], [R - 1], [R], [4], [R], [2]])
    mask = torch.cat([torch.ones(6, P, dtype=torch.bool), torch.arange(R) < lengths], dim=1)
    ids = torch.randint(3, VOCAB, (6, P + R), generator=g)
    for rows, shared in (
        (slice(0, 6), 3),
        (slice(0, 4), P),
        (slice(0, 3), P + 2),
        (slice(0, 2), P + 5),
        (slice(4, 6), P),
    ):
        ids[rows, :shared] = ids[rows.start, :shared]
    return Batch.of({"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask, "response_mask": mask[:, P:]})


def alike(tree, rows, close=1e-10):
    for figure, of_rows in rows[0].items():
        torch.testing.assert_close(tree[0][figure], of_rows, rtol=0, atol=close)
    assert (tree[1] - rows[1]).norm() <= close * rows[1].norm()


@pytest.mark.parametrize("name", ["qwen2", "mistral", "deepseek_v3"])
def test_rows_that_fork_at_four_depths_say_what_rows_say(name, turns):
    tree = pack(turns, list(range(6)), row_lengths(turns), 0.0).packed.tree
    depths = [len(tree.ancestors(segment)) for segment in range(len(tree.lengths))]
    assert max(depths) == 4 and tree.starts[-1] < 6 * (P + R) / 2
    model = made(LANGUAGE_MODELS[name], torch.float64)
    model.set_experts_implementation("eager")  # torch's grouped products know no fp64
    forward = Forward(model, model, torch.device("cpu"), "sdpa")
    with KeepsFp64():
        rows, shared = (said(forward, turns, BOTH, least_gain) for least_gain in (1.0, 0.0))
    alike(shared, rows)


@pytest.mark.parametrize(("name", "close"), [("gpt2", 1e-10), ("qwen2", 1e-6)])  # norms of qwen2 round to fp32
def test_tiles_say_what_whole_rows_say_and_offloading_changes_no_bit(name, close, turns):
    register_attention(packed_attention)
    model = made(LANGUAGE_MODELS[name], torch.float64)
    forward = Forward(model, model, torch.device("cpu"), "sdpa")
    rows = said(forward, turns, BOTH)
    tiling = enable_tiling(model, 3)
    assert tiling.mlps and (tiling.norms or name == "gpt2")
    tiles = said(forward, turns, BOTH, 0.0)
    alike(tiles, rows, close)
    for save in ("boundary", "attention"):
        handle = enable_activation_offloading(model, True, OffloadOptions(save=save, min_bytes=0))
        kept = said(forward, turns, BOTH, 0.0)
        assert handle.stats().offloaded_bytes > 0
        handle.disable()
        assert all(torch.equal(kept[0][figure], tiles[0][figure]) for figure in tiles[0])
        assert torch.equal(kept[1], tiles[1])


DEALS = {  # lengths of the responses: two groups that cost about the same stay whole, and a dear one is parted
    "whole": ((7, 6, 5, 4, 7, 5, 5, 4), 6 * 6),
    "parted": ((7, 7, 7, 7, 1, 1, 1, 1), 4 * 6),
}


@pytest.mark.parametrize("name", DEALS)
def test_two_processes_have_whole_groups_unless_one_would_take_much_longer(name, model_folder, two_ranks):
    responses, saved = DEALS[name]
    for gradient, formula, share in two_ranks("invariance", "dealt_groups", model_folder, responses):
        assert (gradient - formula).norm() <= 1e-10 * formula.norm()
        assert share == pytest.approx(saved / sum(6 + response - 1 for response in responses))
