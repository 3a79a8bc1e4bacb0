"""The driver's part of environments: what is sent and received, their rewards, metrics of conversations, and failures."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlx.config.schema import EnvironmentConfig, PPOConfig, RolloutConfig
from rlx.config.schema.roles import only_environment_scores
from rlx.data.batch import TENSORS, Batch, concat
from rlx.environments.running import TEMPLATE_REASON, EnvironmentFailed
from rlx.errors import cause_of
from rlx.rewards.manager import Scores
from rlx.rollout.protocol import Sampling
from rlx.trainer.progress import Progress

CONVERSATION = "conversation"
MOST_SHOWN = 5
"""Tracebacks to show in a run: calls that take too long may end in another line each time."""
FRAME = re.compile(r'^  File ".*', re.MULTILINE)
REMEDIES = {
    "timeout": "make it faster or raise environment.timeout_s",
    "memory": "let it take less memory or raise environment.memory_limit_gb",
    TEMPLATE_REASON: "begin with shorter messages or raise data.max_prompt_length",
}
"""What to do by kind of failure; for others correct the environment."""
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")  # of an object, another one in each process


def received(rows: Batch, written: Batch, tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> Batch:
    """Return the samples with all info of their rows, and with the texts of what was written.

    response_text is that of all tokens behind the prompt, an environment's included; of a response without an environment up to its
    stop string. With environments prompt_text is that of the first prompt that they gave. A conversation that forked has its turns one after the other.
    """
    if CONVERSATION not in written.info:
        texts = {"response_text": texts_of(written.response_tokens(), tokenizer, rollout)}
    else:
        texts = {"response_text": _decoded(written.response_tokens(), tokenizer)}
        prompts = written.prompt_tokens()
        for row, earlier in enumerate(written.info[EARLIER]):
            if earlier is not None:
                prompts[row] = earlier.prompt_tokens()[0]
                texts["response_text"][row] = _text_of_turns(written.rows([row]), tokenizer)
        texts["prompt_text"] = tokenizer.batch_decode(prompts, clean_up_tokenization_spaces=False)
    batch = Batch(written.tensors, {**rows.info, **written.info, **texts})
    return batch.with_(group_id=rows["group_id"])


def texts_of(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> list[str]:
    """Return the texts of responses without an environment, each up to its stop string."""
    ended = Sampling(1, stop=rollout.stop, include_stop_str_in_output=rollout.include_stop_str_in_output)
    return [*map(ended.shown, _decoded(rows, tokenizer))]


def _decoded(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of tokens as they were written: some tokenizers would take blanks before punctuation away."""
    return tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _text_of_turns(written: Batch, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text behind the first prompt of the one conversation in a batch; of a rewritten history only what was added."""
    (record,), (earlier,) = written.info[CONVERSATION], written.info[EARLIER]
    branches = [
        prompt + response
        for rows in (earlier, written)
        for prompt, response in zip(rows.prompt_tokens(), rows.response_tokens(), strict=True)
    ]
    return "".join(
        f"\n{turn['text']}\n"
        if turn["role"] == "history"
        else _decoded([branches[turn["branch"]][turn["start"] : turn["end"]]], tokenizer)[0]
        for turn in record["turns"]
    )


def scores(config: PPOConfig, batch: Batch, by_functions: Callable[[], Scores]) -> Scores:
    """Return the scores of reward functions, of environments, or their sums, as configured.

    `by_functions` asks the reward functions; it is not called if environments replace them. Where both score, `Scores.right` is
    that of the functions. Numbers in `extra` are those that functions and environments report.
    """
    if CONVERSATION not in batch.info:
        return by_functions()
    records = batch.info[CONVERSATION]
    names = sorted({name for record in records for name in record["info"]})
    extra = {name: [float(record["info"].get(name, math.nan)) for record in records] for name in names}
    rewards = [record["reward"] or 0.0 for record in records]
    scores_B = torch.tensor(rewards, dtype=torch.float32)
    if only_environment_scores(config):
        return Scores(scores_B, extra)
    own, renamed = by_functions(), {}
    if any(record["reward"] is not None for record in records):
        renamed["environment_reward"] = rewards
    if "acc" in extra:
        renamed["environment_acc"] = extra.pop("acc")
    # Written for every sample, because otherwise a sum of 1 or more would count as right.
    acc = {"acc": own.right().tolist()} if renamed else {}
    return Scores(own.scores + scores_B, extra | renamed | own.extra | acc)


def describe(batch: Batch) -> dict[str, float]:
    """Return metrics of the conversations; none without environments.

    Metrics are conversation/turns_mean and turns_max (turns of the policy); forks (mean rows less one); tool_calls and tool_errors
    of a conversation on average; failures (conversations that an environment's failure ended); environment_s (mean seconds that
    a conversation waited for its environment); waited_s (seconds in which a process had nothing to sample, the longest of all
    processes); loss_token_share (tokens of the policy among those behind prompts); ended/<reason>, the share that ended so; and, if
    there are any, overlapping_turns, whose seeds depend on the order of an agent's calls (mean of a conversation).
    """
    records: list[dict[str, Any]] = conversations_of(batch).info.get(CONVERSATION, [])
    if not records:
        return {}
    own = [[turn for turn in record["turns"] if turn["role"] == "assistant"] for record in records]
    calls = [[call for turn in turns for call in turn["calls"]] for turns in own]
    mask, count = batch["response_mask"], len(records)
    written = batch["attention_mask"][:, batch.prompt_length :]
    metrics = {
        "turns_mean": sum(map(len, own)) / count,
        "turns_max": float(max(map(len, own))),
        "forks": len(batch) / count - 1,
        "tool_calls": sum(map(len, calls)) / count,
        "tool_errors": sum(bool(call.get("error")) for each in calls for call in each) / count,
        "failures": float(sum(record["failed"] for record in records)),
        "environment_s": sum(turn["seconds"] or 0.0 for turns in own for turn in turns) / count,
        "waited_s": max(record["waited_s"] for record in records),
        "loss_token_share": (mask.sum() / written.sum().clamp(min=1)).item(),
    }
    if overlapping := sum("overlaps" in turn for turns in own for turn in turns):
        metrics["overlapping_turns"] = overlapping / count
    for reason, number in Counter(_first_word(record["reason"]) for record in records).items():
        metrics[f"ended/{reason}"] = number / count
    return {f"conversation/{name}": value for name, value in metrics.items()}


def doubt(metrics: Mapping[int, Mapping[str, float]]) -> str:
    """Return why a resumed run may differ from what these metrics by step are of; empty if that is not known."""
    steps = [step for step, own in metrics.items() if own.get("conversation/overlapping_turns")]
    if not steps:
        return ""
    return (
        f"in {len(steps)} of {len(metrics)} steps agents made calls at once without a seed (conversation/overlapping_turns): their order is "
        "not known, and the resumed run may sample other turns; give each call a seed"
    )


def failures(batch: Batch) -> str:
    """Return how many conversations failed and why, in words; empty if none did."""
    failed = [record["reason"] for record in batch.info.get(CONVERSATION, []) if record["failed"]]
    reasons = Counter(ADDRESS.sub("0x...", reason) for reason in failed)
    if not reasons:
        return ""
    most = reasons.most_common(3)
    named = "; ".join(f"{count} times {reason:.200}" for reason, count in most)
    others = reasons.total() - sum(count for _, count in most)
    rest = f"; {others} times other reasons" if others else ""
    return f"{reasons.total()} of {len(batch)} conversations ended by a failure: {named}{rest}"


class FailedConversations:
    """Reports failed conversations of an environment, batch by batch."""

    def __init__(self, config: EnvironmentConfig, progress: Progress):
        self._name, self._progress = config.path or config.name, progress
        self._shown: set[tuple[str, ...]] = set()

    def judge(self, batch: Batch) -> None:
        """Report how many conversations of a batch failed and why, with the traceback of each place at its first time in the run.

        Raises EnvironmentFailed: no conversation of the batch is left to train on, and environments are to blame.
        """
        text = failures(batch)
        if not text:
            return
        records = batch.info[CONVERSATION]
        failed = [record for record in records if record["failed"]]
        if len(failed) == len(records) > 1 and all(map(_leaves_nothing, failed)):
            shown = next((each for each in failed if each["traceback"]), failed[0])
            remedy = REMEDIES.get(_first_word(shown["reason"]), "correct it")
            raise EnvironmentFailed(
                f"environment {self._name}: {text}; {remedy}. A run stops where all conversations of a batch fail, also with "
                "environment.on_failure=end_row"
            ) from cause_of(shown["traceback"])
        self._progress.notice(text)
        for trace in dict.fromkeys(record["traceback"] for record in failed):
            place = tuple(FRAME.findall(trace))  # not its message, which may differ in each conversation
            if place and place not in self._shown and len(self._shown) < MOST_SHOWN:
                self._shown.add(place)
                self._progress.remark(trace.rstrip())


def _first_word(reason: str) -> str:
    """Return the kind of an end, such as timeout."""
    return reason.partition(":")[0]


def _leaves_nothing(record: Mapping[str, Any]) -> bool:
    """Whether the environment failed, or the first prompt did; a template that refuses a later message leaves turns to train on."""
    return _first_word(record["reason"]) != TEMPLATE_REASON or not record["turns"]


BRANCH, EARLIER = "branch", "earlier_rows"


def all_rows(batch: Batch) -> Batch:
    """Return a row for each branch, those of a conversation in order, with the column `branch`; the same rows if none forked."""
    earlier = batch.info.get(EARLIER, [])
    info = {name: values for name, values in batch.info.items() if name != EARLIER}
    batch, added = Batch(batch.tensors, info), [each for each in earlier if each is not None]
    if not added:
        return batch
    counts = [0 if each is None else len(each) for each in earlier]
    widest = max(each.prompt_length for each in (batch, *added))
    first = concat([each.with_prompts(widest) for each in added])
    of_conversation = batch.rows([row for row, count in enumerate(counts) for _ in range(count)])
    first = of_conversation.with_(**first.tensors)
    whole = concat([first, batch.with_prompts(widest)])
    places = [*((row, branch) for row, count in enumerate(counts) for branch in range(count)), *enumerate(counts)]
    order = sorted(range(len(whole)), key=places.__getitem__)
    return whole.rows(order).with_(branch=torch.tensor([places[row][1] for row in order]))


def conversations_of(batch: Batch) -> Batch:
    """Return a row for each conversation, for what all its rows share: B columns and info."""
    return batch.rows(batch[BRANCH].eq(0).nonzero().flatten().tolist()) if BRANCH in batch else batch


def last_rows(batch: Batch) -> Batch:
    """Return the last row of each conversation."""
    if BRANCH not in batch:
        return batch
    samples = [*zip(batch["group_id"].tolist(), batch.info["sample"], batch[BRANCH].tolist(), strict=True)]
    last = {(group, sample): branch for group, sample, branch in sorted(samples)}
    return batch.rows([row for row, (group, sample, branch) in enumerate(samples) if last[group, sample] == branch])


def sampled_tokens(batch: Batch) -> Tensor:
    """Return the number of sampled tokens of each conversation of a batch before `all_rows`, (B,) int64."""
    return _over_rows(batch, lambda rows: rows["response_mask"])


def written_tokens(batch: Batch) -> Tensor:
    """Return the same of all tokens behind the prompts; a history that a row repeats counts again."""
    return _over_rows(batch, lambda rows: rows["attention_mask"][:, rows.prompt_length :])


def _over_rows(batch: Batch, mask_of: Callable[[Batch], Tensor]) -> Tensor:
    earlier = [0 if each is None else int(mask_of(each).sum()) for each in batch.info.get(EARLIER, [])]
    return mask_of(batch).sum(dim=1) + torch.tensor(earlier or [0])


def _sample_of_rows(batch: Batch) -> Tensor:
    """Return the number of each row's conversation, in the order of group and sample (B,)."""
    names = torch.stack([batch["group_id"], torch.tensor(batch.info["sample"])], dim=1)
    return names.unique(dim=0, return_inverse=True)[1]


def joined(batch: Batch) -> tuple[Batch, Callable[[Batch], Batch]]:
    """Return a row for each conversation: its branches' response columns, concatenated, and its B columns.

    Return also what adds the new columns of such a batch to the rows. The same batch if no conversation has several rows.
    """
    if BRANCH not in batch:
        return batch, lambda whole: whole
    mask_BR, sample_B, branch_B = batch["response_mask"], _sample_of_rows(batch), batch[BRANCH]
    columns = torch.arange(mask_BR.shape[1])
    reach_B = ((columns + 1) * mask_BR).amax(dim=1)
    inside_BR = columns < reach_B[:, None]  # up to the last sampled token
    first_B, width = torch.zeros_like(reach_B), Counter[int]()
    for row in sorted(range(len(batch)), key=lambda row: (int(sample_B[row]), int(branch_B[row]))):
        first_B[row] = width[int(sample_B[row])]
        width[int(sample_B[row])] += int(reach_B[row]) + 1  # a column parts the turns of two rows
    at = sample_B[:, None].expand_as(mask_BR)[inside_BR], (first_B[:, None] + columns)[inside_BR]
    heads = branch_B.eq(0).nonzero().flatten()
    heads = heads[sample_B[heads].argsort()]
    tensors = {}
    for name, column in batch.tensors.items():
        if TENSORS[name].shape == "BR":
            tensors[name] = column.new_zeros(len(heads), int(at[1].max()) + 1 if len(at[1]) else 1)
            tensors[name][at] = column[inside_BR]
        elif TENSORS[name].shape == "B" and name != BRANCH:
            tensors[name] = column[heads]
    info = {name: [values[row] for row in heads.tolist()] for name, values in batch.info.items()}

    def apart(whole: Batch) -> Batch:
        added = {}
        for name, column in whole.tensors.exclude(*batch.tensors.keys()).items():
            if TENSORS[name].shape == "B":
                added[name] = column[sample_B]
            else:
                added[name] = column.new_zeros(inside_BR.shape)
                added[name][inside_BR] = column[at]
        return batch.with_(**added)

    return Batch.of(tensors, info), apart


def with_sample_tokens(batch: Batch, counted: str) -> Batch:
    """Write `sample_tokens`, of the mask `counted`, if conversations have several rows."""
    if BRANCH not in batch:
        return batch
    sample_B, tokens_B = _sample_of_rows(batch), batch[counted].sum(dim=1)
    tokens_C = tokens_B.new_zeros(int(sample_B.max()) + 1).index_add_(0, sample_B, tokens_B)
    return batch.with_(sample_tokens=tokens_C[sample_B])
