"""Write requirements/gpu.lock: `python docker/lock.py`, with `uv` and `packaging` installed.

Each package of the GPU image has its version and the hash of the one file that pip takes there: Python 3.12, Linux, x86_64.
"""

import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = [
    f"manylinux{name}_x86_64" for name in (*(f"_2_{minor}" for minor in range(39, 4, -1)), "2014", "2010", "1")
]
TAGS = [*cpython_tags((3, 12), platforms=PLATFORMS), *compatible_tags((3, 12), "cp312", PLATFORMS)]


def main() -> None:
    """Resolve the pins of gpu.txt with rlx's extras, and keep one hash for each package."""
    pins = [line for line in (ROOT / "requirements/gpu.txt").read_text().splitlines() if not line.startswith("-e")]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pins.in").write_text("\n".join(pins))
        target = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39", "--format", "pylock.toml"]
        sources = [str(ROOT / "pyproject.toml"), f"{folder}/pins.in", "--extra", "train", "--extra", "lora"]
        subprocess.run(["uv", "pip", "compile", "-q", *target, *sources, "-o", f"{folder}/pylock.toml"], check=True)
        packages = tomllib.loads(Path(folder, "pylock.toml").read_text())["packages"]
    lines = ["# Written by docker/lock.py: the packages of the GPU image, for Python 3.12 on Linux and x86_64."]
    lines += [f"{each['name']}=={each['version']} --hash=sha256:{_file(each)['hashes']['sha256']}" for each in packages]
    (ROOT / "requirements/gpu.lock").write_text("\n".join(lines) + "\n")


def _file(package: dict[str, Any]) -> dict[str, Any]:
    """Return the wheel that pip prefers, or the source if there is none."""
    ranked = [(_rank(wheel), wheel) for wheel in package.get("wheels", ())]
    fitting = [(rank, wheel) for rank, wheel in ranked if rank is not None]
    return min(fitting, key=lambda each: each[0])[1] if fitting else package["sdist"]


def _rank(wheel: dict[str, Any]) -> int | None:
    tags = parse_wheel_filename(wheel["url"].rpartition("/")[2].replace("%2B", "+"))[3]
    return min((TAGS.index(tag) for tag in tags if tag in TAGS), default=None)


if __name__ == "__main__":
    main()
