"""Conversations that the warm start imitates, so that reinforcement learning has some right turns to reinforce."""

from typing import Any

from rlx.data.seeding import seed_for

Message = dict[str, Any]

CALLS = 4
"""With a calculator one problem in this many is demonstrated with calls, the others by working in the head. So the model knows the
form of a call, and reinforcement learning has to find out that calls pay."""


def demonstration(row: dict[str, Any], environment: str | None) -> list[Message]:
    """Return the conversation of a row of `builtin:arithmetic`.

    Args:
        row: with the worked answer in extra_info.
        environment: name of the run's built-in environment; None: the answer is one turn.
    """
    question, solution = row["prompt"], row["extra_info"]["answer"]
    is_called = seed_for("demonstration", question[-1]["content"]) % CALLS == 0
    if environment != "calculator" or not is_called:
        return [*question, {"role": "assistant", "content": solution}]
    messages = list(question)
    *steps, answer = solution.split("\n")
    for step in steps:
        expression, result = step.split("=")
        messages.append({"role": "assistant", "content": f"<calc>{expression}</calc>"})
        messages.append({"role": "tool", "content": result})
    return [*messages, {"role": "assistant", "content": answer}]
