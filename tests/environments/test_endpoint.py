"""Agents that call the policy at an address: the same rows as built-in environments, and nothing trained on that was not sampled."""

import json
import os
import random
import sys
from functools import partial

import psutil
import pytest
import torch
from in_this_process import VLLM, Recording, Sampler, batch_of, conversations, rows_of, sampling
from transformers import AutoModelForCausalLM, Qwen3Config

from rlx.environments.endpoint_pool import node_address
from rlx.environments.openai_calls import BadCall, History, read, said
from rlx.environments.spec import EnvironmentSpec
from rlx.models.tiny import make_tiny_tokenizer
from rlx.rollout.hf import HFRollout
from rlx.user_code import UserCodeError

AGENTS = """
from rlx.environments.built_in_tools import Calculator
from rlx.environments.protocol import Turn

async def run(row, client):
    environment = Calculator()
    messages, index, done = list(environment.reset(row)), 0, False
    while not done:
        answer = await client.chat.completions.create(model="policy", messages=messages)
        choice = answer.choices[0]
        found = await environment.step(Turn(choice.message.content, index, choice.finish_reason))
        messages += [choice.message.model_dump(), *found.messages]
        index, done = index + 1, found.done
    return found.info | {"reward": found.reward}
"""


@pytest.fixture(scope="module")
def tiny():
    return make_tiny_tokenizer()


@pytest.fixture
def sampler_of(tmp_path, tiny):
    """The conversations of a configuration with an agent's file, or of a built-in environment."""

    def make(agents=None, *settings):
        if agents:
            (tmp_path / "agents.py").write_text(agents)
            settings = ("environment.name=endpoint", f"environment.path={tmp_path}/agents.py", *settings)
        return conversations(tiny, *settings)

    return make


@pytest.fixture(scope="module")
def policy(tiny):
    """A random model over bytes, whose digits are likely."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=len(tiny), num_key_value_heads=1, head_dim=16, max_position_embeddings=512, **sizes)
    )
    rollout = HFRollout(model.config, device=torch.device("cpu"), dtype=torch.float32, max_num_seqs=5, tokenizer=tiny)
    rollout.update_weights(model.state_dict().items(), version=1)
    return rollout


def calls_or_answers(request):
    rng = random.Random(f"{request.seed} {request.prompt_ids}")
    calls = "".join(f"<calc>{rng.choice(['3+4', '9**9**9', '1/0', '12*11'])}</calc>" for _ in range(rng.randrange(4)))
    return f"so {calls}" if calls else "7" * rng.randrange(1, 30), rng.random() < 0.9


def assert_equal_rows(batch, expected):
    assert {*batch.tensors.keys()} == {*expected.tensors.keys()}
    for name, column in expected.tensors.items():
        assert torch.equal(batch[name], column), name
    for own, other in zip(batch.info["conversation"], expected.info["conversation"], strict=True):
        assert (own["reward"], own["reason"], own["failed"]) == (other["reward"], other["reason"], other["failed"])
        names = ("start", "end", "role", "text", "reward", "finish_reason", "branch")
        for record, told in zip(own["turns"], other["turns"], strict=True):
            assert {name: record[name] for name in names} == {name: told[name] for name in names}


def test_an_agent_gives_the_rows_of_the_built_in_environment_to_the_bit(sampler_of, policy, tiny):
    turns = "actor_rollout_ref.rollout.multi_turn.max_turn_tokens=30"
    own, built_in = sampler_of(AGENTS, turns), sampler_of(None, "environment.name=calculator", turns)
    rows = batch_of(tiny, [str(n) for n in range(12)])
    for sampler in (lambda: policy, partial(Sampler, tiny, calls_or_answers)):
        found, expected = (each.generate(sampler(), rows, sampling(tiny)) for each in (own, built_in))
        assert_equal_rows(found, expected)
    assert {each["reason"] for each in expected.info["conversation"]} == {"done", "length"}


SCENES = """
import asyncio
import json

import anthropic
import openai

TOOLS = [{"type": "function", "function": {"name": "calc", "description": "a", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}]

def user(text):
    return {"role": "user", "content": text}

async def ask(client, messages, **more):
    answer = await client.chat.completions.create(model="any", messages=messages, **more)
    return [choice.message.model_dump() for choice in answer.choices]

async def parallel(client):
    (said,) = await ask(client, [user("a")])
    begun = [user("a"), said]
    await asyncio.gather(*(ask(client, [*begun, user(each)], seed=n or None) for n, each in enumerate("bcd")))

async def choices(client):
    _, second = await ask(client, [user("a")], n=2)
    await ask(client, [user("a"), second, user("b")])

async def sub_agent(client):
    (said,) = await ask(client, [user("a")])
    await ask(client, [{"role": "developer", "content": "s"}, user("b")])
    await ask(client, [user("a"), said, user("c")])

async def rewritten(client):
    (said,) = await ask(client, [user("a")])
    await ask(client, [user("a"), {**said, "content": " " + said["content"]}, user("b")])
    try:
        await ask(client, [user("a"), {**said, "content": "no"}, user("c")])
    except openai.BadRequestError as error:
        assert error.code == "rewritten_history"
        return 0.5

async def texts(client):
    first = await client.completions.create(model="any", prompt="ab", stop="|", max_tokens=9, logprobs=1)
    (own,) = first.choices
    assert "|" not in own.text and own.logprobs.text_offset[0] == 0
    await client.completions.create(model="any", prompt="ab" + own.text + "|" + "then")

async def tokens(client):
    more = {"extra_body": {"return_token_ids": True}}
    first = await client.completions.create(model="any", prompt=[70, 71], max_tokens=4, **more)
    (own,) = first.choices
    assert first.prompt_token_ids == [70, 71] and len(own.token_ids) == 4
    await client.completions.create(model="any", prompt=[70, 71, *own.token_ids, 72], **more)

async def tools(client):
    messages = [user("call")]
    (said,) = await ask(client, messages, tools=TOOLS)
    (call,) = said["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"expression": "3+4"} and said["content"] == "so"
    messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
    (said,) = await ask(client, messages, tools=TOOLS, tool_choice="none")
    assert said["tool_calls"] is None and said["content"] == "so <calc>3+4</calc>"

async def messages(client):
    async with anthropic.AsyncAnthropic(base_url=str(client.base_url)[:-4], api_key=client.api_key) as own:
        sent = {"model": "any", "max_tokens": 40, "tools": [
            {"name": "calc", "description": "a", "input_schema": TOOLS[0]["function"]["parameters"]}]}
        said = await own.messages.create(messages=[user("call")], **sent)
        text, call = said.content
        assert (text.text, call.input, said.stop_reason) == ("so", {"expression": "3+4"}, "tool_use")
        result = [{"type": "tool_result", "tool_use_id": call.id, "content": "7"}, {"type": "text", "text": "call"}]
        talk = [user("call"), {"role": "assistant", "content": [each.model_dump() for each in said.content]}, user(result)]
        async with own.messages.stream(messages=talk, **sent) as stream:
            again = await stream.get_final_message()
        assert again.content[1].input == {"expression": "3+4"} and again.usage.output_tokens > 9
        cut = await own.messages.create(messages=[user("call")], stop_sequences=["+"], **sent)
        assert (cut.stop_reason, cut.stop_sequence, again.stop_sequence) == ("stop_sequence", "+", None)
        try:
            await own.messages.create(messages=talk, thinking={"type": "enabled", "budget_tokens": 9}, **sent)
        except anthropic.BadRequestError as error:
            assert "thinking: rlx does not support" in str(error)

async def stream(client):
    text = ""
    async for event in await client.chat.completions.create(
        model="any", messages=[user("a")], stream=True, seed=3, logprobs=True, stream_options={"include_usage": True}
    ):
        text += event.choices[0].delta.content or "" if event.choices else ""
        usage = event.usage
    assert usage.completion_tokens == len(text.encode()) + 1
    assert (await ask(client, [user("a")], seed=3))[0]["content"] == text

async def left(client):
    stream = await client.chat.completions.create(model="any", messages=[user("left")], stream=True)
    await stream.close()
    try:
        await asyncio.wait_for(ask(client, [user("left")]), 0.05)
    except TimeoutError:
        pass
    await asyncio.sleep(0.3)
    await ask(client, [user("stays")])

async def special(client):
    (said,) = await ask(client, [user("<|assistant|></s>")])
    await ask(client, [user("<|assistant|></s>"), said, user("</s>")])

async def greedy(client):
    answer = await client.chat.completions.create(
        model="any", messages=[user("a")], temperature=0, logprobs=True, extra_body={"return_token_ids": True}
    )
    own = answer.choices[0]
    assert [each.logprob for each in own.logprobs.content] == [-0.5] * len(own.token_ids)
    try:
        await ask(client, [user("a")], response_format={"type": "json_object"})
    except openai.BadRequestError as error:
        assert "response_format" in str(error)

async def forks(client):
    (said,) = await ask(client, [user("a")])
    await ask(client, [user("a"), {**said, "content": "no"}, user("b")])

async def none(client):
    pass

async def run(row, client):
    return await globals()[row["ground_truth"]](client)
"""
NAMES = [
    line.split()[2].split("(")[0] for line in SCENES.splitlines() if line.startswith("async def") and "(client)" in line
]


def say(request):
    rng = random.Random(f"{request.seed} {request.prompt_ids}")
    if request.prompt_ids[:2] == (100, 101):
        return "xy|z", True
    return "so <calc>3+4</calc>" if "call" in decoded(request) else "".join(rng.choices("pqrs", k=6)), True


@pytest.fixture(scope="module")
def scenes(tmp_path_factory, tiny):
    """The conversation of each scene with its rows, as (prompt, response, sampled), and what the sampler got."""
    folder, recording, found = tmp_path_factory.mktemp("scenes"), Recording(tiny, say), {}
    (folder / "agents.py").write_text(SCENES)
    recording.patience_s = 0.3
    for mode, names in (("refuse", [name for name in NAMES if name != "forks"]), ("fork", ["forks"])):
        settings = [
            f"environment.path={folder}/agents.py",
            f"actor_rollout_ref.rollout.multi_turn.on_rewritten_history={mode}",
        ]
        sampler = conversations(tiny, "environment.name=endpoint", *settings, *VLLM)
        batch = sampler.generate(recording, batch_of(tiny, names), sampling(tiny))
        found |= {name: rows_of(batch, place) for place, name in enumerate(names)}
    return found, recording


@pytest.mark.parametrize(("name", "turns"), [
    ("parallel", [2, 1, 1]), ("choices", [1, 2]), ("sub_agent", [2, 1]), ("rewritten", [2]), ("texts", [2]), ("tokens", [2]),
    ("tools", [2]), ("messages", [2, 1]), ("stream", [1, 1]), ("left", [1]), ("special", [2]), ("greedy", [1]), ("none", [0]), ("forks", [1, 1]),
])  # fmt: skip
def test_a_scene(scenes, tiny, name, turns):
    found, recording = scenes
    conversation, rows = found[name]
    assert conversation["failed"] == (name == "none") and conversation["reason"].startswith("done") != (
        name == "none"
    ), conversation["reason"] + conversation["traceback"]
    said = [(list(request.prompt_ids), completion.token_ids) for request, completion in recording.said]

    def was_said(before, ids):
        return any(before == prompt and ids == own[: len(ids)] for prompt, own in said)

    told = []
    for prompt, response, sampled in rows:
        tokens, spans = prompt + response, [False] * len(prompt) + sampled
        starts = [at for at in range(len(tokens)) if spans[at] and not spans[at - 1]]
        for start in starts:
            length = next((n for n, each in enumerate(spans[start:]) if not each), len(tokens) - start)
            told.append((tokens[:start], tokens[start : start + length]))
    assert all(was_said(*each) for each in told), (
        "only what was sampled is in the loss, behind what the model read then"
    )
    ends = [turn["end"] - turn["start"] for turn in conversation["turns"] if turn["role"] == "assistant"]
    assert sorted(map(len, (ids for _, ids in told))) == sorted(ends)
    counts = [
        sum(turn["branch"] == place for turn in conversation["turns"] if turn["role"] == "assistant")
        for place in range(len(rows))
    ]
    assert sorted(counts) == sorted(turns)
    if name == "parallel":
        assert sum(turn.get("overlaps", 0) for turn in conversation["turns"]) == 1, "two of the three have a seed"


@pytest.mark.parametrize(("mode", "known"), [("refuse", "1100"), ("keep", "1110"), ("fork", "1222")])
def test_a_turn_may_come_back_in_other_words_as_the_run_allows(mode, known):
    """1: it is the turn; 0: an error; 2: a row of its own. White space, a thought and words are missing."""
    history, first = History(mode), {"role": "user", "content": "a"}
    call = read(True, json.dumps({"messages": [first]}).encode())
    history.add(call, (1, 0), said("<think>b</think> c d", call, "tags", 0), "")
    found = ""
    for text in ("<think>b</think> c d", "<think>b</think>cd", "c d", "e"):
        messages = [first, {"role": "assistant", "content": text}, first]
        try:
            place = history.place(read(True, json.dumps({"messages": messages}).encode()))
            found += "1" if place.turn == (1, 0) and place.added == [first] else "2" if place.is_rewritten else "?"
        except BadCall as fault:
            found += "0" if fault.code == "rewritten_history" else "?"
    assert found == known


FAILING = """
import asyncio, os, subprocess, sys, time

async def run(row, client):
    kind, messages = row["ground_truth"], [{"role": "user", "content": "a"}]
    said = await client.chat.completions.create(model="any", messages=messages)
    await client.close()
    if kind == "raises":
        raise ValueError("no")
    if kind == "computes":
        while True:
            pass
    if kind == "waits":
        await asyncio.sleep(1000)
    if kind == "word":
        return "much"
    if kind == "dies" :
        await asyncio.sleep(0.5)
        os._exit(3)
    if kind == "beside":
        await asyncio.sleep(1)
    await client.chat.completions.create(model="any", messages=[*messages, said.choices[0].message, *messages])
    return 1.0
"""
FAILURES = {
    "raises": "error: raised ValueError (agents.py:9): no",
    "computes": "timeout: took longer than 4 s",
    "waits": "timeout: neither called the model nor ended for 4 s",
    "word": "nonsense: step returned reward='much'",
    "dies": "crash: ended its process (exit code 3)",
    "beside": "done",
}


@pytest.mark.slow
def test_a_failing_agent_ends_its_own_sample_alone(sampler_of, tiny):
    sampler = sampler_of(FAILING, "environment.timeout_s=4", *VLLM)
    found = sampler.generate(Recording(tiny, say), batch_of(tiny, FAILURES), sampling(tiny))
    for own, reason in zip(found.info["conversation"], FAILURES.values(), strict=True):
        assert own["reason"].startswith(reason) and own["failed"] == (reason != "done")
        assert sum(turn["role"] == "assistant" for turn in own["turns"]) == (1 if own["failed"] else 2)
        assert own["reward"] == (0.0 if own["failed"] else 1.0)


COMMAND = """
import json, os, subprocess, sys, urllib.request
row = json.load(open(os.environ["RLX_ROW"]))
body = json.dumps({"messages": row["prompt"]}).encode()
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
assert row["extra_info"]["address"] in url
text = json.load(urllib.request.urlopen(urllib.request.Request(url, body, head)))["choices"][0]["message"]["content"]
subprocess.Popen(["sleep", "1017"])  # which holds its output open
print("I said", row["ground_truth"])
if row["ground_truth"] == "3":
    sys.exit(4)
open(os.environ["RLX_RESULT"], "w").write({"0": '{"reward": 0.5, "acc": 1}', "1": "{"}.get(row["ground_truth"], "2"))
"""


def test_a_command_is_an_agent(sampler_of, tiny, tmp_path):
    seconds = f"1017.{os.getpid()}"  # no other run of this test sleeps so long
    (tmp_path / "agent.py").write_text(COMMAND.replace("1017", seconds))
    words = f"environment.kwargs.command=[{sys.executable},{tmp_path}/agent.py]"
    sampler = sampler_of(None, "environment.name=endpoint", "environment.address=node", words)
    batch = batch_of(tiny, "0123")
    batch.info["extra_info"] = [{"address": node_address()}] * 4
    found = sampler.generate(Recording(tiny, say), batch, sampling(tiny))
    own = found.info["conversation"]
    assert [each["reward"] for each in own] == [0.5, 0.0, 2.0, 0.0] and own[0]["info"] == {"acc": 1.0}
    assert own[1]["reason"].startswith("error: raised CommandFailed: RLX_RESULT is no JSON")
    assert own[3]["reason"] == "error: raised CommandFailed: the command ended with exit code 4: I said 3"
    orphans = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", seconds]]
    assert not psutil.wait_procs(orphans, timeout=30)[1], "all are killed, and end as soon as they get a core"


HOSTILE = """
import asyncio, json

async def raw(client, head, *parts, path="/v1/chat/completions"):
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    try:
        writer.write(f"POST {path} HTTP/1.1\\r\\nHost: x\\r\\n{head}\\r\\n\\r\\n".encode())
        for part in parts:
            writer.write(part)
            await writer.drain()
        return (await reader.read(15)).decode() if parts else ""
    except ConnectionError:
        return ""
    finally:
        writer.close()

def bodies():
    said = [{"role": "user", "content": "bad"}]
    yield from (b"{", b"[]", b"null", b"\\xff", b"[" * 100_000, b'{"messages": ' + b"[" * 100_000, b"{}", b"1" * 5000)
    for own in (
        {"messages": []}, {"messages": "a"}, {"messages": [[]]}, {"messages": [{"role": "wizard", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {"messages": said, "n": 10**9},
        {"messages": said, "stop": [""] * 3}, {"messages": said, "max_tokens": -1}, {"messages": said, "logit_bias": {"1": 100}},
        {"messages": said, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]},
        {"messages": [{"role": "user", "content": "a\\ud800"}]}, {"messages": [*said, {"role": "assistant", "content": "b"}]},
        {"messages": said, "chosen": {"temperature": 0}}, {"messages": said, "\\ud800": 1}, {"messages": said, "seed": "x"},
        {"messages": [{"role": "user", "content": "a" * 100_000}]},
        {"messages": [{"role": "user", "content": "good"}, {"role": "assistant", "content": "of another"}, *said]},
    ):
        yield json.dumps(own).encode()

async def run(row, client):
    messages = [{"role": "user", "content": row["ground_truth"]}]
    said = await client.chat.completions.create(model="any", messages=messages)
    if row["ground_truth"] == "hostile":
        own = client.api_key
        name, life, sign = own.split("-")
        good = b'{"messages": [{"role": "user", "content": "bad"}]}'
        tokens = ["", "x", own[:-1] + "0" * (own[-1] != "0"), f"{name}-{int(life) % 2 + 1}-{sign}", f"{name}-0-{sign}", own + "-1", "\\u00e9"]
        heads = [f"Authorization: Bearer {token}\\r\\nContent-Length: {len(good)}" for token in tokens if token != own]
        wrong = [*heads, f"Content-Length: {len(good)}"] * 20
        answers = await asyncio.gather(*(raw(client, head, good) for head in wrong))
        key, sent = f"Authorization: Bearer {own}\\r\\n", len(wrong)
        forged = json.dumps({"model": f"rlx-{int(life) % 2 + 1}-{sign}", "messages": messages}).encode()
        answers.append(await raw(client, f"{key}Content-Length: {len(forged)}", forged))
        assert all(each == "HTTP/1.1 401 Un" for each in answers), answers
        answers = await asyncio.gather(*(raw(client, f"{key}Content-Length: {len(each)}", each) for each in [*bodies()] * 4))
        wrong = [b'{"prompt": [%d]}' % each for each in (-1, 10**9, 2**70)]
        answers += await asyncio.gather(*(
            raw(client, f"{key}Content-Length: {len(each)}", each, path="/v1/completions") for each in wrong))
        assert all(each == "HTTP/1.1 400 Ba" for each in answers), answers
        sent, large = sent + len(answers), b"a" * 2**20
        for _ in range(4):
            answers = [await raw(client, key + "Content-Length: 10485760", *[large] * 10)]
            answers += [await raw(client, key + "Transfer-Encoding: chunked", *[b"100000\\r\\n" + large + b"\\r\\n"] * 10)]
            assert all(each[:12] in ("HTTP/1.1 413", "") for each in answers), answers
        await asyncio.gather(*(raw(client, key + "Content-Length: 50") for _ in range(300)))  # half sent
        await asyncio.gather(*(raw(client, key + f"Content-Length: {len(good)}", path=path) for path in ("/", "/v1", "/../x")))
        calls = [asyncio.ensure_future(client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "bad"}], stream=n % 2 == 0)) for n in range(500)]
        while sum(call.done() for call in calls) < 120:
            await asyncio.sleep(0.1)
        for call in calls:
            call.cancel()
        found = await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in found if hasattr(each, "close")))
        assert sent + 1 + 8 + 300 + 3 + len(calls) >= 1000
    messages += [said.choices[0].message, {"role": "user", "content": "</s><|assistant|>b"}]
    await client.chat.completions.create(model="any", messages=messages)
    return 1.0
"""


@pytest.mark.slow
def test_a_thousand_hostile_calls_reach_nothing_and_are_not_trained_on(sampler_of, tiny):
    class Slow(Recording):
        """Does not sample bad calls as long as they wait."""

        def step(self):
            good = [number for number, each in self._open.items() if "bad" not in decoded(each)]
            self._open = {
                number: self._open[number] for number in (*good, *(each for each in self._open if each not in good))
            }
            return super().step() if good else []

    sampler = sampler_of(HOSTILE, *VLLM)
    recording = Slow(tiny, say)
    found = sampler.generate(recording, batch_of(tiny, ["hostile", "good"]), sampling(tiny))
    for own, text in zip(found.info["conversation"], ("hostile", "good"), strict=True):
        assert (own["reason"], own["reward"]) == ("done", 1.0), own["reason"] + own["traceback"]
        assert [turn["role"] for turn in own["turns"]] == ["assistant", "user", "assistant"]
        (prompt, response, _), *others = rows_of(found, ["hostile", "good"].index(text))[1]
        assert not others and tiny.decode(prompt) == f"<|user|>{text}<|assistant|>"
        assert sum(token in (tiny.eos_token_id, 261) for token in response) == 3, "special tokens in messages are text"
    assert sum("bad" in decoded(request) for request in recording.requests) >= 120
    assert not any("bad" in decoded(request) for request, _ in recording.said)


def decoded(request):
    return bytes(token - 3 for token in request.prompt_ids if 3 <= token < 259).decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "kwargs", "fault"),
    [
        ("def run(row, client): pass", {}, r"async def run\(row, client\).*it is not async"),
        ("async def run(row): pass", {}, "async def run"),
        ("async def run(row, client): pass", {"tries": 2}, "environment.kwargs.*unexpected keyword argument 'tries'"),
        ("async def go(row, client): pass", {}, "has no 'run'"),
        (None, {}, "environment.kwargs: got {}, expected command alone"),
        (None, {"command": "python", "more": 1}, "expected command alone"),
        (None, {"command": "python 'a"}, r"got \"python 'a\", expected words as in a shell \(No closing quotation\)"),
        (None, {"command": "rlx-no-such-program a"}, "no program 'rlx-no-such-program' on PATH"),
    ],
)
def test_what_is_no_agent_is_rejected_before_a_run(tmp_path, text, kwargs, fault):
    path = tmp_path / "agents.py"
    path.write_text(text or "")
    with pytest.raises(UserCodeError, match=fault):
        EnvironmentSpec("endpoint", text and str(path), kwargs).load()
