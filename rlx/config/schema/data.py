"""Keys of the prompts: `data`."""

from dataclasses import dataclass

from rlx.config.schema.keys import Unused, group, in_state, key, needs, without

ARITHMETIC = "builtin:arithmetic"
PLAIN_SOURCE = "answer"
"""The data source of rows with `data.answer_key` that name none."""
TRUNCATIONS = ("error", "left", "right", "middle")


@dataclass(frozen=True)
class ArithmeticConfig:
    """The generated word problems that `builtin:arithmetic` names in a list of files."""

    difficulty: int = key(
        1,
        "1: a story with one sum or difference; 2: two; 3: also products; 4: bare numbers to 999.",
        choices=(1, 2, 3, 4),
    )
    train_size: int = key(8192, "Distinct training problems.", minimum=1)
    val_size: int = key(512, "Distinct held-out problems; none of them is a training problem.", minimum=1)
    seed: int = key(0, "Seed of the generator.", minimum=0)


@dataclass(frozen=True)
class CustomClassConfig:
    path: str | None = key(
        None,
        "Python file with the dataset class; null: rlx's own.",
        needs("a dataset class needs file and name", "name", expected="=<its name>"),
        is_path=True,
    )
    name: str | None = key(
        None,
        "Name of the class in that file.",
        needs("a dataset class needs file and name", "path", expected="=<its file>"),
    )


@dataclass(frozen=True)
class DataConfig:
    """The source of prompts and their lengths."""

    train_files: tuple[str, ...] = key((ARITHMETIC,), "Files of rows; see docs/data.md.", is_path=True)
    val_files: tuple[str, ...] = key((ARITHMETIC,), "The same, for validation.", is_path=True)
    train_max_samples: int = key(-1, "Use at most so many training rows, the first ones; -1: all.", minimum=-1)
    val_max_samples: int = key(-1, "The same of validation rows; -1: all.", minimum=-1)
    prompt_key: str = key("prompt", "Column with the chat messages (list of {role, content}) or plain text.")
    reward_fn_key: str = key("data_source", "Column that tells which reward function scores the row.")
    answer_key: str | None = key(None, "Column with the right answer, for rows without reward_model.")
    max_prompt_length: int = key(512, "Longest prompt [tokens].", minimum=1)
    max_response_length: int = key(512, "Longest response, or whole conversation after its prompt [tokens].", minimum=1)
    train_batch_size: int = key(1024, "Prompts per training step.", minimum=1)
    gen_batch_size: int | None = key(
        None,
        "Prompts per generation with filter_groups; null: train_batch_size.",
        without("algorithm.filter_groups.enable"),
        minimum=1,
    )
    val_batch_size: int | None = key(None, "Prompts per batch; null: all.", in_state("never validates"), minimum=1)
    shuffle: bool = key(True, "Shuffle the prompts of each epoch.")
    seed: int = key(1, "Seed of the shuffling.", without("shuffle"), minimum=0)
    filter_overlong_prompts: bool = key(False, "Drop prompts longer than max_prompt_length and report how many.")
    truncation: str = key(
        "error",
        "A longer prompt that is not dropped: error, or cut this side.",
        Unused("overlong prompts are dropped, not cut", "filter_overlong_prompts"),
        choices=TRUNCATIONS,
    )
    custom_cls: CustomClassConfig = group(CustomClassConfig, "A dataset class of your own.")
    arithmetic: ArithmeticConfig = group(ArithmeticConfig, "The generated task.", in_state("no arithmetic"))
