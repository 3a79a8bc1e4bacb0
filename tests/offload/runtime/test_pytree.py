import dataclasses
from collections import OrderedDict, UserDict, deque, namedtuple
from types import SimpleNamespace

import pytest
import torch

from rlx.offload.runtime.pytree import map_leaves, replace_leaves, sort_leaves, tensors_in

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: object
    second: object = None


CONTAINERS = {
    "tuple": lambda x, other: (x, other, 1),
    "list": lambda x, other: [x, other, None],
    "dict": lambda x, other: {"x": x, "other": other},
    "named": Pair,
    "frozen": Frozen,
    "ordered": lambda x, other: OrderedDict(x=x, other=other),
    "user": lambda x, other: UserDict(x=x, other=other),
    "deque": lambda x, other: deque([x, other], maxlen=2),
    "nested": lambda x, other: [{"a": (x, Pair(other, deque([x])))}, Frozen([other])],
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_leaves_are_replaced_in_a_copy_of_the_same_kind(make):
    x, other = torch.ones(2), SimpleNamespace()
    value, new = make(x, other), torch.zeros(2)
    assert replace_leaves(value, {id(x): new}) == make(new, other)
    assert value == make(x, other)
    assert map_leaves(lambda leaf: new if leaf is x else leaf, value) == make(new, other)
    tensors, others = [], []
    sort_leaves((value,), tensors, others)
    assert {id(leaf) for leaf in tensors} == {id(x)}
    assert others[0] is other


def test_containers_keep_their_identity():
    shared = [torch.ones(1)]
    shared.append(shared)
    first, second = replace_leaves((shared, {"same": shared}), {id(shared[0]): 5})
    assert first is second["same"] is first[1]
    assert first[0] == 5
    assert first is not shared
    assert len(tensors_in((shared, shared))) == 1


def test_a_function_is_called_once_for_each_leaf():
    called, x = [], torch.ones(1)
    map_leaves(called.append, {"a": x, "b": [x, None, 2, "c"]})
    assert len(called) == 1
    assert map_leaves(lambda leaf: 7, x) == 7
    assert map_leaves(lambda leaf: 7, None) is None
