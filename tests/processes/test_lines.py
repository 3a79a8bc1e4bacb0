"""Messages between a process and its owner."""

import math
import os
import pickle

import pytest

from rlx.processes.lines import LONGEST_LINE, BadAnswer, Lines, line_of

MESSAGE = [0, [{"score": 1.0, "acc": math.nan}], "", "", ""]


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_messages_arrive_whole_in_pieces_and_several_at_once(pipe):
    reader, writer = pipe
    lines = Lines(reader)
    os.write(writer, line_of(MESSAGE))
    os.write(writer, line_of([1, "\ud800 half a pair"]))
    first, second = lines.read()
    assert math.isnan(first[1][0]["acc"]) and second == [1, "\ud800 half a pair"]
    os.write(writer, b'{"a"')
    assert lines.read() == []
    os.write(writer, b": 1}\n")
    assert lines.read() == [{"a": 1}]


def test_the_end_and_nonsense_are_errors(pipe):
    reader, writer = pipe
    for nonsense in (pickle.dumps([1]) + b"\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        os.write(writer, nonsense[:60_000] + b"\n")
        with pytest.raises(BadAnswer):
            Lines(reader).read()
    lines = Lines(reader)
    with pytest.raises(BadAnswer):
        for _ in range(LONGEST_LINE // 2**16 + 2):
            os.write(writer, b"x" * 2**16)
            assert lines.read() == []
