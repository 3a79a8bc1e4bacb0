"""Conversations of one, two and three rows: what is counted once for each, against numbers worked out by hand."""

import json

import pytest
import torch

from rlx.algorithms.advantages import ESTIMATORS, turn_index
from rlx.algorithms.kl import KLController
from rlx.config.schema import AlgorithmConfig, ModelConfig, OverlongBufferConfig, RolloutConfig, RolloutCorrectionConfig
from rlx.data.batch import Batch
from rlx.environments.chat import Written
from rlx.environments.conversation import Conversation
from rlx.environments.role import batch_of
from rlx.environments.running import ConversationRow
from rlx.models.tiny import make_tiny_tokenizer
from rlx.rewards.manager import Scores
from rlx.trainer import environment_rows, learning, samples, step_metrics, validation
from rlx.trainer.environment_rows import all_rows, joined
from rlx.trainer.learning import balanced
from rlx.trainer.transcripts import Transcripts

# Turns of each conversation: the branch, the tokens and the reward. Sums of rewards are 1, 2 and 3, tokens 2, 3 and 5.
ONE = [(0, [70, 71], 1.0)]
TWO = [(0, [70, 71], 0.5), (1, [72], 1.5)]
THREE = [(0, [70], 0.0), (0, [71], 0.25), (1, [72], 0.0), (2, [73, 74], 2.75)]
MESSAGE = {"role": "tool", "content": "M"}


def conversation(turns, forks=True):
    """Behind the prompt 60, 61; between turns a token 80, and behind a fork a history 90, 91 instead of all tokens before.

    Without forks the same turns are one row.
    """
    own, log_prob = Conversation([60, 61], width=16, reason="done"), 0.0
    for number, (branch, tokens, reward) in enumerate(turns):
        if forks and branch > len(own.earlier):
            own.add_messages([MESSAGE], Written([60, 90, 91] if branch == 2 else [60, 61, 90, 91], "", True))
        elif number:
            own.add_messages([MESSAGE], Written([80], ""))
        log_probs = [log_prob - k - 1 for k in range(len(tokens))]
        log_prob = log_probs[-1]
        own.append(tokens, True, log_probs, "assistant", "CD")
        own.turns[-1].update(reward=reward, seconds=0.5)
    return own


def a_batch(*all_turns, forks=True, failed=False):
    """Samples of one prompt, scored by their environments."""
    ran = [conversation(turns, forks) for turns in all_turns]
    if failed:
        ran.append(Conversation([], width=16, reason="error: no", failed=True, failure_reward=-9.0))
    rows = [ConversationRow({}, seed, [60, 61]) for seed in range(len(ran))]
    batch = batch_of(ran, rows, 0, 16, 1, True)
    info = {"sample": [*range(len(ran))], "data_source": ["a"] * len(ran), "response_text": [""] * len(ran)}
    return batch.with_(
        {**batch.info, **info},
        group_id=torch.zeros(len(ran), dtype=torch.int64),
        scores=torch.tensor([own.reward for own in ran]),
    )


def on_turns(batch, name):
    """The numbers of a column on the sampled tokens, by sample, in the order of branches."""
    found = {}
    numbers = batch["branch"].tolist() if "branch" in batch else [0] * len(batch)
    for row in sorted(range(len(batch)), key=lambda row: (batch.info["sample"][row], numbers[row])):
        assert not batch[name][row][~batch["response_mask"][row]].any()
        found.setdefault(batch.info["sample"][row], []).extend(batch[name][row][batch["response_mask"][row]].tolist())
    return [found[sample] for sample in sorted(found)]


def with_advantages(batch, algorithm):
    whole, apart = joined(batch)
    whole, _ = learning.add_rewards(whole, algorithm, KLController(0.0))
    return apart(whole.with_(**ESTIMATORS[algorithm.adv_estimator](whole, algorithm)))


def described(batch):
    return step_metrics.describe(batch, joined(batch)[0])


def test_all_rows_are_those_of_each_conversation_in_order():
    batch = a_batch(ONE, TWO, THREE)
    assert len(batch) == 3 and environment_rows.sampled_tokens(batch).tolist() == [2, 3, 5]
    whole = all_rows(batch)
    assert whole["branch"].tolist() == [0, 0, 1, 0, 1, 2] and whole.info["sample"] == [0, 1, 1, 2, 2, 2]
    assert whole.prompt_tokens() == [[60, 61]] * 5 + [[60]]
    assert whole.response_tokens() == [[70, 71], [70, 71], [90, 91, 72], [70, 80, 71], [90, 91, 72], [90, 91, 73, 74]]
    assert on_turns(whole, "rollout_log_probs") == [[-1, -2], [-1, -2, -3], [-1, -2, -3, -4, -5]]
    assert whole["turn_rewards"].sum(dim=1).tolist() == [1.0, 0.5, 1.5, 0.25, 0.0, 2.75]
    assert whole["scores"].tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0] and "earlier_rows" not in whole.info
    assert environment_rows.conversations_of(whole).info["sample"] == [0, 1, 2]


def test_the_length_penalty_counts_the_tokens_of_all_rows():
    """Of 2, 5 and 10 tokens with 16 allowed and a buffer of 12, (16 - 12 - length) / 12; with a buffer of 2 beyond 16 no more than 1."""
    for given, overlong, expected in (
        ((ONE, TWO, THREE), OverlongBufferConfig(True, 12, 1.0), [0.0, -1 / 12, -6 / 12]),
        ((THREE, [(0, [70] * 12, 0.0), (1, [71] * 12, 0.0)]), OverlongBufferConfig(True, 2, 0.5), [0.0, -0.5]),
    ):
        batch = a_batch(*given)
        scored = samples.with_scores(batch, Scores(batch["scores"], {}), overlong)
        penalty = scored["scores"] - batch["scores"]
        assert penalty.tolist() == pytest.approx(expected, abs=1e-6)
        assert all_rows(scored)["scores"].unique().numel() == len(given)


def test_a_batch_without_forks_stays_as_it_is():
    batch = a_batch(ONE, ONE)
    whole = all_rows(batch)
    assert "branch" not in whole and (whole.tensors == batch.tensors).all()
    same, apart = joined(whole)
    assert same is whole and apart(batch) is batch
    assert environment_rows.conversations_of(whole) is whole


def test_a_conversation_without_a_token_is_no_part_of_its_group():
    """Counted by rows the mean would be 14 / 6."""
    for batch in (a_batch(ONE, TWO, THREE), a_batch(ONE, TWO, THREE, failed=True)):
        algorithm = AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
        by_sample = on_turns(with_advantages(all_rows(batch), algorithm), "advantages")
        assert by_sample[:3] == [pytest.approx([x] * n, abs=1e-5) for x, n in ((-1.0, 2), (0.0, 3), (1.0, 5))]


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_equal_scores_teach_nothing_whatever_their_parts(forks, estimator):
    """The parts add up to 333.3 in fp64 and, before they are rounded once, to other numbers in fp32."""
    parts = [[66.66, 166.65, 33.33, 66.66], [166.65, 166.65], [333.3], [33.33, 33.33, 199.98, 66.66]]
    samples = [[(branch, [70], part) for branch, part in enumerate(each)] for each in parts]
    batch = all_rows(a_batch(*samples, forks=forks))
    assert len(set(batch["scores"].tolist())) == 1
    algorithm = AlgorithmConfig(adv_estimator=estimator, norm_adv_by_std_in_grpo=False)
    assert not with_advantages(batch, algorithm)["advantages"].any()
    assert with_advantages(batch, algorithm)["outcomes"].tolist() == batch["scores"].tolist()


@pytest.mark.parametrize("time_step", ["token", "turn"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_has_the_numbers_of_the_same_turns_in_one_row(estimator, time_step):
    """Values, KL and corrections by sequence too, with rows in any order."""
    algorithm = AlgorithmConfig(
        adv_estimator=estimator, gamma=0.9, lam=0.8, time_step=time_step, use_kl_in_reward=True, kl_penalty="k2"
    )
    criteria = {"rollout_rs": ("seq_mean_k1",), "rollout_rs_threshold": ("0.99_1.3",)}
    correction = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_batch_normalize=True, **criteria)
    drawn = torch.Generator().manual_seed(0)
    needed = ("old_log_probs", "ref_log_probs", *(["values"] if estimator == "gae" else []))
    numbers = {name: torch.randn(10, generator=drawn) for name in needed}

    def computed(batch, order):
        batch = all_rows(batch).rows(order).with_(greedy_scores=torch.full((len(order),), 0.5))
        for name, of_token in numbers.items():
            column, left = torch.zeros(batch["response_mask"].shape), 0.1 * of_token
            for row in sorted(range(len(batch)), key=lambda row: order[row]):
                count = int(batch["response_mask"][row].sum())
                sampler = batch["rollout_log_probs"][row][batch["response_mask"][row]]
                column[row, batch["response_mask"][row]] = left[:count] + (sampler if name != "values" else 0.0)
                left = left[count:]
            batch = batch.with_(**{name: column})
        whole, apart = joined(batch)
        whole, corrected = learning.correct(whole, correction)
        measured = step_metrics.mismatch(whole) | step_metrics.describe_policy(whole)
        whole, rewarded = learning.add_rewards(whole, algorithm, KLController(0.1))
        whole = whole.with_(**ESTIMATORS[estimator](whole, algorithm))
        figures = {**corrected, **measured, **rewarded, **step_metrics.describe(batch, whole)}
        return apart(whole), {name: x for name, x in figures.items() if not name.startswith("conversation/")}

    forked, figures = computed(a_batch(ONE, TWO, THREE), [4, 0, 5, 2, 3, 1])
    plain, expected = computed(a_batch(ONE, TWO, THREE, forks=False), [2, 0, 1])
    assert figures == {name: pytest.approx(x, rel=1e-5, abs=1e-6) for name, x in expected.items()}
    assert 0 < figures["correction/rejected_sequence_share"] < 1 and figures["mismatch/turn_4/max_abs_log_prob"] > 0
    names = ["advantages", "token_rewards", "rollout_is_weights", "loss_mask"]
    for name in names + ["returns"] * (estimator == "gae"):
        for own, other in zip(on_turns(forked, name), on_turns(plain, name), strict=True):
            assert own == pytest.approx(other, rel=1e-5, abs=1e-6), name


def test_a_row_without_history_behind_its_prompt_begins_a_turn_of_its_own():
    own = Conversation([60], width=4)
    for branch in range(2):
        if branch:
            own.add_messages([MESSAGE], Written([60], "", True))
        own.append([70], True, [-1.0], "assistant", "C")
        own.turns[-1]["reward"] = 1.0
    batch = batch_of([own], [ConversationRow({}, 0, [60])], 0, 4, 1, True)
    batch = batch.with_({**batch.info, "sample": [0]}, group_id=torch.zeros(1, dtype=torch.int64))
    whole, _ = joined(all_rows(batch))
    assert turn_index(whole["response_mask"]).tolist() == [[0, -1, 1]]


def test_metrics_count_a_conversation_once():
    found = all_rows(a_batch(ONE, TWO, THREE))
    batch = with_advantages(found, AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False))
    figures = environment_rows.describe(batch)
    assert figures["conversation/forks"] == 1.0, "6 rows of 3 conversations"
    assert (figures["conversation/turns_mean"], figures["conversation/turns_max"]) == (7 / 3, 4)
    assert figures["conversation/environment_s"] == pytest.approx(3.5 / 3)
    assert figures["conversation/loss_token_share"] == pytest.approx(10 / 17)
    numbers = described(batch)
    assert (numbers["reward/mean"], numbers["reward/max"], numbers["reward/min"]) == (2.0, 3.0, 1.0)
    assert (numbers["response_length/mean"], numbers["response_length/max"]) == (pytest.approx(10 / 3), 5.0)
    assert numbers["response_length/clip_ratio"] == 0.0
    full = batch["attention_mask"].clone()
    full[0, -1] = full[1, -1] = full[5, -1] = True  # the first row of the second conversation is not its last
    cut = batch.with_(attention_mask=full)
    assert described(cut)["response_length/clip_ratio"] == pytest.approx(2 / 3)
    assert numbers["advantages/abs_mean"] == pytest.approx(0.7)


def test_functions_read_the_turns_of_all_rows_and_no_prompt():
    """The last row's prompt is one token shorter than the first one; its history is no answer of the model."""
    written, tokenizer = a_batch(ONE, THREE), make_tiny_tokenizer()
    rows = Batch({"group_id": written["group_id"]}, {"sample": [0, 1]})
    found = environment_rows.received(rows, written, tokenizer, RolloutConfig())
    assert found.info["prompt_text"] == ["9:", "9:"]
    assert found.info["response_text"] == ["CD", "CMD\nM\nE\nM\nFG"]


def test_validation_sees_a_conversation_once():
    batch = a_batch(ONE, TWO, THREE)
    scores = Scores(batch["scores"], {})
    found = validation.summarise(batch, scores)
    assert (found["val/reward"], found["val/accuracy"]) == (2.0, 1.0)
    assert found["val/response_length"] == pytest.approx(10 / 3)
    assert found == validation.summarise(a_batch(ONE, TWO, THREE, forks=False), scores)


def test_groups_are_selected_and_joined_with_their_earlier_rows():
    """Two generations of prompts of other lengths; the first prompt's samples are all equal and are dropped."""
    kept = a_batch(ONE, THREE)
    first = a_batch(TWO, TWO), Scores(torch.tensor([2.0, 2.0]), {})
    second = kept.with_prompts(5).with_(group_id=kept["group_id"] + 1), Scores(torch.tensor([1.0, 3.0]), {})
    found = samples.DynamicSampling("score", wanted=1, samples=2)
    for part in (first, second):
        found.add(*part)
    batch, _ = found.samples()
    assert found.kept == 1 and len(batch) == 2
    whole = all_rows(batch)
    assert whole["group_id"].tolist() == [1] * 4 and whole["branch"].tolist() == [0, 0, 1, 2]
    assert whole.response_tokens()[2:] == [[90, 91, 72], [90, 91, 73, 74]] and whole.prompt_tokens()[3] == [60]


def test_balanced_shares_and_mini_batches_hold_every_row_once():
    """Seven rows on two processes, in mini-batches of one prompt each: 4 and 3 rows, and a prompt's rows stay together."""
    batch = a_batch(ONE, TWO, THREE, ONE)
    batch = all_rows(batch.with_(group_id=torch.tensor([0, 1, 0, 1])))
    dealt = batch.rows(balanced(batch, 2, ModelConfig().least_gain))

    def named(part):
        return sorted(zip(part.info["sample"], part["branch"].tolist(), strict=True))

    assert named(dealt) == named(batch) and len(batch) == 7
    parts = [dealt.rows(rows) for rows in learning.mini_batches(dealt, 1, 1, None)]
    assert [named(part) for part in parts] == [[(0, 0), (2, 0), (2, 1), (2, 2)], [(1, 0), (1, 1), (3, 0)]]
    for algorithm in (AlgorithmConfig(adv_estimator="grpo"), AlgorithmConfig(adv_estimator="rloo")):
        assert on_turns(with_advantages(dealt, algorithm), "advantages") == on_turns(
            with_advantages(batch, algorithm), "advantages"
        )


def test_a_transcript_has_a_line_for_each_row_with_its_own_turns(tmp_path):
    batch = all_rows(a_batch(ONE, THREE)).rows([3, 1, 0, 2])
    batch = with_advantages(batch, AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False))
    written = Transcripts(make_tiny_tokenizer(), tmp_path)
    written.begin(1, batch.with_({"numbers": [{}] * 4}, old_log_probs=batch["rollout_log_probs"]))
    written.settle()
    lines = [json.loads(line) for line in (tmp_path / "step_000001.jsonl").read_text().splitlines()]
    assert [(line["sample"], line["branch"]) for line in lines] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert lines[3]["token_ids"] == [60, 90, 91, 73, 74] and lines[3]["loss_mask"] == [0, 0, 0, 1, 1]
    assert [[(turn["role"], turn["start"], turn["end"]) for turn in line["turns"]] for line in lines[1:]] == [
        [("assistant", 2, 3), ("tool", 3, 4), ("assistant", 4, 5)],
        [("history", 2, 4), ("assistant", 4, 5)],
        [("history", 1, 3), ("assistant", 3, 5)],
    ]
    assert {line["reward"] for line in lines[1:]} == {3.0}
    assert lines[3]["advantages"] == [None, None, None, 1.0, 1.0]
