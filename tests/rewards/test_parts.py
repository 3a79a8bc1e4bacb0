"""The score as a weighted list of functions, rlx's own rule, and judges that a real server plays."""

import json
import math
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from rlx.config.schema import CustomRewardConfig, RewardConfig, RewardManagerConfig, RewardPartConfig
from rlx.rewards.manager import RewardError, RewardManager
from rlx.user_code import UserCodeError

MINE = """
import time

def words(data_source, solution_str, ground_truth, extra_info=None, most=9):
    if solution_str == "hang":
        time.sleep(99)
    return {"score": len(solution_str.split()) / most, "acc": 0.5, "letters": len(solution_str)}

def nan(**all): return float("nan")
def huge(**all): return 3e38
def lists(data_sources, solution_strs, ground_truths, extra_infos): return [len(solution_strs)] * len(solution_strs)
"""


@pytest.fixture
def parts(write_module):
    """parts(part, ...): a manager of these parts; a part without path or model is rlx's rule."""
    path = write_module(MINE)
    with ExitStack() as managers:

        def make(*given, sources=(), **options):
            known = tuple(RewardPartConfig(**{"path": path, **each} if "name" in each else each) for each in given)
            config = CustomRewardConfig(parts=known, data_sources=sources)
            return managers.enter_context(RewardManager(RewardConfig(num_workers=1, **options), config))

        yield make


WORDS = {"name": "words", "weight": 0.5, "reward_kwargs": {"most": 4}}


def test_the_score_is_the_weighted_sum_and_each_part_a_number(parts, make_batch, tmp_path):
    batch = make_batch(["#### 7", "a b c #### 8"], ["7", "7"]).with_(seed=torch.tensor([3, 4]))
    rewards = parts({}, WORDS, {**WORDS, "metric": "again", "weight": 0.0}, format="hashes", format_weight=2.0)
    usual = rewards.score(batch, tmp_path)
    assert usual.scores.tolist() == [1 + 0.25 + 2, 0 + 0.625 + 2]
    words = {"words": [0.5, 1.25], "words/acc": [0.5, 0.5], "words/letters": [6, 12]}
    again = {name.replace("words", "again"): values for name, values in words.items()}
    assert usual.extra == {"acc": [1, 0], "rule": [1, 0], "format": [1, 1], **words, **again}
    assert rewards.scores_early(batch)
    rewards.begin(batch)
    while rewards.work(1.0):
        pass
    assert rewards.score(batch, tmp_path).extra == usual.extra
    assert parts(WORDS, {}).score(batch, tmp_path).extra["acc"] == [0.5, 0.5], "the first part tells what is right"


def test_a_list_scores_its_sources_and_rules_are_tried_with_every_answer(parts, make_batch, tmp_path):
    rewards = parts({"name": "lists"}, sources=("mine",), reward_manager=RewardManagerConfig("batch"))
    scores = rewards.score(make_batch(["#### 7", "a", "b"], ["7"] * 3, ["openai/gsm8k", "mine", "mine"]), tmp_path)
    assert scores.scores.tolist() == [1, 2, 2] and math.isnan(scores.extra["lists"][0])
    rewards = parts(WORDS, {})
    assert [*rewards.faults_of_answers({4: ("openai/gsm8k", "many"), 5: ("math", "3")})] == [4]
    with pytest.raises(RewardError, match=r"'mine'; known: .*; give the part without path or model"):
        rewards.check_sources(["mine"])


@pytest.mark.slow
def test_a_part_that_fails_fails_its_sample(parts, make_batch, tmp_path, caplog):
    batch = make_batch(["a", "hang"], ["7"] * 2)
    with pytest.raises(
        RewardError, match=r"nan in .* returned nan, expected a finite number.*correct the function, or"
    ):
        parts(WORDS, {"name": "nan"}).score(batch.rows([0]), tmp_path)
    with pytest.raises(
        RewardError, match=r"other parts give the sum 9.*, expected a finite number.*lower their weights"
    ):
        parts({"name": "huge"}, {"name": "huge", "metric": "more", "weight": 2.0}).score(batch.rows([0]), tmp_path)
    hanging = parts({}, WORDS, {"name": "huge", "weight": 1e-38}, timeout_s=2)
    scores = hanging.score(batch, tmp_path)
    assert scores.scores.tolist() == pytest.approx([0.125 + 3, 0]) and math.isnan(scores.extra["rule"][1])
    assert hanging.usage()["reward/timeouts"] == 1 and "1 of 2 samples score 0: words in" in caplog.messages[-1]
    with pytest.raises(RewardError, match="no sample of the batch got a score"):
        hanging.score(batch.rows([1] * 7), tmp_path)
    assert hanging.usage()["reward/processes"] == 4, "the other part's answers give no hope"


ANSWERS = {"good": "**Score: 7/10**, not Score: 0-10", "none": "fine", "much": "Score: 11", "cut": "Score: 8,5"}
ANSWERS |= {"range": "Score: 0 \u2013 10: 8", "ended": "Score: 1"}


@pytest.fixture
def judge(parts, tmp_path, monkeypatch):
    """judge(template, **reward): a manager whose only part asks a server, and the server's requests."""
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            entry = (self.headers["Authorization"], body)
            asked.append(entry)
            busy = asked[0] is entry
            text = ANSWERS[body["messages"][0]["content"].split("|")[1]]
            answer = {"error": {"message": "k3y is known"}}
            if body["model"] == "q":
                answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
                answer["choices"][0]["finish_reason"] = "length" if text == ANSWERS["ended"] else "stop"
            self.send_response(429 if busy else 200 if body["model"] == "q" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever).start()
    monkeypatch.setenv("JUDGE_KEY", "k3y")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")

    def make(template="{prompt}|{response}|{ground_truth}|{x}", model="q", api_key_var="JUDGE_KEY", top_p="top_p"):
        (tmp_path / "template.txt").write_text(template)
        url, file = f"http://127.0.0.1:{server.server_port}/v1", str(tmp_path / "template.txt")
        part = {
            "model": model,
            "base_url": url,
            "template": file,
            "api_key_var": api_key_var,
            "request": {top_p: 0.5},
        }
        return parts({**part, "weight": 2.0}), asked

    yield make
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_judge_is_asked_again_while_it_is_busy_and_its_number_is_the_score(judge, make_batch, tmp_path):
    rewards, asked = judge()
    chat = [{"role": "user", "content": "{response}?"}]
    batch = make_batch(["good", "good"], ["7", "7"]).with_(
        {"raw_prompt": [chat, [{"role": "system", "content": "S"}, *chat]]}
    )
    scores = rewards.score(batch, tmp_path)
    assert scores.scores.tolist() == pytest.approx([1.4, 1.4]) and scores.extra == {"judge": [0.7, 0.7], "acc": [0, 0]}
    assert len(asked) == 3 and {key for key, _ in asked} == {"Bearer k3y"}
    questions = {body["messages"][0]["content"] for _, body in asked}
    assert questions == {"{response}?|good|7|{x}", "system: S\n\nuser: {response}?|good|7|{x}"}
    assert all(body["top_p"] == 0.5 and body["model"] == "q" for _, body in asked)
    for text, what in [
        ("none", "answered 'fine', expected `Score: `"),
        ("much", "a number from 0 to 10"),
        ("cut", "8,5"),
        ("range", "answered 'Score: 0 \u2013 10: 8', expected"),
        ("ended", "q was cut after 'Score: 1', expected a whole answer; raise max_tokens in request"),
    ]:
        with pytest.raises(
            RewardError, match=rf"the judge of custom_reward_function.parts\[0\] raised JudgeError.*{what}"
        ):
            rewards.score(make_batch([text], ["7"]), tmp_path)
    with pytest.raises(
        RewardError, match=r"other gave no answer.*NotFoundError.*\*\*\* is known.*correct its keys, template or"
    ):
        judge(model="other")[0].score(make_batch(["good"], ["7"]), tmp_path)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"template": "{prompt}"}, r"parts\[0\]\.template: .* has no \{response\}"),
        ({"template": "{response} {reponse}"}, r"has \{reponse\}, expected one of .*; did you mean response\?"),
        ({"api_key_var": "MISSING"}, r"parts\[0\]\.api_key_var: got MISSING, expected an environment variable"),
        ({"top_p": "top_k"}, r"parts\[0\]\.request: got top_k, expected .*; put fields .* into extra_body"),
        ({"api_key_var": "sk-secret"}, r"got a text that is no such name"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_found_before_the_first_call(judge, given, what):
    with pytest.raises(UserCodeError, match=what):
        judge(**given)
