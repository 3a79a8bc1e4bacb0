"""Keys of conversations: `environment`, and `multi_turn` of the rollout."""

from dataclasses import dataclass
from typing import Any

from rlx.config.schema.keys import key, needs

TOOL_FORMATS = ("tags", "hermes", "llama3_json", "mistral", "qwen3_coder")


@dataclass(frozen=True)
class MultiTurnConfig:
    max_assistant_turns: int | None = key(
        None, "Most turns of the model; null: as many as its tokens allow.", minimum=1
    )
    max_user_turns: int | None = key(
        None, "Most answers of the environment that the model reads; null: as many as its tokens allow.", minimum=1
    )
    max_turn_tokens: int | None = key(
        None,
        "Longest turn of the model [tokens]; null: what data.max_response_length leaves. The environment gets a turn that is cut, "
        "and the conversation goes on.",
        minimum=1,
        at_most="data.max_response_length",
    )
    max_tool_response_length: int = key(256, "Longer outputs of tools (role tool) are cut [characters].", minimum=1)
    tool_response_truncate_side: str = key(
        "middle", "Part that remains of them: left, right, or both ends (middle).", choices=("left", "middle", "right")
    )
    format: str = key("tags", "How the model writes calls of tools. See docs/environments.md.", choices=TOOL_FORMATS)
    on_rewritten_history: str = key(
        "refuse",
        "When the chat template rewrites earlier turns, such as without their thinking: refuse (the row ends), keep the turns as "
        "sampled, or fork: continue in another row with the rewritten history.",
        choices=("refuse", "keep", "fork"),
    )


@dataclass(frozen=True)
class EnvironmentConfig:
    """The other side of conversations; with neither `name` nor `path` each sample is a single turn. See docs/environments.md."""

    name: str | None = key(
        None, "One of rlx's own, such as python; with `path` the class, tool or list of tools in that file."
    )
    path: str | None = key(None, "Python file with an environment or tools of your own.", is_path=True)
    kwargs: dict[str, Any] = key({}, "Arguments of the class, by name.")
    processes: int = key(4, "Processes with environments, beside each process that samples.", minimum=1)
    max_parallel: int | None = key(
        None, "Conversations at a time, of each process that samples; null: all of its rows.", minimum=1
    )
    timeout_s: float = key(60.0, "Longest reset or step [seconds].", exclusive_minimum=0)
    memory_limit_gb: float | None = key(
        8.0, "Memory that each process may allocate [10^9 bytes]; null: no limit.", exclusive_minimum=0
    )
    on_failure: str = key(
        "end_row",
        "When an environment raises, takes too long, dies or answers nonsense: end its row, or the run.",
        choices=("end_row", "end_run"),
    )
    failure_reward: float = key(0.0, "Reward of the turn at which it fails.")
    rewards: str = key(
        "add",
        "Its rewards: add them to the reward functions' score, or replace that.",
        needs(
            "the environment's rewards replace those of the reward model",
            "reward_model.enable",
            False,
            when=lambda rewards: rewards == "replace",
        ),
        choices=("add", "replace"),
    )
