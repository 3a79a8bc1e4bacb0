"""Keys of conversations: `environment`, and `multi_turn` of the rollout."""

from dataclasses import dataclass
from typing import Any

from rlx.config.schema.keys import key, needs

TOOL_FORMATS = ("tags", "hermes", "llama3_json", "mistral", "qwen3_coder")


@dataclass(frozen=True)
class MultiTurnConfig:
    max_assistant_turns: int | None = key(None, "Most turns of the model; null: no limit.", minimum=1)
    max_user_turns: int | None = key(None, "Most answers of the environment; null: no limit.", minimum=1)
    max_turn_tokens: int | None = key(
        None,
        "Longest turn of the model [tokens], then cut; null: what data.max_response_length leaves.",
        minimum=1,
        at_most="data.max_response_length",
    )
    max_tool_response_length: int = key(256, "Longer outputs of tools (role tool) are cut [characters].", minimum=1)
    tool_response_truncate_side: str = key(
        "middle", "Part of them that remains; middle: both ends.", choices=("left", "middle", "right")
    )
    format: str = key("tags", "How the model writes calls of tools. See docs/environments.md.", choices=TOOL_FORMATS)
    on_rewritten_history: str = key(
        "refuse",
        "When the template rewrites earlier turns: refuse ends the row, keep keeps the turns as sampled, fork continues in another row.",
        choices=("refuse", "keep", "fork"),
    )


@dataclass(frozen=True)
class EnvironmentConfig:
    """The other side of conversations; with neither `name` nor `path` each sample is a single turn. See docs/environments.md."""

    name: str | None = key(None, "One of rlx's own; with `path` a class, tool or list of tools.")
    path: str | None = key(None, "Python file with an environment or tools of your own.", is_path=True)
    kwargs: dict[str, Any] = key({}, "Arguments of the class, by name.")
    processes: int = key(4, "Processes with environments, beside each process that samples.", minimum=1)
    max_parallel: int | None = key(None, "Conversations at a time of each sampling process; null: all.", minimum=1)
    timeout_s: float = key(60.0, "Longest reset or step [seconds].", exclusive_minimum=0)
    memory_limit_gb: float | None = key(
        8.0, "Memory of each process [10^9 bytes]; null: no limit.", exclusive_minimum=0
    )
    on_failure: str = key(
        "end_row", "When an environment raises, hangs, dies or answers nonsense.", choices=("end_row", "end_run")
    )
    failure_reward: float = key(0.0, "Reward of the turn at which it fails.")
    rewards: str = key(
        "add",
        "How its rewards join the reward functions' score.",
        needs(
            "the environment's rewards replace those of the reward model",
            "reward_model.enable",
            False,
            when=lambda rewards: rewards == "replace",
        ),
        choices=("add", "replace"),
    )
