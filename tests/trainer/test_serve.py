"""The command `rlx serve`: the policy of a run or of a Hugging Face folder, for any client of OpenAI's API."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.error import HTTPError
from urllib.request import urlopen

import openai
import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.export import main as export
from rlx.serve import main

CHAT = [{"role": "user", "content": "3+4?"}]


def greedy(folder, tokens):
    """What transformers answers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    ends = ids[-1] == tokenizer.eos_token_id
    return tokenizer.decode(ids[:-1] if ends else ids), "stop" if ends else "length"


def rejected(call):
    with pytest.raises(openai.APIStatusError) as fault:
        call()
    return fault.value.status_code, fault.value.code


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["hf", pytest.param("vllm", marks=pytest.mark.nightly)])
def test_a_served_policy_answers_clients_and_ends_by_ctrl_c(train, tmp_path, sampler):
    run, _ = train("trainer.total_training_steps=1", "trainer.save_freq=1", "actor_rollout_ref.actor.optim.lr=1e-2")
    assert export([str(run / "checkpoints/global_step_1"), str(tmp_path / "model"), "--dtype", "fp32"]) == 0
    command = [sys.executable, "-m", "rlx.serve", str(run), "--port", "0", "--name", "ours"]
    command += [f"actor_rollout_ref.rollout.name={sampler}", "trainer.device=cpu"]
    # What a shell starts in the background ignores the signal.
    options = {
        "text": True,
        "env": os.environ | {"RLX_API_KEY": ""},
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as server:
        try:
            last = next(line for line in server.stdout if line.startswith("export"))
            url, key = (word.partition("=")[2] for word in last.split()[1:])
            with pytest.raises(HTTPError, match="401"):  # an empty key is none
                urlopen(f"{url}/models")
            client = openai.OpenAI(base_url=url, api_key=key)
            chat = client.chat.completions.create
            assert [model.id for model in client.models.list()] == ["ours"]
            own = {"model": "ours", "messages": CHAT, "max_tokens": 16}
            choice = chat(**own, temperature=0, logprobs=True).choices[0]
            assert (choice.message.content, choice.finish_reason) == greedy(tmp_path / "model", 16)
            assert all(each.logprob <= 0 for each in choice.logprobs.content)
            seeded = [[each.message.content for each in chat(**own, n=3, seed=seed).choices] for seed in (1, 1, 2)]
            assert seeded[0] == seeded[1] != seeded[2] and len(set(seeded[0])) > 1
            *_, other, _ = choice.message.content
            stopped = chat(**own, temperature=0, stop=other, tools=[{"type": "function", "function": {"name": "f"}}])
            assert stopped.choices[0].message.content == choice.message.content.partition(other)[0]
            pieces = chat(**own, temperature=0, stream=True)
            assert "".join(each.choices[0].delta.content or "" for each in pieces) == choice.message.content
            text = client.completions.create(
                model="ours", prompt="3+", max_tokens=3, top_p=0.5, extra_body={"top_k": 5}
            )
            assert text.usage.completion_tokens == 3 and text.model == "ours"
            assert rejected(lambda: chat(**own, top_p=2)) == (400, "invalid_value")
            for ids in ([-1], [3, 10**9]):
                asked = partial(client.completions.create, model="", prompt=ids)
                assert rejected(asked) == (400, "invalid_value")
            assert rejected(lambda: chat(model="", messages=[{"role": "user", "content": "a" * 9999}])) == (
                400,
                "context_length_exceeded",
            )
            assert rejected(lambda: openai.OpenAI(base_url=url, api_key="rlx-1-0").models.list()) == (
                401,
                "invalid_api_key",
            )
            with ThreadPoolExecutor(16) as threads:
                contents = threads.map(lambda seed: chat(**own, seed=seed).choices[0].message.content, [1, 2] * 40)
                assert {*contents} == {seeded[0][0], seeded[2][0]}
            children = psutil.Process(server.pid).children(recursive=True)
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0 and "is closed" in server.stdout.read()
        assert children and not psutil.wait_procs(children, timeout=10)[1]


def test_a_service_that_cannot_start_says_why_at_once(untrained, tmp_path, capsys):
    shutil.copytree(untrained, tmp_path / "model", ignore=lambda _, names: [each for each in names if "token" in each])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = {
            (str(untrained), "--port", port): f"127.0.0.1:{port}: got Address already in use, expected .* set --port",
            (str(untrained), "--host", "203.0.113.1"): "got Cannot assign requested address, .* set --host",
            (str(untrained), "--port", "99999"): "got .*0-65535, expected .* set --port",
            (str(tmp_path / "no"),): "does not exist, expected a run",
            (str(tmp_path / "model"),): "tokenizer: .* has none of .* save the tokenizer",
            (str(untrained), "--context", "1000000"): "--context: got 1000000 tokens, expected 2 to",
            (str(untrained), "--api-key", "a b\n"): "--api-key or RLX_API_KEY: got blanks",
            (
                str(untrained),
                "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            ): "got 2, expected 1, .*`vllm serve",
            (str(untrained), "actor_rollout_ref.rollout.nam=hf"): "did you mean actor_rollout_ref.rollout.name",
        }
        for words, text in told.items():
            assert main([*words] if "--port" in words else [*words, "--port", "0"]) == 2
            said = " ".join(capsys.readouterr().err.split())
            assert re.search(text, said), said
