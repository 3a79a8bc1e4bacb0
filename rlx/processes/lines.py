"""Messages between a process and its owner: lines of JSON.

The process may run what a model wrote, so it is not trusted. Its owner unpickles nothing from it, and checks the form and the length
of each message.
"""

import json
import os
from typing import Any

LONGEST_LINE = 2**26  # bytes
READ_AT_ONCE = 2**20  # bytes
DEEPEST = 64  # lists and objects in each other; with many calls open, Python reads and copies only a few hundred


class BadAnswer(OSError):
    """A process sent a message that no process of rlx sends."""


def line_of(message: Any) -> bytes:
    """Return a message as a line; NaN is allowed."""
    return json.dumps(message).encode() + b"\n"


def shallow(value: Any, deepest: int = DEEPEST) -> Any:
    """Return a value of JSON that any process can read and copy. Raises RecursionError: it is nested deeper than this."""
    inside = [value]
    for _ in range(deepest + 1):
        inside = [each for each in inside if isinstance(each, dict | list | tuple)]
        if not inside:
            return value
        inside = [each for own in inside for each in (own.values() if isinstance(own, dict) else own)]
    raise RecursionError(f"lists and objects are nested deeper than {deepest}")


class Lines:
    """Collects a process's messages from a descriptor."""

    def __init__(self, descriptor: int):
        self._descriptor, self._rest = descriptor, bytearray()

    def read(self) -> list[Any]:
        """Return the messages that are complete now; wait only until there is anything to read.

        Raises EOFError or OSError if the other side has ended, or sent no JSON (BadAnswer).
        """
        data = os.read(self._descriptor, READ_AT_ONCE)
        if not data:
            raise EOFError
        self._rest += data
        if b"\n" not in data and len(self._rest) <= LONGEST_LINE:
            return []
        *whole, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        try:
            if any(len(each) > LONGEST_LINE for each in (*whole, rest)):
                raise ValueError
            return [json.loads(each) for each in whole]
        except (ValueError, RecursionError):
            raise BadAnswer("sent an answer that is no JSON, or too long") from None
