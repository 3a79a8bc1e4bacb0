import json
import math
import pickle
from contextlib import ExitStack

import pytest
import torch

from rlx.config.schema import CustomRewardConfig, RewardConfig, RewardManagerConfig
from rlx.data.batch import Batch
from rlx.models.tiny import make_tiny_tokenizer
from rlx.rewards.manager import ConversationError, Conversations, RewardError, RewardManager, Scores


@pytest.fixture
def manager():
    """manager(path, name) with the given keys of `reward` and `custom_reward_function`."""
    with ExitStack() as managers:

        def make(path=None, name="compute_score", custom=None, **options):
            reward = RewardConfig(num_workers=1, **options)
            return managers.enter_context(RewardManager(reward, CustomRewardConfig(path, name, **(custom or {}))))

        yield make


def test_right_is_what_the_function_says_else_a_score_of_one():
    scores = torch.tensor([1.0, 0.1, 2.0, 0.0])
    assert Scores(scores, {}).right().tolist() == [1, 0, 1, 0]
    assert Scores(scores, {"acc": [0.0, 1.0, math.nan, 0.5]}).right().tolist() == [0, 1, 1, 0.5]


def test_each_sample_goes_to_the_function_of_its_source(manager, make_batch, tmp_path):
    batch = make_batch(
        ["#### 7", "#### 8", "so \\boxed{\\frac12}", "#### 7", "\\boxed{3}"],
        ["7", "7", "0.5", "7", "4"],
        ["openai/gsm8k", "rlx/arithmetic", "HuggingFaceH4/MATH-500", "rlx/arithmetic", "math_dapo"],
    )
    scores = manager(format_score=0.1).score(batch, tmp_path)
    assert scores.scores.dtype == torch.float32
    assert torch.equal(scores.scores, torch.tensor([1.0, 0.1, 1.0, 1.0, 0.0]))
    assert scores.extra == {}
    assert list(tmp_path.iterdir()) == []


def test_sources_without_a_function_are_known_before_the_first_sample(manager, write_module):
    known = ["openai/gsm8k", "math_dapo"]
    with pytest.raises(RewardError, match="no reward function for data source 'a', 'b'; known: "):
        manager().check_sources(["b", *known, "a"])
    path = write_module("def compute_score(**all): return 0")
    manager().check_sources(known)
    manager(path).check_sources(["a"])
    manager(path, custom={"data_sources": ("a",)}).check_sources(["a", *known])
    with pytest.raises(RewardError, match=r"data source 'b'; .*add 'b' to custom_reward_function\.data_sources, or"):
        manager(path, custom={"data_sources": ("a",)}).check_sources(["a", "b"])
    for weight, is_asked in ((0.0, False), (1.0, True)):
        with RewardManager(RewardConfig(), CustomRewardConfig(), rule_weight=weight) as rewards:
            if not is_asked:
                rewards.check_sources(["a"])
                continue
            with pytest.raises(RewardError):
                rewards.check_sources(["a"])


def test_a_function_of_ones_own_scores_every_source_and_its_other_numbers_are_collected(
    manager, make_batch, write_module, tmp_path
):
    path = write_module(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    score = len(data_source) + len(solution_str) + ground_truth + extra_info['index']\n"
        "    report = {'score': score, 'acc': solution_str == 'b', 'pred': solution_str}\n"
        "    return report | ({'length': 3.5} if solution_str == 'b' else {})\n"
    )
    scores = manager(path).score(make_batch(["", "b"], [0.5, -1], ["my/data", "openai/gsm8k"]), tmp_path)
    assert scores.scores.tolist() == [7 + 0 + 0.5 + 100, 12 + 1 - 1 + 101]
    assert set(scores.extra) == {"acc", "length"}
    assert scores.extra["acc"] == [0.0, 1.0]
    assert math.isnan(scores.extra["length"][0]) and scores.extra["length"][1] == 3.5


COUNTED = """
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(Path(__file__).with_name("calls"), "a") as calls:
        print(solution_str, file=calls)
    if solution_str == "bad":
        raise KeyError("bad")
    return {"score": len(solution_str) + ground_truth, "index": extra_info["index"]}
"""


def test_samples_that_are_scored_early_have_the_same_scores_and_faults_and_no_second_call(
    manager, make_batch, write_module, tmp_path
):
    path = write_module(COUNTED)
    batch = make_batch(["a", "bb", "ccc", "dd"], [0.5, 0, 1, 2], "my/data").with_(seed=torch.tensor([7, 2**62, 3, 5]))
    rewards = manager(path, on_error="stop")
    assert rewards.scores_early(batch)
    rewards.begin(batch.rows([2, 0]))
    rewards.begin(batch.rows([1, 0]).with_({"response_text": ["another", "a"]}))  # from a sampler that failed later
    while rewards.work(1.0):
        pass
    assert sorted((tmp_path / "calls").read_text().split()) == ["a", "another", "ccc"]
    early = rewards.score(batch, tmp_path)
    assert sorted((tmp_path / "calls").read_text().split()) == ["a", "another", "bb", "ccc", "dd"]
    assert early.scores.tolist() == [1.5, 2, 4, 4] and early.extra == {"index": [100, 101, 102, 103]}
    assert rewards.score(batch, tmp_path).extra == early.extra, "the next batch is scored anew"
    assert len((tmp_path / "calls").read_text().split()) == 9

    bad, messages = batch.with_({"response_text": ["a", "bad", "ccc", "bad"]}), []
    for rows in ([], [3, 2, 1, 0]):
        rewards.begin(bad.rows(rows))
        while rewards.work(1.0):
            pass
        with pytest.raises(RewardError) as caught:
            rewards.score(bad, tmp_path / f"early{len(rows)}")
        messages.append((str(caught.value).replace("early4", "early0"), str(caught.value.__cause__)))
    assert messages[0] == messages[1] and "sample 101" in messages[0][0]
    assert not manager(path, custom={"data_sources": ("other",)}).scores_early(make_batch(["a"], ["1"]))
    batched = RewardManagerConfig(name="batch")
    assert not manager(write_module("def compute_score(**all): pass"), reward_manager=batched).scores_early(batch)


@pytest.mark.parametrize(
    "body, what",
    [
        ("raise KeyError('answer')", "raised KeyError: 'answer'"),
        ("return {'score': float('nan')}", "returned {'score': nan}, expected a finite number"),
        ("import os; os._exit(5)", "ended its process (exit code 5), twice"),
    ],
)
def test_fault_names_the_sample_and_keeps_a_copy(manager, make_batch, write_module, tmp_path, body, what):
    path = write_module(f"def rate(solution_str, **rest):\n    if solution_str == 'ok': return 1.0\n    {body}\n")
    batch = make_batch(
        ["ok", "bäd\ud800"], ["1", {"deep": {2}}], "my/data", [{"index": 0}, {"index": 41, "split": "train"}]
    )
    with pytest.raises(RewardError) as caught:
        manager(path, "rate", on_crash="stop").score(batch, tmp_path / "new" / "folder")
    message = str(caught.value)
    copy = tmp_path / "new" / "folder" / "reward_error_1.json"
    for part in (f"rate in {path} {what}", "data source 'my/data'", "sample 41", str(copy)):
        assert part in message
    assert message.endswith(
        f"; correct the function, or let such samples score 0: reward.on_{'crash' if 'exit' in body else 'error'}=zero"
    )
    kept = json.loads(copy.read_text(encoding="utf-8"))
    assert kept["solution_str"] == "bäd\ud800" and kept["extra_info"] == {"index": 41, "split": "train"}
    assert kept["ground_truth"] == {"deep": "{2}"} and kept["data_source"] == "my/data"
    assert what[:8] in kept["fault"] and ("KeyError" in str(caught.value.__cause__)) == (body[:5] == "raise")
    if caught.value.__cause__ is not None:
        head, first = str(caught.value.__cause__).strip().splitlines()[:2]
        assert head.startswith("Traceback") and first.startswith(f'  File "{path}", line '), (
            "no line of rlx comes before"
        )
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


@pytest.mark.parametrize("source, truth", [("openai/gsm8k", "many"), ("math", "")])
def test_bad_ground_truth_is_a_fault_of_the_sample(manager, make_batch, tmp_path, source, truth):
    with pytest.raises(
        RewardError, match=rf"rlx's reward function of '{source}' raised ValueError: ground_truth is '{truth}'"
    ):
        manager().score(make_batch(["#### 1"], [truth], source, [{}]), tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


FLAKY = """
import os, time

def compute_score(solution_str, **rest):
    if solution_str == "slow":
        time.sleep(99)
    if solution_str == "exit":
        os._exit(1)
    if solution_str == "raise":
        raise KeyError("x")
    return {"score": 2, "length": len(solution_str)}
"""


def test_what_fails_may_score_zero_and_is_counted_and_told(manager, make_batch, write_module, tmp_path, caplog):
    path = write_module(FLAKY)
    rewards = manager(path, timeout_s=1.5, on_error="zero")
    scores = rewards.score(make_batch(["ok", "slow", "exit", "raise", "ok"], [0] * 5, "my/data"), tmp_path)
    assert scores.scores.tolist() == [2.0, 0.0, 0.0, 0.0, 2.0]
    assert [math.isnan(length) for length in scores.extra["length"]] == [False, True, True, True, False]
    usage = rewards.usage()
    assert [usage[f"reward/{name}"] for name in ("errors", "timeouts", "crashes")] == [1.0, 1.0, 1.0]
    assert usage["reward/processes"] >= 3 and set(rewards.usage().values()) == {0.0}
    (warning,) = caplog.messages
    assert warning.startswith("3 of 5 samples score 0: compute_score in ") and "took longer than 1.5 s" in warning
    assert [file.name for file in tmp_path.glob("*.json")] == ["reward_error_1.json"]
    assert rewards.score(make_batch(["ok"], [0]), tmp_path).scores.tolist() == [2.0]


def test_no_score_at_all_is_no_result(manager, make_batch, write_module, tmp_path):
    rewards = manager(write_module(FLAKY), on_error="zero")
    with pytest.raises(
        RewardError, match=r"raised KeyError: 'x'.*; no sample of the batch got a score; correct the function$"
    ):
        rewards.score(make_batch(["raise", "raise"], [0, 0]), tmp_path)


@pytest.mark.slow
def test_a_grading_of_mathematics_without_end_is_ended(manager, make_batch, tmp_path, caplog):
    endless = "\\int_0^1 9^{9^{9^{9}}} dx"
    batch = make_batch(["\\boxed{2}", "\\boxed{9^{9^{9^{9}}} + 10^{10^{10}}!}"], ["2", endless], "math")
    rewards = manager()
    assert rewards.score(batch, tmp_path).scores.tolist() == [1.0, 0.0]
    usage = rewards.usage()
    assert usage["reward/timeouts"] == 1 and usage["reward/processes"] == 0, (
        "it is interrupted, and its process goes on"
    )
    assert "took longer than 2 s (math-verify's limit, which reward.timeout_s does not raise)" in caplog.messages[0]


def test_a_function_of_lists_gets_its_samples_in_one_call_beside_other_sources(
    manager, make_batch, write_module, tmp_path
):
    path = write_module(
        "def rank(data_sources, solution_strs, ground_truths, extra_infos, top):\n"
        "    order = sorted(solution_strs, key=len)\n"
        "    return [{'score': top * order.index(s), 'of': len(order)} for s in solution_strs]\n"
    )
    custom = {"reward_kwargs": {"top": 5}, "data_sources": ("my/data",)}
    rewards = manager(path, "rank", custom, reward_manager=RewardManagerConfig(name="batch"))
    batch = make_batch(["bbb", "#### 7", "a", "cc"], [0, "7", 0, 0], ["my/data", "openai/gsm8k", "my/data", "my/data"])
    scores = rewards.score(batch, tmp_path)
    assert scores.scores.tolist() == [10.0, 1.0, 0.0, 5.0]
    assert scores.extra["of"][0] == 3.0 and math.isnan(scores.extra["of"][1])
    with pytest.raises(RewardError, match=r"known: .*my/data"):
        rewards.score(make_batch(["a"], [0], "other"), tmp_path)


LISTS = """
import os

def rank(data_sources, solution_strs, ground_truths, extra_infos):
    with open({log!r}, "a") as log:
        log.write(f"{{len(solution_strs)}} ")
    for solution in solution_strs:
        if solution == "raise":
            raise KeyError("x")
        if solution == "exit":
            os._exit(3)
    return [float(len(solution)) for solution in solution_strs]
"""


@pytest.mark.parametrize(("bad", "figure"), [("raise", "errors"), ("exit", "crashes")])
def test_of_a_list_only_the_sample_that_is_to_blame_scores_zero(
    manager, make_batch, write_module, tmp_path, bad, figure
):
    path = write_module(LISTS.format(log=str(tmp_path / "log")))
    keys = {"reward_manager": RewardManagerConfig(name="batch"), "on_error": "zero"}
    rewards = manager(path, "rank", **keys)
    scores = rewards.score(make_batch(["a", "bb", bad, "cc", "dd", "e"], [0] * 6, "my/data"), tmp_path)
    assert scores.scores.tolist() == [1, 2, 0, 2, 2, 1]
    usage = rewards.usage()
    assert usage[f"reward/{figure}"] == 1
    assert set((tmp_path / "log").read_text().split()) == {"6", "3", "2", "1"}


def test_a_list_of_which_no_part_is_answered_is_given_up_at_its_eighths(manager, make_batch, write_module, tmp_path):
    path = write_module(LISTS.format(log=str(tmp_path / "log")))
    rewards = manager(path, "rank", reward_manager=RewardManagerConfig(name="batch"), on_error="zero")
    with pytest.raises(RewardError, match=r"raised KeyError: 'x'.*no sample of the batch got a score"):
        rewards.score(make_batch(["raise"] * 16, [0] * 16, "my/data"), tmp_path)
    assert (tmp_path / "log").read_text().split() == ["16", *["8"] * 2, *["4"] * 4, *["2"] * 8]


def test_the_form_is_scored_on_top_and_does_not_count_as_right(manager, make_batch, tmp_path):
    rewards = manager(format="hashes", format_weight=1.0)
    scores = rewards.score(make_batch(["#### 7", "#### 8", "7", "#### 7\nDone."], ["7"] * 4), tmp_path)
    assert scores.scores.tolist() == [2.0, 1.0, 0.0, 1.0]
    assert scores.extra == {"format": [1.0, 1.0, 0.0, 0.0], "acc": [1.0, 0.0, 0.0, 1.0]}


@pytest.mark.slow
def test_an_expression_that_backtracks_for_ever_is_ended(manager, make_batch, tmp_path):
    rewards = manager(format="(a*)*b", timeout_s=1.5)
    scores = rewards.score(make_batch(["a" * 60, "aab"], ["7"] * 2), tmp_path)
    assert rewards.usage()["reward/timeouts"] == 1 and scores.scores.tolist() == pytest.approx([0.0, 0.1])


def test_a_models_scores_stand_alone_or_beside_the_functions(make_batch, tmp_path):
    batch = make_batch(["#### 7", "#### 8"], ["7", "7"])
    model_scores = torch.tensor([0.25, -2.0])
    with RewardManager(RewardConfig(), CustomRewardConfig(), rule_weight=0.0) as rewards:
        scores = rewards.score(make_batch(["a", "b"], [0, 0], "of no function"), tmp_path, model_scores)
        assert scores.scores.equal(model_scores) and scores.extra == {}
        with pytest.raises(RewardError, match="score of sample 1 is nan"):
            rewards.score(batch, tmp_path, torch.tensor([1.0, math.nan]))
    with RewardManager(RewardConfig(), CustomRewardConfig(), rule_weight=2.0) as rewards:
        scores = rewards.score(batch, tmp_path, model_scores)
    assert scores.scores.tolist() == [2.25, -2.0]
    assert scores.extra == {"acc": [1.0, 0.0], "model_score": [0.25, -2.0], "rule_score": [1.0, 0.0]}


def test_answers_that_no_built_in_function_can_score(manager, write_module):
    unusable = ["", "N/A", math.nan, ["6"], "Infinity", {"a": 1}]
    answers = {
        row: ("openai/gsm8k" if row % 2 else "math", truth) for row, truth in enumerate([*unusable, *unusable[1:], ""])
    }
    answers |= {50: ("openai/gsm8k", "1,200"), 51: ("math", "\\frac12"), 52: ("math", 3), 53: ("openai/gsm8k", 1.5)}
    found = manager().faults_of_answers(answers)
    assert list(found) == list(range(12)) and all("ground_truth is" in fault for fault in found.values())
    assert manager(on_error="zero").faults_of_answers(answers) == {}
    own = manager(write_module("def compute_score(**all): return 0"))
    assert own.faults_of_answers(answers) == {}, "a function of the user's own may take anything"


CHAT = [{"role": "user", "content": "1+1?"}]


@pytest.fixture
def batch():
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    tensors = {
        "input_ids": mask.long() * 9,
        "attention_mask": mask,
        "response_mask": mask[:, 2:],
        "seed": torch.arange(2),
    }
    return Batch.of(tensors, {"raw_prompt": [CHAT, "Say:"], "response_text": ["2", " two"]})


def other_tokenizer():
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    return tokenizer


def test_with_one_tokenizer_it_reads_the_policys_tokens(batch):
    conversations = Conversations(make_tiny_tokenizer(), make_tiny_tokenizer())
    found = conversations.of(batch)
    assert conversations.same and set(found.tensors.keys()) == {"input_ids", "attention_mask", "response_mask"}
    assert found["input_ids"].equal(batch["input_ids"])


def test_with_another_template_it_reads_the_texts(batch):
    tokenizer = other_tokenizer()
    found = Conversations(make_tiny_tokenizer(), tokenizer).of(batch)
    rows = zip(found["input_ids"], found["attention_mask"], strict=True)
    texts = [tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in rows]
    assert texts == ["[user]1+1?[assistant]2", "Say: two"]
    lengths = found["attention_mask"].sum(dim=1)
    assert lengths.tolist() == [len(texts[0]), len(texts[1]) + 1], "plain text ends as its tokenizer ends it"
    assert found["attention_mask"][:, -1].all() and found["response_mask"].shape == (2, 1)


def test_what_cannot_be_written_is_told(batch):
    tokenizer = other_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConversationError, match="does not take a chat"):
        Conversations(make_tiny_tokenizer(), tokenizer).of(batch)
    nameless = Batch(batch.tensors, {"response_text": ["2", "two"]})
    with pytest.raises(ConversationError, match="gives no info raw_prompt"):
        Conversations(make_tiny_tokenizer(), other_tokenizer()).of(nameless)
