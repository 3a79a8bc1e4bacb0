"""Prompts from files: read, checked and tokenised once at the start, then given out by index."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from rlx.config.schema import ARITHMETIC, DataConfig
from rlx.data.arithmetic import make_problems
from rlx.data.batch import Batch, left_padded, places_of
from rlx.data.files import (
    DataError,
    Prompt,
    RowFault,
    RowFaults,
    Rows,
    ToPrompt,
    form_of,
    from_verl,
    parts_of,
    prompts_of,
    require_prompts,
    text_ids,
    to_prompt,
    together_or_alone,
)
from rlx.data.seeding import seed_for
from rlx.user_code import DATASET, TEMPLATE_CHAT_S, TEMPLATE_LIMIT_S, UserCodeError, call_within, load_callable

INTERFACE = ("__len__", "batch", "report")
"""The attributes that a user's data set class must have."""
CHUNK_ROWS = 512
BAR_FROM_ROWS = 20_000
CORRECT_ANSWER = (
    "correct the answer, remove the row, or score such rows with a function of your own: custom_reward_function.path"
)


class _File(NamedTuple):
    name: str
    rows: Rows
    convert: ToPrompt


class PromptDataset:
    """The prompts of several files in order: of rows, or folders, patterns and URLs of them (docs/data.md), or `builtin:arithmetic`.

    `split` is "train" or "val". Raises DataError that names the files and all faulty rows with their number.

    Attributes:
        report: how many prompts were dropped or cut; empty if none were.
        data_sources: those of the remaining rows.
        has_tools: whether rows name tools, which the chat template shows.
        digest: of the remaining rows in order: prompt, answer, data source and extra_info. Names of files and columns do not enter.
    """

    def __init__(self, files: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str):
        self._config, self._tokenizer, self._split = config, tokenizer, split
        self._pad_token_id = _pad_token_id(tokenizer)
        self._files = [part for file in files for part in self._open(file)]
        self._ends = np.cumsum([len(file.rows) for file in self._files])
        self.has_tools = False
        self._answers: list[tuple[str, Any]] = []  # data source and ground truth
        self._lengths, self._largest, digests = self._measure()
        overlong = self._lengths > config.max_prompt_length
        self._kept = np.flatnonzero(~overlong) if config.filter_overlong_prompts else np.arange(len(overlong))
        self.report = self._describe(int(overlong.sum()))
        self.data_sources = frozenset(self._answers[row][0] for row in self._kept.tolist())
        self.digest = xxhash.xxh64(digests[self._kept].tobytes()).hexdigest()
        if not len(self._kept):
            few = f"data.{split}_max_samples and the files give 0 rows; raise the one, or name other files"
            why = f"{self.report}; raise data.max_prompt_length" if len(overlong) else few
            raise DataError(f"{', '.join(files)}: no prompt is left; {why}")

    def __len__(self) -> int:
        return len(self._kept)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the prompts at these indices, in this order, left padded to the longest of them."""
        prompts = [self._prompt(*self._place(index)) for index in indices]
        ids = [self._cut(tokens) for tokens in self._tokenise(prompts)]
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
            file, row = self._place(index)
            found.add(file.name, file.rows, row, RowFault(what, CORRECT_ANSWER))
        found.end()

    def require_tokens_below(self, size: int) -> None:
        """Raise DataError with all rows whose prompts hold a token that a model with `size` embeddings lacks."""
        faults = RowFaults()
        for index in np.flatnonzero(self._largest[self._kept] >= size).tolist():
            file, row = self._place(index)
            if (token := max(self._cut(self._tokenise([self._prompt(file, row)])[0]))) >= size:
                known = f"got the token {self._tokenizer.convert_ids_to_tokens(token)!r} with id {token}"
                fault = f"{known}, expected ids below {size}, the number of rows of the model's embedding"
                remedy = "resize the model's embeddings, or remove the row"
                faults.add(file.name, file.rows, row, RowFault(fault, remedy))
        faults.end()

    def _place(self, index: int) -> tuple[_File, int]:
        """Return the file of the prompt at an index, and its row there."""
        position = int(self._kept[index])
        number = int(np.searchsorted(self._ends, position, side="right"))
        file = self._files[number]
        return file, position - int(self._ends[number]) + len(file.rows)

    def _prompt(self, file: _File, row: int) -> Prompt:
        return to_prompt(file.convert, file.rows.read(row, row + 1)[0], row)

    def _open(self, name: str) -> list[_File]:
        if name == ARITHMETIC:
            problems = Rows(make_problems(self._config.arithmetic, self._split))
            return [_File(name, problems, lambda row, _: from_verl(row))]
        chats, found = bool(self._tokenizer.chat_template), []
        for part in parts_of(name):
            rows = part.open()
            found.append(_File(part.name, rows, form_of(part.name, rows.columns, self._config, self._split, chats)))
        return found

    def _measure(self) -> "tuple[np.ndarray[Any, Any], ...]":
        """Return tokens, largest token id and digest of each usable row; raise DataError for the faulty ones."""
        most = {"train": self._config.train_max_samples, "val": self._config.val_max_samples}[self._split]
        room = int(self._ends[-1]) if most < 0 else min(most, int(self._ends[-1]))
        chunks: list[tuple[_File, range]] = []
        left = room
        for file in self._files:
            stop = min(len(file.rows), left)
            chunks += [(file, range(start, min(start + CHUNK_ROWS, stop))) for start in range(0, stop, CHUNK_ROWS)]
            left -= stop
        lengths, largest, digests = [], [], []
        faults = RowFaults()
        for file, part in track(chunks, f"{self._split} prompts", disable=room < BAR_FROM_ROWS):
            prompts = prompts_of(*file, part, faults)
            self._answers += [(sys.intern(prompt.data_source), prompt.ground_truth) for prompt in prompts.values()]
            digests += map(_digest, prompts.values())
            self.has_tools |= any(prompt.tools for prompt in prompts.values())
            for row, tokens in self._tokenise_of(file, prompts, faults).items():
                if (fault := self._fault_of_length(len(tokens))) is not None:
                    faults.add(file.name, file.rows, row, fault)
                lengths.append(len(tokens))
                largest.append(max(tokens, default=0))
        faults.end()
        return np.array(lengths, dtype=np.int64), np.array(largest, np.int64), np.array(digests, np.uint64)

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
        results = together_or_alone(self._tokenise, list(prompts.values()))
        found: dict[int, list[int]] = {}
        for row, result in zip(prompts, results, strict=False):
            if isinstance(result, Exception):
                what = (
                    f"the tokenizer or its chat template does not take this prompt ({type(result).__name__}: {result})"
                )
                remedy = "use an instruct model, whose template fits, or plain text"
                faults.add(file.name, file.rows, row, RowFault(what, remedy))
            else:
                found[row] = result
        if len(results) < len(prompts) or (prompts and not found):  # the others would take long, or fail as well
            faults.end()
        return found

    def _tokenise(self, prompts: list[Prompt]) -> list[list[int]]:
        # One call takes the chats with the same tools
        chats = places_of(None if isinstance(each.content, str) else json.dumps(each.tools) for each in prompts)
        texts = chats.pop(None, [])
        ids = text_ids(self._tokenizer, [str(prompts[place].content) for place in texts])
        found = dict(zip(texts, ids, strict=True))
        for places in chats.values():
            contents, tools = [prompts[place].content for place in places], list(prompts[places[0]].tools) or None
            # A template is a program that came with the model
            limit_s, template = TEMPLATE_LIMIT_S + TEMPLATE_CHAT_S * len(places), self._tokenizer.apply_chat_template
            ids = call_within(limit_s, template, contents, tools=tools, add_generation_prompt=True, return_dict=False)
            found |= zip(places, ids, strict=True)
        return [found[place] for place in range(len(prompts))]

    def _cut(self, tokens: list[int]) -> list[int]:
        limit = self._config.max_prompt_length
        if len(tokens) <= limit:
            return tokens
        from_start = {"left": 0, "right": limit, "middle": limit // 2}[self._config.truncation]
        return tokens[:from_start] + tokens[len(tokens) - limit + from_start :]


def _digest(prompt: Prompt) -> int:
    tools = (prompt.tools,) if prompt.tools else ()
    parts = (prompt.content, prompt.data_source, prompt.ground_truth, prompt.extra_info, *tools)
    return xxhash.xxh64_intdigest(repr(parts).encode("utf-8", "surrogatepass"))


def _pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    kind = type(tokenizer).__name__
    raise DataError(f"{kind} has neither pad_token nor eos_token, expected one of them to pad prompts with")


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str) -> PromptDataset:
    """Return the data set of a split, of the user's own class if data.custom_cls names one.

    Raises DataError for a faulty file or row, and UserCodeError for a class that cannot be used.
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
        expected = f"{list(INTERFACE)} as in PromptDataset"
        raise UserCodeError(f"{key}: {custom.name} in {custom.path} lacks {missing}, expected {expected}")
    return dataset


class PromptSampler:
    """Endless batches of prompt indices, epoch after epoch. The driver owns it and saves it in checkpoints.

    The rest at the end of an epoch, less than a batch, is dropped. With `shuffle` each epoch has a permutation of its own.
    `rows` is the digest of the prompts, empty for a user's own class. Raises DataError if batch_size is larger than size.
    """

    def __init__(self, size: int, batch_size: int, shuffle: bool, seed: int, rows: str = ""):
        require_prompts(batch_size, size)
        self._rows = rows
        self._size, self._batch_size, self._shuffle, self._seed = size, batch_size, shuffle, seed
        self._epoch, self._position = 0, 0
        self._order = self._order_of(0)

    @property
    def batches_per_epoch(self) -> int:
        return self._size // self._batch_size

    @property
    def epoch(self) -> int:
        """Number of the pass that the next batch belongs to, from 0."""
        return self._epoch + (self._position + self._batch_size > self._size)

    @property
    def place(self) -> int:
        """Number of prompts before the next batch, from the first epoch on; no other batch has it."""
        return self._epoch * self._size + self._position

    def next(self) -> list[int]:
        """Return the indices of the next batch, all different."""
        if self._position + self._batch_size > self._size:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        batch = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        return [int(index) for index in batch]

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position in plain numbers, and the numbers that its order depends on."""
        rows = {"rows": self._rows} if self._rows else {}
        return {"epoch": self._epoch, "position": self._position, **self._identity(), **rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken, maybe with another batch size. Raises DataError if the order differs."""
        saved = {name: state.get(name) for name in self._identity()}
        if saved != self._identity():
            raise DataError(
                f"the checkpoint's prompts have {saved}, this run's {self._identity()}: it cannot continue in the same "
                "order; use the same data files, data.seed and data.shuffle, or start a new run with trainer.resume_mode=disable"
            )
        if self._rows and state.get("rows", self._rows) != self._rows:
            raise DataError(
                f"the training rows differ from those of the checkpoint: got {self._size:,} other rows, expected the same prompts, answers "
                "and data sources in the same order (the names of files may differ); give the rows of before in data.train_files, or "
                "start a new run with trainer.resume_mode=disable"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)

    def _identity(self) -> dict[str, Any]:
        return {"size": self._size, "shuffle": self._shuffle, "seed": self._seed}

    def _order_of(self, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
        if not self._shuffle:
            return np.arange(self._size)
        # Sort by raw PCG64 numbers: numpy keeps that stream the same in all versions, but may change its permutations.
        keys = np.random.PCG64(seed_for("prompts", self._seed, epoch)).random_raw(self._size)
        return np.argsort(keys, kind="stable")
