"""Search autograd's graph backwards: whether results of operations lead to a tensor, and whether an autograd Function reads them."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

MAX_NODES, MAX_LEVELS = 96, 12  # of the graph, searched behind a call; levels since the last find


def is_reached_by_views(start: Node | None, node: Node | None) -> bool:
    """Whether the path from one node back to another passes no autograd Function."""
    for _ in range(32):
        if start is None or isinstance(start, BackwardCFunction):
            return False
        if start is node:
            return True
        start = start.next_functions[0][0] if start.next_functions else None
    return False


def reached(tensors: Iterable[Tensor], wanted: Container[Node]) -> dict[Node, bool]:
    """Return the wanted nodes from which tensors were made, and whether an autograd Function may read them.

    A Function anywhere on the path counts: the nodes between may be views, which look like other nodes.
    """
    found: dict[Node, bool] = {}
    seen: set[tuple[Node, bool]] = set()
    ways = [(tensor.grad_fn, False) for tensor in tensors if tensor.grad_fn is not None]
    levels_left = MAX_LEVELS
    while ways and levels_left and len(seen) < MAX_NODES:
        levels_left -= 1
        behind: list[tuple[Node, bool]] = []
        for way in ways:
            if way in seen:
                continue
            seen.add(way)
            node, is_behind_function = way
            if node in wanted:
                found[node] = found.get(node, False) or is_behind_function
                levels_left = MAX_LEVELS
            is_function = isinstance(node, BackwardCFunction) or (is_behind_function and node not in wanted)
            behind += [(before, is_function) for before, _ in node.next_functions if before is not None]
        ways = behind
    return found
