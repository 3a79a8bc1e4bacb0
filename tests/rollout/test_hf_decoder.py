"""Choosing tokens, finding the ends of texts, and the cache that grows."""

import pytest
import torch
from transformers import ByT5Tokenizer, DynamicCache, MistralConfig, Qwen3Config
from transformers.cache_utils import DynamicLayer

from rlx.rollout.hf_decoder import (
    GrowingLayer,
    StopStrings,
    bad_word_tokens,
    changed_logits,
    choose_tokens,
    growing_cache,
    request_uniforms,
)
from rlx.rollout.protocol import Sampling

LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.0, 0.0, -30.0])


def draw(sampling, count=20_000, logits=LOGITS):
    seeds = range(count)  # as requests have them, of which each keeps another number of tokens
    uniforms = request_uniforms([*seeds], 1, [seed % 50 for seed in seeds])[:, 0]
    return choose_tokens(logits.expand(count, -1), uniforms, sampling)


def assert_distributed(tokens, probs):
    """Pearson's statistic below the 99.9 % point of chi-square with 5 degrees of freedom (20.5)."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    assert counts[expected == 0].sum() == 0
    some = expected > 0.5
    assert ((counts - expected)[some] ** 2 / expected[some]).sum() < 20.5


@pytest.mark.parametrize(
    ("cuts", "kept"),
    [
        ({"temperature": 2.0}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5, "top_k": 2}, [0, 3]),
        ({"top_k": 2}, [0, 3]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 1e-9}, [0]),
        ({"top_p": 0.6}, [0, 3]),
        ({"top_p": 0.999999}, [0, 1, 2, 3, 4]),
        ({"top_k": 2, "top_p": 0.7}, [0]),
        ({"top_k": 2, "top_p": 0.75}, [0, 3]),
        ({"min_p": 0.2}, [0, 3, 1]),
        ({"min_p": 0.2, "top_k": 2}, [0, 3]),
    ],
)
def test_truncation_keeps_the_right_tokens_renormalised(cuts, kept):
    # Probabilities: 0: 0.56, 3: 0.21, 1: 0.13, 4: 0.08, 2: 0.03. Of the two likeliest alone: 0.73 and 0.27.
    tokens, log_probs = draw(Sampling(1, **cuts))
    probs = torch.softmax(LOGITS / cuts.get("temperature", 1.0), dim=-1)
    cut = torch.zeros_like(probs)
    cut[kept] = probs[kept]
    assert_distributed(tokens, cut / cut.sum())
    torch.testing.assert_close(log_probs, probs.log()[tokens])  # of the whole distribution, not of the cut one


def test_equal_logits_are_cut_to_k_all_the_same():
    tokens, _ = draw(Sampling(1, top_k=3), logits=torch.zeros(6))
    assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, top_k=4), Sampling(1, top_p=0.99)])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_give_possible_tokens(sampling, uniform):
    logits = torch.tensor([[-float("inf"), 1.0, 0.0, -float("inf")]])
    token, log_prob = choose_tokens(logits, torch.tensor([uniform], dtype=torch.float64), sampling)
    assert token.item() in (1, 2)
    assert log_prob.isfinite().all()


def test_uniforms_depend_on_the_seed_alone():
    rows = request_uniforms([7, 8, 2**63 - 1, 7], 40)
    assert rows.dtype == torch.float64 and rows.min() >= 0 and rows.max() < 1
    assert torch.equal(rows[0], rows[3]) and not torch.equal(rows[0], rows[1])
    assert torch.equal(request_uniforms([8], 40)[0], rows[1])
    assert torch.equal(request_uniforms([8], 17)[0], rows[1, :17])


def test_penalties_and_biases_change_the_choice_but_not_the_log_probs():
    sampling = Sampling(
        1,
        temperature=0.0,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((5, 32.0),),
    )
    logits, said = LOGITS.expand(2, -1), torch.tensor([[1, 1], [3, 2]])
    prompts = torch.tensor([[True] + [False] * 5, [False] * 6])
    changed = changed_logits(logits, sampling, prompts, said, bad_words=[[1, 1, 4], [9, 0]])
    expected = [
        [2.0 / 2, 0.5 / 2 - 2 * 0.25 - 0.5, -1.0, 1.0, -torch.inf, 2.0],
        [2.0, 0.5, -1.0 * 2 - 0.75, 1.0 / 2 - 0.75, 0.0, 2.0],
    ]
    torch.testing.assert_close(changed, torch.tensor(expected))
    tokens, log_probs = choose_tokens(logits, torch.zeros(2, dtype=torch.float64), sampling, changed)
    assert tokens.tolist() == [5, 0]
    torch.testing.assert_close(log_probs, torch.log_softmax(LOGITS, dim=-1)[tokens])


def test_stop_strings_are_found_where_a_token_completes_one():
    tokenizer = ByT5Tokenizer()
    stops = StopStrings(tokenizer, ("</a>", "é", "</s>"))

    def first_end(text_or_ids):
        ids = tokenizer.encode(text_or_ids, add_special_tokens=False) if isinstance(text_or_ids, str) else text_or_ids
        found = ((at, stops.completed_by_last(ids[:at])) for at in range(1, len(ids) + 1))
        return next(((at, stop) for at, stop in found if stop), None)

    assert first_end("so </a> more") == (7, "</a>")
    assert first_end("caf" + "é") == (5, "é"), "two bytes"
    assert first_end("< /a>") is None
    assert first_end([70, tokenizer.eos_token_id, 70]) == (2, "</s>"), "special tokens have a text too"
    broken = [3 + 0xFF] * 40  # bytes of no character have no text
    ids = tokenizer.encode("</", add_special_tokens=False) + broken + tokenizer.encode("a>", add_special_tokens=False)
    assert first_end(ids) == (len(ids), "</a>")


def test_bad_words_are_tokens_with_and_without_a_space(tokenizer):
    assert bad_word_tokens(ByT5Tokenizer(), ["ab"]) == [[100, 101]], "with a space it has more tokens"
    assert bad_word_tokens(tokenizer, ["a"]) == [tokenizer.encode("a")]


def test_a_growing_layer_holds_what_a_dynamic_one_holds():
    torch.manual_seed(0)
    ours, theirs = GrowingLayer(extra_tokens=2), DynamicLayer()
    rows = torch.tensor([2, 0, 0])
    before = 0  # where the keys are
    for step, new in enumerate((5, 1, 1, 1, 1, 3)):  # outgrows its room twice
        states = torch.randn(3, 2, new, 4), torch.randn(3, 2, new, 4)
        for got, want in zip(ours.update(*states), theirs.update(*states), strict=True):
            assert torch.equal(got, want)
        if step in (1, 2):
            assert ours.keys.data_ptr() == before, "nothing is copied within the room"
        if step in (0, 2):
            ours.reorder_cache(rows)
            theirs.reorder_cache(rows)
        before = ours.keys.data_ptr()
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


def test_other_kinds_of_layers_stay_transformers_own():
    assert all(type(layer) is GrowingLayer for layer in growing_cache(Qwen3Config(num_hidden_layers=2), 4).layers)
    sliding = MistralConfig(num_hidden_layers=2, sliding_window=8)
    kinds = [type(layer) for layer in growing_cache(sliding, 4).layers]
    assert kinds == [type(layer) for layer in DynamicCache(config=sliding).layers] and GrowingLayer not in kinds
