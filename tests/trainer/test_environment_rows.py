"""The driver's part of conversations: scores, metrics, transcripts."""

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlx.algorithms.kl import KLController
from rlx.config.schema import AlgorithmConfig, EnvironmentConfig, PPOConfig, RolloutConfig
from rlx.data.batch import Batch
from rlx.environments.conversation import Conversation
from rlx.environments.role import batch_of, rows_of
from rlx.environments.running import ConversationRow
from rlx.models.tiny import make_tiny_tokenizer
from rlx.rewards.manager import Scores
from rlx.trainer import environment_rows
from rlx.trainer.learning import add_rewards
from rlx.trainer.transcripts import Transcripts


def a_conversation(*rewards, reason="done", failed=False, info=None):
    """Turns of two tokens 70, 71 with a token 80 between them, behind the prompt 60, 61."""
    own = Conversation([60, 61], width=8, reason=reason, failed=failed, info=info or {})
    for number, reward in enumerate(rewards):
        if number:
            own.append([80], False, [0.0], "tool", "M")
        own.append([70, 71], True, [-1.0, -2.0], "assistant", "CD")
        own.turns[-1].update(reward=reward, seconds=0.5, calls=[{"name": "f", "error": number == 1}])
    return own


@pytest.fixture
def batch():
    """Two samples of a prompt; the second failed before its first turn and has its row's prompt."""
    failed = Conversation([], 8, reason="timeout: too slow", failed=True, failure_reward=-1.0, waited_s=2.5)
    rows = [ConversationRow({}, 3, [5]), ConversationRow({}, 4, [5, 6, 7])]
    found = batch_of([a_conversation(0.5, 1.0, info={"acc": 1.0}), failed], rows, 0, 8, 7, True)
    info = {"data_source": ["a", "a"], "sample": [0, 1], "response_text": ["CDMCD", ""]}
    return Batch(found.tensors, {**found.info, **info}).with_(group_id=torch.zeros(2, dtype=torch.int64))


def test_a_batch_holds_each_conversation(batch):
    assert batch["input_ids"].tolist() == [[0, 60, 61, 70, 71, 80, 70, 71, 0, 0, 0], [5, 6, 7] + [0] * 8]
    assert batch["attention_mask"].tolist() == [[False] + [True] * 7 + [False] * 3, [True] * 3 + [False] * 8]
    assert batch["response_mask"].int().tolist() == [[1, 1, 0, 1, 1, 0, 0, 0], [0] * 8]
    assert batch["rollout_log_probs"].tolist() == [[-1, -2, 0, -1, -2, 0, 0, 0], [0] * 8]
    assert batch["turn_rewards"].tolist() == [[0, 0.5, 0, 0, 1, 0, 0, 0], [0] * 8]
    assert batch["policy_versions"].tolist() == [[7, 7, 0, 7, 7, 0, 0, 0], [0] * 8] and batch["seed"].tolist() == [3, 4]


def test_a_share_without_rows_has_the_columns():
    batch = batch_of([], [], 0, 8, 7, True)
    assert len(batch) == 0 and batch.response_length == 8


def test_an_environment_gets_its_row():
    info = {"raw_prompt": ["go"], "data_source": ["a"], "ground_truth": [7], "extra_info": [{"b": 1}]}
    ids, mask = torch.tensor([[0, 5]]), torch.tensor([[False, True]])
    (row,) = rows_of(Batch.of({"prompt_ids": ids, "prompt_mask": mask, "seed": torch.tensor([9])}, info))
    prompt = [{"role": "user", "content": "go"}]
    data = {"prompt": prompt, "data_source": "a", "ground_truth": 7, "extra_info": {"b": 1}, "seed": 9}
    assert row == ConversationRow(data, 9, [5])


def test_an_environments_rewards_are_added_to_the_functions_or_replace_them(batch):
    functions = Scores(torch.tensor([1.0, 0.25]), {})
    added = environment_rows.scores(PPOConfig(environment=EnvironmentConfig(name="a")), batch, lambda: functions)
    assert added.scores.tolist() == [2.5, -0.75]
    assert added.extra["environment_reward"] == [1.5, -1.0] and added.right().tolist() == [1, 0]
    alone = environment_rows.scores(PPOConfig(environment=EnvironmentConfig(name="a", rewards="replace")), batch, None)
    assert alone.scores.tolist() == [1.5, -1.0] and alone.extra["acc"][0] == 1.0
    plain = Batch.of({"scores": torch.zeros(2)})
    assert environment_rows.scores(PPOConfig(), plain, lambda: functions) is functions


def test_reward_functions_read_the_text_as_it_was_written():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "print": 2, "(": 3, ",": 4, ")": 5}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tidying = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", clean_up_tokenization_spaces=True)
    ids, mask = torch.tensor([[2, 3, 4, 5, 1]]), torch.ones(1, 5, dtype=torch.bool)
    written = Batch.of({"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 1:]})
    rows = Batch.of({"group_id": torch.zeros(1, dtype=torch.int64)})
    for rollout, text in (({}, "( , )"), ({"stop": (",",)}, "( ")):
        found = environment_rows.received(rows, written, tidying, RolloutConfig(**rollout))
        assert found.info["response_text"] == [text] and torch.equal(found["response_mask"], mask[:, 1:])


def test_right_is_what_the_functions_say_beside_an_environment(batch):
    config = PPOConfig(environment=EnvironmentConfig(name="a"))
    one_reports = Scores(torch.tensor([0.0, 1.0]), {"acc": [math.nan, 0.0]})
    added = environment_rows.scores(config, batch, lambda: one_reports)
    assert added.scores.tolist() == [1.5, 0.0] and added.right().tolist() == [0, 0]
    silent = {**batch.info["conversation"][0], "reward": None}
    without = Batch(batch.tensors, {**batch.info, "conversation": [silent, silent]})
    assert [record["info"] for record in without.info["conversation"]] == [{"acc": 1.0}] * 2
    added = environment_rows.scores(config, without, lambda: Scores(torch.tensor([0.0, 1.0]), {}))
    assert added.scores.tolist() == [0.0, 1.0] and added.right().tolist() == [0, 1]
    assert added.extra["environment_acc"] == [1.0, 1.0]


def test_turns_get_their_rewards_and_the_last_token_the_rest(batch):
    scored, _ = add_rewards(batch.with_(scores=torch.tensor([2.5, -1.0])), AlgorithmConfig(), KLController(0.0))
    assert scored["token_rewards"].tolist() == [[0, 0.5, 0, 0, 2.0, 0, 0, 0], [0] * 8]


def test_metrics_and_failures(batch):
    assert environment_rows.describe(batch) == {
        "conversation/turns_mean": 1.0,
        "conversation/turns_max": 2.0,
        "conversation/forks": 0.0,
        "conversation/tool_calls": 1.0,
        "conversation/tool_errors": 0.5,
        "conversation/failures": 1.0,
        "conversation/environment_s": 0.5,
        "conversation/waited_s": 2.5,
        "conversation/loss_token_share": pytest.approx(4 / 5),
        "conversation/ended/done": 0.5,
        "conversation/ended/timeout": 0.5,
    }
    assert environment_rows.failures(batch) == "1 of 2 conversations ended by a failure: 1 times timeout: too slow"


def test_failures_beyond_the_three_most_frequent_reasons_are_counted():
    many = [f"error: <Tool at 0x{address:x}>" for address in (0x7F01, 0x7F02, 0x7F03)]
    records = [{"reason": reason, "failed": True} for reason in [*many, *"bbccdde"]]
    text = environment_rows.failures(
        Batch.of({"seed": torch.zeros(10, dtype=torch.int64)}, {environment_rows.CONVERSATION: records})
    )
    named = "3 times error: <Tool at 0x...>; 2 times b; 2 times c; 3 times other reasons"
    assert text == f"10 of 10 conversations ended by a failure: {named}"


def test_a_transcript_has_an_entry_for_each_token(batch, tmp_path):
    advantages = torch.where(batch["response_mask"], 0.123456, 0.0)
    old = batch["rollout_log_probs"] + 0.25
    columns = {"advantages": advantages, "old_log_probs": old, "scores": torch.tensor([1.5, -1.0])}
    whole = batch.with_({"numbers": [{"f1": 0.5}, {"f1": None}]}, **columns).rows([1, 0])
    written = Transcripts(make_tiny_tokenizer(), tmp_path)
    written.begin(3, whole)
    written.settle()
    first, second = map(json.loads, (tmp_path / "step_000003.jsonl").read_text().splitlines())
    assert [first[name] for name in ("step", "group", "sample", "data_source", "reward")] == [3, 0, 0, "a", 1.5]
    assert (first["numbers"], second["numbers"]) == ({"f1": 0.5}, {"f1": None})
    assert first["token_ids"] == [60, 61, 70, 71, 80, 70, 71] and first["tokens"] == [*"9:CDMCD"]
    assert first["loss_mask"] == [0, 0, 1, 1, 0, 1, 1]
    assert first["advantages"] == [None, None, 0.12346, 0.12346, None, 0.12346, 0.12346]
    assert first["log_prob_gap"] == [None, None, 0.25, 0.25, None, 0.25, 0.25]
    assert [(turn["role"], turn["start"], turn["end"]) for turn in first["turns"]] == [
        ("assistant", 2, 4),
        ("tool", 4, 5),
        ("assistant", 5, 7),
    ]
    assert (second["token_ids"], second["turns"], second["reason"]) == ([5, 6, 7], [], "timeout: too slow")


def test_a_resume_says_where_it_cannot_know_the_order_of_calls():
    known, unknown = {"conversation/turns_mean": 2.0}, {"conversation/overlapping_turns": 0.5}
    doubt = environment_rows.doubt
    assert doubt({1: known}) == "" and doubt({1: known, 2: unknown}).startswith(
        "in 1 of 2 steps agents made calls at once"
    )
