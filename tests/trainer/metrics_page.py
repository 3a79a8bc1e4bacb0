"""The metrics that docs/metrics.md describes."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
PATTERNS = re.findall(r"^\| `([^`]+/[^`]+)` \|", PAGE, re.MULTILINE)


def described(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in PATTERNS)
