"""An agent that knows OpenAI's client and nothing of rlx. It asks, checks the answer and asks again.

rlx train experiment=arithmetic environment.name=endpoint environment.path=examples/agent_openai.py environment.rewards=replace
"""

import re


async def run(row, client, tries: int = 2):
    """Return the reward of one sample; `client` is an openai.AsyncOpenAI whose calls the policy answers."""
    messages = list(row["prompt"])
    for attempt in range(1, tries + 1):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        message = answer.choices[0].message
        found = re.findall(r"####\s*(-?\d+)", message.content)
        if found and found[-1] == str(row["ground_truth"]):
            return {"reward": 1.0 / attempt, "acc": 1.0}
        hint = "Wrong, try again." if found else "Write #### and the number."
        messages += [message, {"role": "user", "content": hint}]
    return {"reward": 0.0, "acc": 0.0}
