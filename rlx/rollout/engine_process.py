"""A process with one vLLM engine: `python -m rlx.rollout.engine_process CONNECTION CRASH SHARED OWNER NAME`.

The arguments are three descriptors, the owner's process and a name for `ps`. It hosts an ordinary sampler and does what its owner
says: a message is a pickled method of `EngineHost` with its arguments, and all but `add` and `abort` get a `wire.Answer`. It ends
when the connection closes.

Note [three threads]: one does nothing but read messages, so that the owner never waits to send one, even while this process waits to
send an answer. Another one sends an empty message each second if the main thread has moved; the owner's silence limit counts from
the last message.
"""

import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import rlx.rollout.vllm  # noqa: F401  # now, while the owner builds its own models
from rlx.errors import shown
from rlx.processes.child import end_with
from rlx.rollout import wire
from rlx.rollout.protocol import PrefixMemory, Request
from rlx.rollout.sampler import build_rollout

BEAT_S = 1.0
WITHOUT_ANSWER = ("add", "abort")


class EngineHost:
    """The sampler, its weights' way here, and its requests under the owner's numbers."""

    def __init__(self, connection: Connection, shared: int):
        self._connection, self._shared = connection, shared
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending, self._main, self._steps = threading.Lock(), threading.get_ident(), 0
        self._sampler: Any = None
        self._owners: dict[int, int] = {}  # the owner's number by the sampler's
        self._memories: dict[int, PrefixMemory] = {}  # of conversations, by the owner's key
        for work in (self._listen, self._show_life):
            threading.Thread(target=work, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv_bytes())
        finally:
            os._exit(0)  # the owner has ended, or needs this engine no more; nothing has to be given back

    def _show_life(self) -> None:
        before: Any = None
        while True:
            time.sleep(BEAT_S)
            frame = sys._current_frames()[self._main]
            now = (self._steps, frame.f_code, frame.f_lasti, frame.f_back and frame.f_back.f_lasti)
            del frame  # it holds weights
            if now != before:
                before = now
                self._send(None)

    def _send(self, answer: wire.Answer | None) -> None:
        """Send an answer, or a sign of life."""
        with self._sending:
            self._connection.send_bytes(b"" if answer is None else wire.packed(answer))

    def serve(self) -> None:
        """Do what the owner says, and decode while there are requests."""
        while True:
            while not self._messages.empty() or self._sampler is None or not self._sampler.running:
                self._do(*self._next())
            try:
                stopped = self._sampler.step()
            except Exception as error:
                self._fail(error)
                continue
            self._steps += 1
            if stopped:
                self._send(wire.Answer(stopped=[(self._owners.pop(number), each) for number, each in stopped]))

    def _next(self) -> tuple[str, tuple[Any, ...]]:
        return pickle.loads(self._messages.get())  # type: ignore[no-any-return]

    def _do(self, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            answer: wire.Answer | None = getattr(self, method)(*arguments)
        except Exception as error:
            self._fail(error)
        else:
            if method not in WITHOUT_ANSWER:
                self._send(answer or wire.Answer())

    def _fail(self, error: Exception) -> None:
        self._owners.clear()
        self._send(wire.Answer(error=(type(error).__name__, str(error), shown(error))))

    def build(self, device: torch.device, arguments: tuple[Any, ...]) -> wire.Answer:
        """Build the sampler in a process group of its own, whose store takes no port."""
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(device.index or 0)}
        on_cpu = device.type == "cpu"
        if not on_cpu:
            torch.cuda.set_device(device)
        backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        rollout, model, *others = arguments
        self._sampler = build_rollout(rollout, model, device, *others)
        gc.collect()
        gc.freeze()  # later collections, in which the GPU waits, need not look at vLLM's million objects
        self._bucket, handle = (wire.shared_bucket(self._shared), None) if on_cpu else wire.exported_bucket(device)
        return wire.Answer((self._sampler.engine.max_model_len, handle))

    def add(self, requests: Sequence[tuple[int, Request, int | None]]) -> None:
        """Take requests, each with the owner's number and the key of its conversation."""
        for number, request, key in requests:
            if key is not None:
                request = replace(request, memory=self._memories.setdefault(key, PrefixMemory()))
            self._owners[self._sampler.add_request(request)] = number

    def abort(self, numbers: Sequence[int]) -> None:
        ended = set(numbers)
        own = [mine for mine, number in self._owners.items() if number in ended]
        self._sampler.abort(own)
        for mine in own:
            del self._owners[mine]

    def update(self, version: int) -> None:
        """Take new weights, whose pieces come next."""
        self._memories.clear()
        weights = wire.joined(self._pieces(), self._bucket, lambda: self._send(wire.Answer()))
        self._sampler.update_weights(weights, version)
        for _ in weights:  # to the end, whatever vLLM takes
            pass
        if self._bucket.is_cuda:
            torch.accelerator.empty_cache()

    def _pieces(self) -> Iterator[Sequence[wire.Part]]:
        while (message := self._next())[0] == "piece":
            yield message[1][0]

    def sleep(self) -> None:
        self._memories.clear()
        self._sampler.sleep()

    def wake(self) -> None:
        self._sampler.wake()

    def probe(self) -> wire.Answer:
        return wire.Answer(tensor=self._sampler.probe())


def main() -> None:
    """Run with the arguments above."""
    connection, crash, shared, owner = map(int, sys.argv[1:5])
    end_with(owner)
    faulthandler.enable(crash)
    faulthandler.register(signal.SIGUSR1, crash)
    try:
        EngineHost(Connection(connection), shared).serve()
    except BaseException as error:  # the owner reads it as it reads the stack of a crash
        os.write(crash, shown(error).encode())
        os._exit(1)


if __name__ == "__main__":
    main()
