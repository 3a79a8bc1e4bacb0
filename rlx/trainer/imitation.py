"""Train `builtin:tiny` by imitation of demonstrated solutions; `rlx.trainer.warm_start` keeps the result.

Shape letters: B rows, T tokens.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlx.config.schema import EnvironmentConfig, PPOConfig
from rlx.data import arithmetic
from rlx.data.seeding import seed_for
from rlx.rewards.gsm8k import compute_score
from rlx.rollout.hf import HFRollout
from rlx.rollout.protocol import Request, Sampling
from rlx.trainer import demonstrations

HELD_OUT = 512
"""Problems that only measure accuracy; neither split of the later run contains them."""
MAX_ANSWER_TOKENS = 64
WARM_UP_STEPS = 50
BETAS = (0.9, 0.98)
SOLUTIONS_PER_PROBLEM = 3
IGNORED = -100


Ids = tuple[int, ...]
Turns = tuple[tuple[Ids, Ids], ...]
"""Pairs of tokens: what the model reads, from the beginning of the conversation, and what it learns to write."""
Accepted = tuple[str, ...]


class Example(NamedTuple):
    """A demonstrated conversation as tokens, the right answer, and for each turn the texts that are as good as its own."""

    turns: Turns
    ground_truth: str
    accepted: tuple[Accepted, ...]


def imitate(
    config: PPOConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[float, int]:
    """Train the model on the device until it has enough skill, and return (accuracy, steps taken)."""
    with _one_thread():
        return _Training(config, model.to(device), tokenizer, device).run()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread for a small model: more threads gain little, and lose much if other processes need the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Training:
    """One supervised training. All random numbers come from generators seeded by the model's seed."""

    def __init__(
        self, config: PPOConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device: torch.device
    ):
        self._settings, self._device = config.warm_start, device
        self._model, self._tokenizer = model, tokenizer
        self._train, self._held_out = _examples(config, tokenizer)
        self._seed = config.actor_rollout_ref.model.tiny.seed
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=self._settings.lr, betas=BETAS, weight_decay=0.0)
        self._rollout = HFRollout(model.config, device)
        self._speaker = tokenizer.convert_tokens_to_ids("<|assistant|>")

    def run(self) -> tuple[float, int]:
        """Train until the target or the last step; return (accuracy, steps taken)."""
        settings, accuracy, step = self._settings, 0.0, 0
        batches = self._batches()
        with _progress_bar() as bar:
            task = bar.add_task("warm start", total=settings.max_steps, loss=float("nan"), accuracy=0.0)
            for step in range(1, settings.max_steps + 1):
                loss = self._step(next(batches), step)
                if step % settings.eval_every == 0 or step == settings.max_steps:
                    accuracy = self._accuracy()
                bar.update(task, completed=step, loss=loss, accuracy=accuracy)
                if accuracy >= settings.target_accuracy:
                    break
            bar.update(task, total=step)
        return accuracy, step

    def _batches(self) -> Iterator[tuple[list[Example], list[Example]]]:
        """Yield endless pairs: problems to solve, each once per pass, and problems whose solution alone is learned."""
        rng = random.Random(seed_for("warm start", self._seed))
        size = min(self._settings.batch_size, len(self._train))
        while True:
            order = rng.sample(self._train, len(self._train))
            for start in range(0, len(order) - size + 1, size):
                yield order[start : start + size], rng.choices(self._train, k=SOLUTIONS_PER_PROBLEM * size)

    def _step(self, batch: tuple[list[Example], list[Example]], step: int) -> float:
        """Take one optimizer step; return the loss per token of the solutions."""
        problems, solutions = batch
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr * min(1.0, step / WARM_UP_STEPS)
        self._optimizer.zero_grad()
        loss = self._backward([example.turns for example in problems])
        # Solutions alone teach arithmetic too, at a fraction of the cost, because most tokens belong to the questions. Several turns
        # are there where arithmetic is left to a tool.
        if self._first(self._held_out[0]) == 0:
            self._backward([(((self._speaker,), example.turns[0][1]),) for example in solutions])
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        return loss

    def _backward(self, rows: list[Turns]) -> float:
        """Add the gradient of the mean loss over the learned tokens, and return that loss."""
        ids_BT, labels_BT = (x.to(self._device) for x in _padded(rows))
        logits = self._model(input_ids=ids_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        return loss.item()

    def _accuracy(self) -> float:
        """Return the share of the held-out problems that greedy decoding solves. See `warm_start`."""
        self._rollout.update_weights(self._model.state_dict().items(), version=0)
        greedy = Sampling(MAX_ANSWER_TOKENS, temperature=0.0, stop_token_ids=(self._tokenizer.eos_token_id,))
        turns = [(place, turn) for place, example in enumerate(self._held_out) for turn in range(len(example.turns))]
        requests = [Request(self._given(self._held_out[place], turn), 0, greedy) for place, turn in turns]
        right = [1.0] * len(self._held_out)
        for (place, turn), completion in zip(turns, self._rollout.generate(requests), strict=True):
            score = self._score(self._held_out[place], turn, completion.token_ids)
            right[place] = min(right[place], score)
        return mean(right)

    def _given(self, example: Example, turn: int) -> Ids:
        """Return what the model reads when a turn is measured."""
        prompt, answer = example.turns[turn]
        return prompt + answer[: self._first(example)]

    def _score(self, example: Example, turn: int, token_ids: list[int]) -> float:
        """Return 1 if a turn of the model is right, else 0."""
        ids = [*example.turns[turn][1][: self._first(example)], *token_ids]
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        if self._first(example):
            return float(text in example.accepted[turn])
        return compute_score(arithmetic.ARITHMETIC_SOURCE, text, example.ground_truth)

    @staticmethod
    def _first(example: Example) -> int:
        """Return the number of tokens of a turn that are given: one, if the problem may be solved in other turns, too."""
        return int(len(example.turns) > 1)


def _examples(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Example], list[Example]]:
    """Return the training problems, and further ones of the training split that no training run gets.

    If some are demonstrated in several turns, the latter are among those.
    """
    task = config.data.arithmetic
    rows = arithmetic.make_problems(replace(task, train_size=task.train_size + HELD_OUT), "train")
    examples = [_example(row, config.environment, tokenizer) for row in rows]
    held_out = examples[task.train_size :]
    return examples[: task.train_size], [each for each in held_out if len(each.turns) > 1] or held_out


def _example(row: dict[str, Any], environment: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> Example:
    messages = demonstrations.demonstration(row, environment)
    turns, accepted = [], []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True, return_dict=False)
            answer = tokenizer(message["content"], add_special_tokens=False).input_ids
            turns.append((tuple(prompt), (*answer, tokenizer.eos_token_id)))
            accepted.append(message.get("accepted", (message["content"],)))
    return Example(tuple(turns), row["reward_model"]["ground_truth"], tuple(accepted))


def _padded(rows: list[Turns]) -> tuple[Tensor, Tensor]:
    """Return ids and labels (B, T), right padded; labels are IGNORED outside of what is learned."""
    ids = [torch.tensor(turns[-1][0] + turns[-1][1]) for turns in rows]
    labels = [torch.full_like(row, IGNORED) for row in ids]
    for turns, row in zip(rows, labels, strict=True):
        for prompt, answer in turns:
            row[len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed}"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("accuracy {task.fields[accuracy]:.1%}"),
        TimeElapsedColumn(),
        console=Console(force_terminal=sys.stdout.isatty()),  # ignores FORCE_COLOR, which is set for log files too
    )
