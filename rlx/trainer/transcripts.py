"""Keep each training row with its tokens, turns and rewards: `<run>/transcripts/step_000001.jsonl`, a line per row.

Lists of a line have one entry per token, from the prompt's first on. Entries outside the policy's tokens are null, but for the
tokens themselves.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlx.config.schema import PPOConfig
from rlx.config.schema.roles import has_environment
from rlx.data.batch import Batch
from rlx.trainer.environment_rows import BRANCH, CONVERSATION
from rlx.trainer.samples import dump

DIGITS = 5


def keeps_transcripts(config: PPOConfig) -> bool:
    asked = config.trainer.transcripts
    return has_environment(config) if asked is None else asked


class Transcripts:
    """Writes files of a folder while the run goes on, since 600,000 tokens take seconds."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, folder: Path):
        self._tokenizer, self._folder = tokenizer, folder
        self._writer, self._begun = ThreadPoolExecutor(1), Future[None]()
        self._begun.set_result(None)

    def begin(self, step: int, batch: Batch) -> None:
        """Write those of a step in the order of prompts, samples and branches. Raises what `settle` raises."""
        self.settle()
        known, decode = batch["input_ids"].unique().tolist(), self._tokenizer.decode
        # Here, since two threads must not use a tokenizer.
        pieces = {token: decode([token], clean_up_tokenization_spaces=False) for token in known}
        self._begun = self._writer.submit(dump, _records(step, batch, pieces), self._folder, f"step_{step:06d}")

    def settle(self) -> None:
        """Wait for the last ones. Raises StorageError."""
        self._begun.result()


def _records(step: int, batch: Batch, pieces: dict[int, str]) -> Iterator[dict[str, Any]]:
    groups, samples = batch["group_id"].tolist(), batch.info["sample"]
    branches = batch[BRANCH].tolist() if BRANCH in batch else [0] * len(batch)
    gaps = batch["old_log_probs"] - batch["rollout_log_probs"] if "rollout_log_probs" in batch else None
    for row in sorted(range(len(batch)), key=lambda row: (groups[row], samples[row], branches[row])):
        ids = batch["input_ids"][row][batch["attention_mask"][row]].tolist()
        written = batch["attention_mask"][row, batch.prompt_length :]
        prompt, mask = len(ids) - int(written.sum()), batch["response_mask"][row][written].tolist()

        def of_tokens(
            column: Tensor, row: int = row, prompt: int = prompt, mask: list[bool] = mask
        ) -> list[float | None]:
            values = column[row, : len(mask)].double().round(decimals=DIGITS).tolist()
            return [None] * prompt + [x if own else None for x, own in zip(values, mask, strict=True)]

        conversation = batch.info[CONVERSATION][row] if CONVERSATION in batch.info else {}
        yield {
            "step": step,
            "group": groups[row],
            "sample": samples[row],
            "branch": branches[row],
            "data_source": batch.info["data_source"][row],
            "reward": round(float(batch["scores"][row]), DIGITS),
            "numbers": batch.info["numbers"][row],
            "token_ids": ids,
            "tokens": [pieces[token] for token in ids],
            "loss_mask": [0] * prompt + [int(own) for own in mask],
            "advantages": of_tokens(batch["advantages"]),
            "log_prob_gap": [None] * len(ids) if gaps is None else of_tokens(gaps),
            "turns": [turn for turn in conversation["turns"] if turn["branch"] == branches[row]]
            if conversation
            else _single_turn(batch, row, prompt, mask),
            "reason": conversation.get("reason", ""),
            **({"traceback": trace} if (trace := conversation.get("traceback")) else {}),
        }


def _single_turn(batch: Batch, row: int, prompt: int, mask: list[bool]) -> list[dict[str, Any]]:
    """Return the turns of a sample without an environment, whose response is one turn."""
    place = {"start": prompt, "end": prompt + len(mask), "role": "assistant", "text": batch.info["response_text"][row]}
    return [{**place, "seconds": None, "reward": None, "calls": [], "finish_reason": None}] if mask else []
