"""The way of the weights from the first process that trains to those that only sample. See docs/async.md."""

import json
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rlx.rollout import wire
from rlx.rollout.wire import Part


class WeightLink:
    """Broadcasts weights from rank 0 to the others in buckets: by NCCL between GPUs, by gloo between CPU processes.

    The ranks are a process group of their own beside torch's default ones, whose store it shares. A bucket's parts travel through
    the store, under a number that all ranks count. All of them use the link at the same time, and none again before all have
    finished; the first use connects it.

    Args:
        device: of this process.
        rank: 0 for the process that trains.
        size: number of ranks.
        timeout_s: of a wait for the others [s].
    """

    def __init__(self, device: torch.device, rank: int, size: int, timeout_s: float) -> None:
        self._device, self._rank, self._size, self._limit = device, rank, size, timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroupGloo | dist.ProcessGroupNCCL | None = None
        self._number = self._kept_from = 0  # buckets so far; the first whose entry is still in the store

    def _connect(self) -> None:
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.PrefixStore("weights", dist.TCPStore(*place, is_master=False, timeout=self._limit))
        if self._device.type == "cpu":
            self._group = dist.ProcessGroupGloo(self._store, self._rank, self._size, self._limit)
        else:
            options = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send weights to all other ranks."""
        bucket = self._bucket()
        for number in range(self._kept_from, self._number):  # of the last time, which all have read
            self._store.delete_key(str(number))
        self._kept_from = self._number
        for piece in wire.pieces(weights, len(bucket)):
            for part, source in piece:
                bucket[part.offset : part.offset + part.size].copy_(source)
            self._announce([part for part, _ in piece])
            self._broadcast(bucket, piece[-1][0])
        self._announce([])

    def received(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that rank 0 sends, each in memory of its own."""
        bucket = self._bucket()
        return wire.joined(self._arriving(bucket), bucket, lambda: None)

    def _arriving(self, bucket: Tensor) -> Iterator[list[Part]]:
        while parts := self._announced():
            self._broadcast(bucket, parts[-1])
            yield parts

    def _bucket(self) -> Tensor:
        if self._group is None:
            self._connect()
        return torch.empty(wire.BUCKET_BYTES, dtype=torch.uint8, device=self._device)

    def _broadcast(self, bucket: Tensor, last: Part) -> None:
        assert self._group is not None
        self._group.broadcast(bucket[: last.offset + last.size], 0).wait()

    def _announce(self, parts: list[Part]) -> None:
        plain = [part._replace(dtype=str(part.dtype).removeprefix("torch.")) for part in parts]  # type: ignore[arg-type]
        self._store.set(str(self._number), json.dumps(plain))
        self._number += 1

    def _announced(self) -> list[Part]:
        plain = json.loads(self._store.get(str(self._number)))
        self._number += 1
        return [Part(name, getattr(torch, dtype), tuple(shape), *place) for name, dtype, shape, *place in plain]
