"""Print how large the repository is: `python -m benchmarks.house [COMMIT]`.

Lines of Python for each room of rlx/ and tests/ and for benchmarks/, words for the pages of docs/; with COMMIT before and now.
`--commits N` prints what each of the last N commits added to rlx/, tests/ and docs/. It needs git and nothing else.
"""

import argparse
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("rlx", "tests", "docs")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def sizes(commit: str | None) -> Counter[str]:
    """Return lines or words by room such as `rlx/engine` and by part such as `rlx`; of the checkout if `commit` is None."""
    listing = (
        ("ls-tree", "-r", "--name-only", commit)
        if commit
        else ("ls-files", "--cached", "--others", "--exclude-standard")
    )
    found: Counter[str] = Counter()
    for name in git(*listing).splitlines():
        path = Path(name)
        part = path.parts[0]
        is_page = part == "docs" and path.suffix == ".md"
        if not is_page and not (part in ("rlx", "tests", "benchmarks") and path.suffix == ".py"):
            continue
        if commit is None and not (ROOT / path).is_file():
            continue  # deleted, and not yet staged
        text = git("show", f"{commit}:{name}") if commit else (ROOT / path).read_text()
        size = len(text.split()) if is_page else text.count("\n")
        folders = [*path.parts[1:-1], path.name if is_page else "*.py"]
        rooms = {part, f"{part}/{folders[0]}", *([f"{part}/offload/{folders[1]}"] if folders[0] == "offload" else [])}
        found.update(dict.fromkeys(rooms, size))
    return found


def table(before: Counter[str], now: Counter[str]) -> str:
    """Return a row for each room with lines (words for docs/) before, now, and their difference."""
    rows = [f"{'lines of .py, words of docs':40}{'before':>10}{'now':>10}{'change':>10}"]
    rows += [
        f"{'  ' * room.count('/') + room:40}{before[room]:>10,}{now[room]:>10,}{now[room] - before[room]:>+10,}"
        for room in sorted({*before, *now})
    ]
    return "\n".join(rows)


def balance(commits: int) -> str:
    """Return a line for each of the last commits: the net lines of rlx/, tests/ and docs/, and the subject."""
    lines = [f"{'commit':10}{'rlx':>7}{'tests':>7}{'docs':>7}"]
    for entry in git("log", f"-{commits}", "--no-merges", "--numstat", "--no-renames", "--format=%x00%h%x09%s").split(
        "\0"
    )[1:]:
        head, *changes = entry.splitlines()
        name, _, subject = head.partition("\t")
        net = Counter(dict.fromkeys(PARTS, 0))
        for change in filter(None, changes):
            added, removed, path = change.split("\t")
            if added.isdecimal():  # pictures have no lines
                net[path.partition("/")[0]] += int(added) - int(removed)
        lines.append(f"{name:10}" + "".join(f"{net[part]:>+7}" for part in PARTS) + f"  {subject}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("commit", nargs="?", help="compare with this commit")
    parser.add_argument("--commits", type=int, metavar="N", help="print the balance of the last N commits instead")
    options = parser.parse_args(arguments)
    print(balance(options.commits) if options.commits else table(sizes(options.commit or "HEAD"), sizes(None)))


if __name__ == "__main__":
    main()
