"""Divide items into parts of about equal cost."""

from bisect import bisect_left
from collections.abc import Sequence

EXCHANGES_PER_PART = 20


def partition(costs: Sequence[float], parts: int, room: Sequence[int] | None = None) -> list[list[int]]:
    """Divide items into parts so that the most expensive part costs little.

    It assigns the longest processing time first (Graham 1969, SIAM J. Appl. Math. 17): the most expensive item left goes to the
    cheapest part that has room. Then, as long as it helps, the most expensive part exchanges an item for a cheaper one of
    another part. On random lengths the result is as good as Karmarkar and Karp's differencing or better, and it respects room.

    Args:
        costs: of the items, not negative.
        parts: number of parts, at least 1.
        room: most items of each part; together at least as many as there are. None: any number.

    Returns:
        For each part the numbers of its items, ascending; each item exactly once.
    """
    room = [len(costs)] * parts if room is None else room
    found: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        part = min((p for p in range(parts) if len(found[p]) < room[p]), key=loads.__getitem__)
        found[part].append(item)
        loads[part] += costs[item]
    for _ in range(EXCHANGES_PER_PART * parts):
        if not _exchange(costs, found, loads, room):
            break
    return [sorted(items) for items in found]


def _exchange(costs: Sequence[float], found: list[list[int]], loads: list[float], room: Sequence[int]) -> bool:
    """Move cost from the most expensive part to the cheapest one that can take some; return False if none can."""
    dearest = max(range(len(loads)), key=loads.__getitem__)
    for other in sorted(range(len(loads)), key=loads.__getitem__):
        gap = loads[dearest] - loads[other]
        # If the other part has room, an item may also move without exchange.
        against = sorted((costs[item], item) for item in found[other])
        if len(found[other]) < room[other]:
            against.insert(0, (0.0, -1))
        best: tuple[float, int, int] | None = None
        for item in found[dearest]:
            place = bisect_left(against, (costs[item] - gap / 2, -1))
            for cost, back in against[max(0, place - 1) : place + 1]:
                moved = costs[item] - cost
                if 0 < moved < gap and (best is None or abs(moved - gap / 2) < abs(best[0] - gap / 2)):
                    best = moved, item, back
        if best is not None:
            moved, item, back = best
            found[dearest].remove(item)
            found[other].append(item)
            if back >= 0:
                found[other].remove(back)
                found[dearest].append(back)
            loads[dearest] -= moved
            loads[other] += moved
            return True
    return False
