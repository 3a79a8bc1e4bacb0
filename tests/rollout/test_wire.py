"""What goes to which engine, and how weights and completions travel."""

import msgspec
import pytest
import torch

from rlx.rollout import wire
from rlx.rollout.engines import assign
from rlx.rollout.protocol import Completion


def test_groups_are_divided_by_expected_tokens_and_conversations_stay():
    assert assign([(10, None)] * 5, [0, 0]) == [0, 1, 0, 1, 0]
    assert assign([(1, None), (9, None), (2, None), (5, None)], [0, 0]) == [1, 0, 1, 1]
    assert assign([(5, 1), (4, None), (4, None)], [0, 0]) == [1, 0, 0]
    assert assign([(1, None), (1, None)], [3, 0, 1]) == [1, 1]


def test_weights_go_through_a_small_bucket_as_they_are():
    torch.manual_seed(0)
    sent = {
        "long": torch.randn(7, 11),
        "half": torch.randn(5, 3).bfloat16().T,
        "none": torch.empty(0, 3),
        "one": torch.tensor(3.5, dtype=torch.float64),
        "bytes": torch.arange(40, dtype=torch.uint8),
    }
    bucket, acknowledged = torch.zeros(64, dtype=torch.uint8), []

    def arriving():
        for piece in wire.pieces(sent.items(), capacity=64):
            for part, source in piece:
                bucket[part.offset : part.offset + part.size] = source
            yield [part for part, _ in piece]

    found = dict(wire.joined(arriving(), bucket, lambda: acknowledged.append(1)))
    assert list(found) == list(sent) and len(acknowledged) == -(-sum(each.nbytes for each in sent.values()) // 64)
    for name, each in sent.items():
        assert found[name].dtype == each.dtype and torch.equal(found[name], each)


def test_completions_travel_as_arrays():
    experts = torch.arange(12).reshape(2, 3, 2)
    sent = [
        (3, Completion([5, 6], [-0.1, -1e-30], "stop", experts.to(torch.uint8), "é")),
        (2**40, Completion([7], None, "length")),
        (1, Completion([8], [float("-inf")], "length", experts.to(torch.int16))),
    ]
    found = wire.unpacked(wire.packed(wire.Answer(stopped=sent))).stopped
    assert [(number, each._replace(experts=None)) for number, each in found] == [
        (number, each._replace(experts=None)) for number, each in sent
    ]
    for (_, one), (_, other) in zip(found, sent, strict=True):
        assert one.experts is other.experts or (
            one.experts.dtype == other.experts.dtype and torch.equal(one.experts, other.experts)
        )
    for damaged in ([None, ["object", [1], bytes(8)]], [None, None, [[1, ["text"]]]], "text"):
        with pytest.raises(msgspec.ValidationError):
            wire.unpacked(msgspec.msgpack.encode(damaged))
