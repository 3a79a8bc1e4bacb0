"""A leaf: the base class of errors that explain themselves, and suggestions for unknown names."""

from collections.abc import Iterable
from difflib import get_close_matches


class ExplainedError(Exception):
    """An error whose message says what happened and what to do, so it is shown without the driver's traceback.

    If it has a cause, such as an error in a user's reward function, the traceback of the cause is shown.
    """


def did_you_mean(name: str, known: Iterable[str], otherwise: str, most: int = 1) -> str:
    """Return a remedy for an unknown name: up to `most` similar known names, else `otherwise`."""
    near = get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(near)}?" if near else otherwise
