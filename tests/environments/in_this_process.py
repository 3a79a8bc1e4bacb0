"""A sampler and a pool in this process, for tests of conversations alone."""

import time
from collections import deque

import torch

from rlx.config.compose.command_line import compose
from rlx.data.batch import Batch
from rlx.environments.protocol import Failure, Observation, Reset
from rlx.environments.role import ConversationSampler
from rlx.rollout.protocol import Completion, Sampling


class Sampler:
    """Says what `say(request)` returns, (text, whether it stops); keeps the requests that it got."""

    def __init__(self, tokenizer, say):
        self._tokenizer, self._say = tokenizer, say
        self.requests, self._open, self.version = [], {}, 1

    @property
    def running(self):
        return len(self._open)

    def add_request(self, request):
        self._open[len(self.requests)] = request
        self.requests.append(request)
        return len(self.requests) - 1

    def step(self):
        """Completes the oldest request."""
        number = next(iter(self._open))
        request = self._open.pop(number)
        text, stops = self._say(request)
        ids = self._tokenizer.encode(text, add_special_tokens=False)[: request.sampling.max_tokens]
        if stops and len(ids) < request.sampling.max_tokens:
            ids.append(self._tokenizer.eos_token_id)
        ended = ids[-1] == self._tokenizer.eos_token_id
        return [(number, Completion(ids, [-0.5] * len(ids), "stop" if ended else "length"))]

    def abort(self, numbers=None):
        for number in list(self._open) if numbers is None else numbers:
            del self._open[number]


class Pool:
    """Environments in this process that answer at the next poll."""

    def __init__(self, make, tools=()):
        self._make, self._tools, self._answers = make, list(tools), deque()
        self.open, self.most = {}, 0

    def reset(self, key, row):
        self.open[key] = self._make()
        self.most = max(self.most, len(self.open))
        self._answer(key, lambda: Reset(self.open[key].reset(row), self._tools))

    def step(self, key, turn):
        self._answer(key, lambda: self.open[key].step(turn))

    def _answer(self, key, call):
        try:
            self._answers.append((key, call()))
        except Exception as fault:
            self._answers.append((key, Failure(str(fault), "error")))

    def flush(self):
        pass

    def poll(self, timeout_s):
        answers, self._answers = list(self._answers), deque()
        return [answer for answer in answers if answer[0] in self.open]

    def end(self, key):
        self.open.pop(key, None)


class Echo:
    """Repeats each turn's text and ends after `turns` of them."""

    def __init__(self, turns=2, role="user"):
        self._turns, self._role = turns, role

    def reset(self, row):
        return row["prompt"]

    def step(self, turn):
        done = turn.index == self._turns - 1
        return Observation([{"role": self._role, "content": turn.text}], reward=float(turn.index), done=done)


VLLM = ("actor_rollout_ref.rollout.name=vllm", "environment.processes=1")  # calls are taken as they come


def conversations(tiny, *settings):
    own = ("actor_rollout_ref.rollout.name=hf", "data.max_prompt_length=64", "data.max_response_length=160")
    return ConversationSampler(compose([*own, "environment.processes=2", "trainer.device=cpu", *settings]).config, tiny)


def batch_of(tiny, truths, prompt="3+4?"):
    rows, ids = len(truths), torch.tensor([tiny.encode(prompt)] * len(truths))
    info = {"raw_prompt": [[{"role": "user", "content": prompt}]] * rows, "data_source": ["x"] * rows}
    columns = {"prompt_ids": ids, "prompt_mask": torch.ones_like(ids).bool(), "seed": torch.arange(rows)}
    return Batch.of(columns, info | {"ground_truth": list(truths), "extra_info": [{}] * rows})


def sampling(tiny):
    return Sampling(160, stop_token_ids=(tiny.eos_token_id,))


class Recording(Sampler):
    """Answers nothing that came less than `patience_s` ago, so that an agent may leave or call again, and keeps all that it says."""

    said, patience_s = (), 0.02

    def add_request(self, request):
        self._newest = time.monotonic()
        return super().add_request(request)

    def step(self):
        time.sleep(0.02)
        if time.monotonic() - self._newest < self.patience_s:
            return []
        ((number, completion),) = super().step()
        self.said = [*self.said, (self.requests[number], completion)]
        return [(number, completion)]


def rows_of(batch, place):
    def of(each, row):
        mask, width = each["attention_mask"][row], each.prompt_length
        ids, sampled = each["input_ids"][row], each["response_mask"][row]
        return ids[:width][mask[:width]].tolist(), ids[width:][mask[width:]].tolist(), sampled[mask[width:]].tolist()

    earlier = batch.info["earlier_rows"][place]
    rows = [of(earlier, row) for row in range(len(earlier))] if earlier is not None else []
    return batch.info["conversation"][place], [*rows, of(batch, place)]
