"""Tell a call that is stuck from one that is slow. `HangWatch` decides; `Standing` is what a worker's second thread sees."""

import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rlx.cluster.errors import RankFault

COLLECTIVES = "torch/distributed/"
PACKAGE = str(Path(__file__).parents[1])


class Standing(NamedTuple):
    """Where a rank stands.

    Args:
        beats: pieces of work that its process has done so far in this call.
        place: file, line and function of rlx where it works.
        inside: the innermost ones, if they are not of rlx; else empty.
        is_waiting: whether it is inside a collective of torch.distributed, so that it may wait for another rank.
        stack: of the thread that works.
    """

    beats: int
    place: str
    inside: str
    is_waiting: bool
    stack: str

    @property
    def progress(self) -> tuple[object, ...]:
        """What changes when the rank makes progress; see `HangWatch`."""
        return (self.beats, self.place) if self.beats else self

    def __str__(self) -> str:
        return f"{self.place}, inside {self.inside}" if self.inside else self.place


def standing_of(thread: int, beats: int) -> Standing:
    """Return where a thread of this process stands."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Standing(beats, "between two calls", "", False, "")
    stack = traceback.extract_stack(frame)
    own = next((each for each in reversed(stack) if each.filename.startswith(PACKAGE)), stack[-1])
    inside = "" if own is stack[-1] else _named(stack[-1])
    text = "".join(traceback.format_list(stack)).rstrip()
    return Standing(beats, _named(own), inside, _is_collective(frame), text)


def _named(frame: traceback.FrameSummary) -> str:
    return f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}"


def _is_collective(frame: FrameType | None) -> bool:
    """Whether the innermost frames are of torch.distributed; one of rlx ends the search."""
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        if COLLECTIVES in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class HangWatch:
    """Decides whether the ranks of a call are stuck: none of those still at work has made progress for too long.

    Progress is a beat, or another place in rlx than at the last look. In a call without beats yet, such as the loading of a
    model, it is any other stack: a library may work at one place in rlx for long. With beats it is not, because an endless loop
    of a user's policy loss gives another stack at each look. A rank that waits for a slow one is not stuck, so the progress of
    any of them counts for all.

    Args:
        timeout_s: `trainer.hang_timeout_s` [s].
        now_s: monotonic time at which the call began.
    """

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s, self._since_s = timeout_s, now_s
        self._seen: dict[int, tuple[object, ...]] = {}

    def faults(self, standings: Mapping[int, Standing | None], now_s: float) -> list[RankFault]:
        """Return a fault for each rank if they are stuck, the one that the others probably wait for first; else none.

        Args:
            standings: of the ranks still at work; None: the rank did not answer.
            now_s: monotonic time.
        """
        progress = {rank: standing.progress for rank, standing in standings.items() if standing is not None}
        if any(self._seen.get(rank) != each for rank, each in progress.items()):
            self._seen |= progress
            self._since_s = now_s
        if now_s - self._since_s < self._timeout_s:
            return []
        stuck = f"no progress for {now_s - self._since_s:.0f} s"
        noticed_s = time.time()
        silent: list[RankFault] = []
        working: list[RankFault] = []
        waiting: list[RankFault] = []
        for rank, standing in standings.items():
            if standing is None:
                text = f"{stuck}, and no answer: the process is frozen, its node is gone, or native code holds Python's lock"
                silent.append(RankFault(rank, "hung", text, time_s=noticed_s))
            else:
                fault = RankFault(rank, "hung", f"{stuck} at {standing}", standing.stack, noticed_s)
                (waiting if standing.is_waiting else working).append(fault)
        return [*silent, *working, *waiting]
