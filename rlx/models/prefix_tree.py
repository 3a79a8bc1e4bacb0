"""Sequences with common beginnings as a tree of segments, and what each token attends to.

A packed row holds segments of tokens. A segment continues its parent; a root begins a sequence. A sequence is the path from a
root to a segment, so tokens that several sequences begin with are in the row once. Example: a prompt of 5 tokens with responses
of 3 and 4 tokens is `Tree([5, 3, 4], [-1, 0, 0])`. Sequences that share nothing are roots without children.

This file computes with lengths and parents only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

ROOT = -1  # in place of a parent
NEVER = 1.0  # no shared beginning saves as much of its sequences' tokens


class Span(NamedTuple):
    """The tokens from `first` up to but not including `stop`, by their places in the row."""

    first: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.first


class Pair(NamedTuple):
    """Queries, and keys that they attend to: both are the tokens of spans, in order."""

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]


class Read(NamedTuple):
    """Pairs of queries and keys for one call of attention; each has at least one query and one key."""

    pairs: list[Pair]
    # Whether the last query of a pair sees all keys, and each earlier one a key less; otherwise every query sees all
    is_causal: bool
    adds: bool  # whether the queries attend to other keys in an earlier read, with which the result has to be merged


# What layers have made of a tree. It is no attribute: a layer whose forward changes one of an argument cannot be recomputed.
_MADE: "WeakKeyDictionary[Tree, dict[Any, Any]]" = WeakKeyDictionary()


class Tree:
    """Segments in the order of a row, of at least one token each, behind the ones that they continue (`ROOT` for a root).

    `padding` tokens at the end belong to no sequence.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int] | None = None, padding: int = 0):
        self.lengths = list(lengths)
        self.parents = [ROOT] * len(self.lengths) if parents is None else list(parents)
        assert len(self.parents) == len(self.lengths) > 0 < min(self.lengths)
        self.starts, self.padding = [0, *accumulate(self.lengths)], padding
        _MADE[self] = {}

    @property
    def is_flat(self) -> bool:
        return all(parent == ROOT for parent in self.parents)

    def span(self, segment: int) -> Span:
        return Span(self.starts[segment], self.starts[segment + 1])

    def ancestors(self, segment: int) -> list[int]:  # the root first
        found: list[int] = []
        while (segment := self.parents[segment]) != ROOT:
            found.append(segment)
        return found[::-1]

    def positions(self) -> Tensor:
        """Return the position of each token in its sequences, (N,) int64."""
        ends: list[int] = []
        for length, parent in zip(self.lengths, self.parents, strict=True):
            ends.append(length + (0 if parent == ROOT else ends[parent]))
        return torch.cat([torch.arange(end - n, end) for n, end in zip(self.lengths, ends, strict=True)])

    @property
    def longest(self) -> int:
        return max(sum(self.lengths[i] for i in (*self.ancestors(s), s)) for s in range(len(self.lengths)))

    def with_padding(self, tokens: int) -> "Tree":
        return self if tokens == 0 else Tree([*self.lengths, tokens], [*self.parents, ROOT], tokens)

    def made(self, what: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, called once for each `what`: layers ask for the same."""
        made = _MADE[self]
        if what not in made:
            made[what] = make()
        return made[what]

    def cut(self, multiple: int, least: int) -> "Tree":
        """Return the tree of the same tokens in which some segments are cut behind the last multiple of their tokens.

        These are segments with children, and roots of at least `least` tokens.
        """
        with_children, last = set(self.parents), {ROOT: ROOT}  # last part of each segment, by its index before the cut
        lengths: list[int] = []
        parents: list[int] = []
        for segment, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            is_cut = segment in with_children or (parent == ROOT and length >= least)
            whole = length - length % multiple if is_cut else length
            for part in filter(None, (whole, length - whole)):
                parents.append(last[parent])
                lengths.append(part)
                parent = segment
                last[segment] = len(lengths) - 1
        return Tree(lengths, parents, self.padding)

    def reads(self, window: int | None = None, copied: int = 0) -> list[Read]:
        """Return the reads whose merged results are the attention of each token to itself and all tokens before it.

        In the first read each segment attends to itself and to at most `copied` tokens before it, whose keys are copied. Then come the
        levels of the tree from the root on: all segments that continue those of the level attend to them. So a prompt with its
        responses needs two reads. With a `window` of tokens that each token attends to at most, itself included, there is one read, in
        which each segment attends to as many tokens of its path.
        """
        below: dict[int, list[Span]] = {}
        own: list[Pair] = []
        for segment in range(len(self.lengths)):
            span, room = self.span(segment), copied if window is None else window - 1
            keys, merges = [span], False
            for ancestor in reversed(self.ancestors(segment)):
                seen = self.span(ancestor)
                if window is not None:
                    seen = Span(max(seen.first, seen.stop - room), seen.stop)
                merges = merges or seen.tokens > room
                if merges:
                    below.setdefault(ancestor, []).append(span)
                elif seen.tokens:
                    keys.insert(0, seen)
                    room -= seen.tokens
            own.append(Pair((span,), joined(keys)))
        level = {segment: len(self.ancestors(segment)) for segment in below}
        found = [Read(own, is_causal=True, adds=False)]
        for _, same in groupby(sorted(below, key=lambda segment: (level[segment], segment)), key=level.__getitem__):
            pairs = [Pair(joined(below[segment]), (self.span(segment),)) for segment in same]
            found.append(Read(pairs, is_causal=False, adds=True))
        return found


def joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the same tokens in the same order, neighbouring spans as one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].stop == span.first:
            found[-1] = Span(found[-1].first, span.stop)
        else:
            found.append(span)
    return tuple(found)


def tree_of_rows(
    rows: Sequence[Tensor], least_gain: float = NEVER
) -> tuple[Tree, list[tuple[int, Span]], list[Tensor]]:
    """Return rows of tokens, each (length >= 1,) int64, as a tree in which common beginnings are segments of their own.

    Rows share a beginning if that saves more than `least_gain` of their tokens behind what they share already; `NEVER`: none do.
    In the tree roots come first, then their children, and so on. Return also for each segment a row that has it, and the columns in
    that row; and for each row the place in the packed row of each of its tokens, (length,) int64.
    """
    alone = [_Node([number], Span(0, len(row)), None, 0) for number, row in enumerate(rows)]
    nodes = alone if least_gain >= NEVER else _by_level(_shared(rows, least_gain))
    index = {id(node): i for i, node in enumerate(nodes)}
    parents = [ROOT if node.parent is None else index[id(node.parent)] for node in nodes]
    tree = Tree([node.columns.tokens for node in nodes], parents)
    places: list[list[Tensor]] = [[] for _ in rows]
    for i, node in enumerate(nodes):
        for row in node.rows:
            places[row].append(torch.arange(*tree.span(i)))
    return tree, [(node.rows[0], node.columns) for node in nodes], [torch.cat(parts) for parts in places]


class _Node(NamedTuple):
    """A segment: the rows that have it, its columns in them, and its place in the tree."""

    rows: list[int]
    columns: Span
    parent: "_Node | None"
    level: int


def _by_level(nodes: Iterable[_Node]) -> list[_Node]:
    """Sort nodes by level, then in the order of parents, then of rows; roots that others continue come first.

    So in a row of prompts with responses all queries and all keys of the second read are neighbours, and need no copies.
    """
    every = list(nodes)
    parents = {id(node.parent) for node in every}
    found: list[_Node] = []
    for level in range(1 + max(node.level for node in every)):
        rank = {id(node): i for i, node in enumerate(found)}
        of_level = [(rank.get(id(node.parent), id(node) not in parents), node) for node in every if node.level == level]
        found += [node for _, node in sorted(of_level, key=lambda pair: (pair[0], min(pair[1].rows)))]
    return found


def _shared(rows: Sequence[Tensor], least_gain: float) -> Iterator[_Node]:
    """Yield the nodes, parents before children."""
    texts = [row.numpy().astype(">i8").tobytes() for row in rows]  # compare as their tokens do
    order = sorted(range(len(rows)), key=texts.__getitem__)
    common = {pair: _common(rows[pair[0]], rows[pair[1]]) for pair in pairwise(order)}

    def below(members: list[int], first: int, parent: _Node | None) -> Iterator[_Node]:
        while members:
            count = most_that_pay(members, first)
            cluster, members = members[:count], members[count:]
            stop = min((common[pair] for pair in pairwise(cluster)), default=len(rows[cluster[0]]))
            node = _Node(cluster, Span(first, stop), parent, 0 if parent is None else parent.level + 1)
            yield node
            yield from below([row for row in cluster if len(rows[row]) > stop], stop, node)

    def most_that_pay(members: list[int], first: int) -> int:
        """Return how many of these rows, from the first on, can share a node that saves enough; 1 if none does."""
        count, shared, tokens = 1, len(rows[members[0]]), len(rows[members[0]]) - first
        for number, pair in enumerate(pairwise(members), start=2):
            shared, tokens = min(shared, common[pair]), tokens + len(rows[pair[1]]) - first
            if shared <= first:
                break
            if (shared - first) * (number - 1) > least_gain * tokens:
                count = number
        return count

    yield from below(order, 0, None)


def _common(one: Tensor, other: Tensor) -> int:
    length = min(len(one), len(other))
    return int((one[:length] == other[:length]).cumprod(0).sum())
