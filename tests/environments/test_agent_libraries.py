"""Agents' loops of known libraries run as they are, and each turn continues the tokens of the one before."""

import importlib.util

import pytest
from in_this_process import VLLM, Recording, batch_of, conversations, rows_of, sampling

from rlx.models.tiny import make_tiny_tokenizer

CALC = """
def calc(expression: str) -> str:
    \"\"\"Return the value of a sum.

    Args:
        expression: such as 1+2.
    \"\"\"
    return str(sum(map(int, expression.split("+"))))
"""
OPENAI_AGENTS = f"""
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)

{CALC}

async def run(row, client):
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="sums", instructions="Use calc.", model=model, tools=[function_tool(calc)])
    found = await Runner.run(agent, row["prompt"][0]["content"])
    return float(found.final_output == row["ground_truth"])
"""
SMOLAGENTS = f"""
import asyncio

from smolagents import OpenAIModel, ToolCallingAgent, tool

{CALC}

async def run(row, client):
    model = OpenAIModel("policy", api_base=str(client.base_url), api_key=client.api_key, tool_choice="auto")
    agent = ToolCallingAgent([tool(calc)], model, instructions="Use calc.", verbosity_level=0)
    found = await asyncio.to_thread(agent.run, row["prompt"][0]["content"], max_steps=3)
    return float(found == row["ground_truth"])
"""
# Each with what the policy says first and then; smolagents sends earlier turns in words of its own.
LIBRARIES = {
    "agents": (OPENAI_AGENTS, ["<calc>3+4</calc>", "7"], 1, "refuse"),
    "smolagents": (SMOLAGENTS, ["<calc>3+4</calc>", "<final_answer>7</final_answer>"], 2, "fork"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_loop_of_a_library_is_an_agent(tmp_path, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    text, said, rows, mode = LIBRARIES[name]
    (tmp_path / "loop.py").write_text(text)
    tiny, answers = make_tiny_tokenizer(), iter(said)
    own = [f"environment.path={tmp_path}/loop.py", f"actor_rollout_ref.rollout.multi_turn.on_rewritten_history={mode}"]
    own += ["data.max_prompt_length=16384", "data.max_response_length=16384"]
    sampler = conversations(tiny, "environment.name=endpoint", *own, *VLLM)
    recording = Recording(tiny, lambda request: (next(answers), True))
    found = sampler.generate(recording, batch_of(tiny, ["7"]), sampling(tiny))
    conversation, made = rows_of(found, 0)
    assert (conversation["reward"], conversation["reason"]) == (1.0, "done"), conversation["traceback"]
    spans = [
        tiny.decode([token for token, own in zip(response, sampled, strict=True) if own])
        for _, response, sampled in made
    ]
    assert [each.replace("</s>", "") for each in spans] == (["".join(said)] if rows == 1 else said)
