"""Prompts from files: read, checked and tokenised once at the start, then given out by index."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from rlx.config.schema import ARITHMETIC, DataConfig
from rlx.data.arithmetic import make_problems
from rlx.data.batch import Batch, left_padded
from rlx.data.files import DataError, ListRows, RowFault, RowFaults, Rows, open_rows
from rlx.data.forms import Content, Prompt, ToPrompt, form_of, from_verl, prompts_of, to_prompt
from rlx.user_code import DATASET, TEMPLATE_CHAT_S, TEMPLATE_LIMIT_S, UserCodeError, call_within, load_callable

INTERFACE = ("__len__", "batch", "report")
"""The attributes that a user's data set class must have."""
CHUNK_ROWS = 512
LOOK_S = 60.0
"""For the rows that a tokenizer does not take [s]."""
BAR_FROM_ROWS = 20_000
CORRECT_ANSWER = (
    "correct the answer, remove the row, or score such rows with a function of your own: custom_reward_function.path"
)


class _File(NamedTuple):
    name: str
    rows: Rows
    convert: ToPrompt


class PromptDataset:
    """The prompts of several files in order.

    Args:
        files: Parquet or JSONL in verl's schema or GSM8K's own, or `builtin:arithmetic`.
        config: columns, lengths, truncation.
        tokenizer: with a chat template if prompts are chats.
        split: "train" or "val"; decides on the generated problems and on max_samples.

    Attributes:
        report: how many prompts were dropped or cut; empty if none were.
        data_sources: those of the remaining rows.
        digest: of the remaining rows in order: prompt, answer, data source and extra_info. Names of files and columns do not enter.

    Raises:
        DataError: names the files, all faulty rows with their number, and for the first of them got, expected, remedy.
    """

    def __init__(self, files: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str):
        self._config, self._tokenizer, self._split = config, tokenizer, split
        self._pad_token_id = _pad_token_id(tokenizer)
        self._look_until = 0.0  # not yet: no row was refused
        self._files = [self._open(file) for file in files]
        self._ends = np.cumsum([len(file.rows) for file in self._files])
        self._digests: list[int] = []
        self._answers: list[tuple[str, Any]] = []
        self._lengths, sources = self._measure()
        overlong = self._lengths > config.max_prompt_length
        self._kept = np.flatnonzero(~overlong) if config.filter_overlong_prompts else np.arange(len(overlong))
        self.report = self._describe(int(overlong.sum()))
        kept = self._kept.tolist()
        self.data_sources = frozenset(sources[row] for row in kept)
        self.digest = xxhash.xxh64(
            np.array([self._digests[row] for row in kept], dtype=np.uint64).tobytes()
        ).hexdigest()
        self._digests = []
        if not len(self._kept):
            few = f"data.{split}_max_samples and the files give 0 rows; raise the one, or name other files"
            why = f"{self.report}; raise data.max_prompt_length" if len(overlong) else few
            raise DataError(f"{', '.join(files)}: no prompt is left; {why}")

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the prompts at these indices, in this order.

        Returns:
            prompt_ids (B, P) int64 and prompt_mask (B, P) bool, left padded to the longest of them; info data_source,
            ground_truth, extra_info, raw_prompt (uncut) and prompt_text, the text of the ids.
        """
        prompts = []
        for position in self._kept[list(indices)].tolist():
            number = int(np.searchsorted(self._ends, position, side="right"))
            file = self._files[number]
            row = position - int(self._ends[number]) + len(file.rows)
            prompts.append(to_prompt(file.convert, file.rows.read(row, row + 1)[0], row))
        ids = [self._cut(tokens) for tokens in self._tokenise([prompt.content for prompt in prompts])]
        prompt_ids, prompt_mask = left_padded(ids, self._pad_token_id)
        info = {
            "data_source": [prompt.data_source for prompt in prompts],
            "ground_truth": [prompt.ground_truth for prompt in prompts],
            "extra_info": [prompt.extra_info for prompt in prompts],
            "raw_prompt": [prompt.content for prompt in prompts],
            "prompt_text": self._tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False),
        }
        return Batch.of({"prompt_ids": prompt_ids, "prompt_mask": prompt_mask}, info)

    def answers(self) -> dict[int, tuple[str, Any]]:
        """Return data source and ground truth of each prompt, by index."""
        return dict(enumerate(self._answers[row] for row in self._kept.tolist()))

    def require_answers(self, faults: Mapping[int, str]) -> None:
        """Raise DataError that names the rows whose answers cannot be used; `faults` says why, by index."""
        found = RowFaults()
        for index, what in faults.items():
            position = int(self._kept[index])
            number = int(np.searchsorted(self._ends, position, side="right"))
            file = self._files[number]
            found.add(
                file.name,
                file.rows,
                position - int(self._ends[number]) + len(file.rows),
                RowFault(what, CORRECT_ANSWER),
            )
        found.end()

    def _open(self, name: str) -> _File:
        if name == ARITHMETIC:
            rows: Rows = ListRows(make_problems(self._config.arithmetic, self._split))
            return _File(name, rows, lambda row, _: from_verl(row))
        rows = open_rows(name)
        chats = bool(self._tokenizer.chat_template)
        return _File(name, rows, form_of(name, rows.columns, self._config, self._split, chats))

    def _measure(self) -> tuple["np.ndarray[Any, np.dtype[np.int64]]", list[str]]:
        """Return length in tokens and data source of each usable row, and find faulty rows before training begins."""
        most = {"train": self._config.train_max_samples, "val": self._config.val_max_samples}[self._split]
        room = int(self._ends[-1]) if most < 0 else min(most, int(self._ends[-1]))
        chunks: list[tuple[_File, range]] = []
        left = room
        for file in self._files:
            stop = min(len(file.rows), left)
            chunks += [(file, range(start, min(start + CHUNK_ROWS, stop))) for start in range(0, stop, CHUNK_ROWS)]
            left -= stop
        lengths: list[int] = []
        sources: list[str] = []
        faults = RowFaults()
        for file, part in track(chunks, f"{self._split} prompts", disable=room < BAR_FROM_ROWS):
            prompts = prompts_of(*file, part, faults)
            sources += [sys.intern(prompt.data_source) for prompt in prompts.values()]
            self._digests += [_digest(prompt) for prompt in prompts.values()]
            self._answers += [(sys.intern(prompt.data_source), prompt.ground_truth) for prompt in prompts.values()]
            for row, tokens in self._tokenise_of(file, prompts, faults).items():
                if (fault := self._fault_of_length(len(tokens))) is not None:
                    faults.add(file.name, file.rows, row, fault)
                lengths.append(len(tokens))
        faults.end()
        return np.array(lengths, dtype=np.int64), sources

    def _fault_of_length(self, length: int) -> RowFault | None:
        limit = self._config.max_prompt_length
        if not length:
            return RowFault("the prompt is empty, expected at least one token")
        if length > limit and self._config.truncation == "error" and not self._config.filter_overlong_prompts:
            return RowFault(
                f"the prompt has {length} tokens, data.max_prompt_length is {limit}",
                "raise data.max_prompt_length, set data.filter_overlong_prompts=True to drop such rows, or data.truncation=left, "
                "right or middle to cut them",
            )
        return None

    def _describe(self, overlong: int) -> str:
        if not overlong:
            return ""
        done = "dropped" if self._config.filter_overlong_prompts else f"cut ({self._config.truncation})"
        return (
            f"{self._split} prompts: {done} {overlong:,} of {len(self._lengths):,}, which are longer than "
            f"data.max_prompt_length={self._config.max_prompt_length} tokens (the longest has {int(self._lengths.max()):,})"
        )

    def _tokenise_of(self, file: _File, prompts: dict[int, Prompt], faults: RowFaults) -> dict[int, list[int]]:
        """Return the tokens of the prompts that the tokenizer takes, by row; the others go to `faults`."""
        contents = {row: prompt.content for row, prompt in prompts.items()}
        try:
            return dict(zip(contents, self._tokenise(list(contents.values())), strict=True))
        except Exception:  # templates and tokenizers raise any kind of error; look for the rows, else raise it as it is
            self._look_until = self._look_until or time.monotonic() + LOOK_S
            found: dict[int, list[int]] = {}
            for row, content in contents.items():
                try:
                    found[row] = self._tokenise([content])[0]
                except Exception as fault:
                    faults.add(file.name, file.rows, row, _refused(fault))
                if time.monotonic() > self._look_until:
                    faults.end()
                    raise
            if len(found) == len(contents):
                raise
            return found

    def _tokenise(self, contents: list[Content]) -> list[list[int]]:
        chats = [content for content in contents if not isinstance(content, str)]
        texts = [content for content in contents if isinstance(content, str)]
        # A template is a program that came with the model
        limit_s, template = TEMPLATE_LIMIT_S + TEMPLATE_CHAT_S * len(chats), self._tokenizer.apply_chat_template
        ids = call_within(limit_s, template, chats, add_generation_prompt=True, return_dict=False) if chats else []
        of_chats, of_texts = iter(ids), iter(self._tokenise_texts(texts))
        return [next(of_texts if isinstance(content, str) else of_chats) for content in contents]

    def _tokenise_texts(self, texts: list[str]) -> list[list[int]]:
        """Tokenise texts, without the EOS that some tokenizers add and after which a model would generate nothing."""
        ids = self._tokenizer(texts)["input_ids"] if texts else []
        end = self._tokenizer.eos_token_id
        return [tokens[:-1] if tokens and tokens[-1] == end else tokens for tokens in ids]

    def _cut(self, tokens: list[int]) -> list[int]:
        limit = self._config.max_prompt_length
        if len(tokens) <= limit:
            return tokens
        from_start = {"left": 0, "right": limit, "middle": limit // 2}[self._config.truncation]
        return tokens[:from_start] + tokens[len(tokens) - limit + from_start :]


def _digest(prompt: Prompt) -> int:
    parts = (prompt.content, prompt.data_source, prompt.ground_truth, prompt.extra_info)
    return xxhash.xxh64_intdigest(repr(parts).encode("utf-8", "surrogatepass"))


def _refused(fault: Exception) -> RowFault:
    return RowFault(
        f"the tokenizer or its chat template does not take this prompt ({type(fault).__name__}: {fault})",
        "use an instruct model, whose template fits, or plain text",
    )


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise DataError(
        f"{type(tokenizer).__name__} has neither pad_token nor eos_token, expected one of them to pad prompts with"
    )


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str) -> PromptDataset:
    """Return the data set of a split, of the user's own class if data.custom_cls names one.

    Raises DataError for a faulty file or row, and UserCodeError if the user's class cannot be loaded or lacks part of the
    interface.
    """
    files = {"train": config.train_files, "val": config.val_files}[split]
    custom = config.custom_cls
    if custom.path is None:
        return PromptDataset(files, config, tokenizer, split)
    key = DATASET.key
    if custom.name is None:
        got = f"{key}.path is {custom.path!r}, but {key}.name is not set"
        raise UserCodeError(f"{got}; expected the name of the class in it")
    dataset: PromptDataset = load_callable(custom.path, custom.name, DATASET)(files, config, tokenizer, split)
    missing = [name for name in INTERFACE if not hasattr(dataset, name)]
    if missing:
        raise UserCodeError(
            f"{key}: {custom.name} in {custom.path} lacks {missing}, expected {list(INTERFACE)} as in PromptDataset"
        )
    return dataset
