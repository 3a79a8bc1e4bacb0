"""A leaf: what marks the errors that explain themselves, and what they say of a name that nobody knows."""

from collections.abc import Iterable
from difflib import get_close_matches


class ExplainedError(Exception):
    """An error whose message says what happened and what to do, so that it is shown without the driver's traceback.

    Where it has a cause, as a user's reward function that raised, the cause's traceback is shown.
    """


def did_you_mean(name: str, known: Iterable[str], otherwise: str, most: int = 1) -> str:
    """The remedy for a name that is not known: up to so many of the known ones that look like it, else what else to do."""
    near = get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(near)}?" if near else otherwise
