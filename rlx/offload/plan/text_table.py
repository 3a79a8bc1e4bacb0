"""Tables of aligned text, and the unit of their sizes."""

from __future__ import annotations

from collections.abc import Sequence

GB = 1e9  # bytes


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return the rows as lines: the first `texts` columns flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) if i < texts else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
