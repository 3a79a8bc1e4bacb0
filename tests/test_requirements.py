"""What pip makes of the requirements: torch's build for the CPU with any index, and the lock of the GPU image."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
PIN = re.search(r"^torch==(\S+)", (REQUIREMENTS / "cpu.txt").read_text(), re.M)[1]


def add_wheel(index: Path, name: str, version: str, *needs: str) -> None:
    """Put an empty package into a folder that pip takes as an index."""
    folder, info = index / name, f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    files = {
        "METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                f"Version: {version}",
                *(f"Requires-Dist: {need}" for need in needs),
            ]
        ),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any",
    }
    record = [f"{info}/{file},," for file in (*files, "RECORD")]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in {**files, "RECORD": "\n".join(record)}.items():
            wheel.writestr(f"{info}/{file}", text + "\n")
    (folder / "index.html").write_text(f'<a href="{name}-{version}-py3-none-any.whl">{name}</a>')


def pip(*arguments: str, python: str = sys.executable, isolated: bool = True) -> dict[str, str]:
    """Return name and version of what `pip install` would install."""
    own = {name: value for name, value in os.environ.items() if not (isolated and name.startswith("PIP_"))}
    only = ["--isolated"] if isolated else []
    command = [sys.executable, "-m", "pip", *only, "--python", python, "-q", "--disable-pip-version-check", "install"]
    done = subprocess.run([*command, *arguments], env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    installed = json.loads(done.stdout)["install"] if "--report" in arguments else []
    return {each["metadata"]["name"]: each["metadata"]["version"] for each in installed}


def test_the_plain_index_brings_no_cuda_after_torchs_own(tmp_path: Path):
    plain, of_torch, fresh = tmp_path / "plain", tmp_path / "torch", str(tmp_path / "fresh" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh"], check=True)
    add_wheel(plain, "torch", PIN, "cuda")
    add_wheel(plain, "cuda", "13.0")
    add_wheel(of_torch, "torch", f"{PIN}+cpu")
    first = (REQUIREMENTS / "torch-cpu.txt").read_text()
    assert first.count("\n--index-url https://download.pytorch.org/whl/cpu\n") == 1
    (tmp_path / "first.txt").write_text(re.sub(r"(?m)^--index-url .*", f"--index-url {of_torch.as_uri()}", first))
    second = [line for line in (REQUIREMENTS / "cpu.txt").read_text().splitlines() if not line.startswith("-e")]
    (tmp_path / "second.txt").write_text("\n".join(second))
    report = ("--dry-run", "--report", "-", "--index-url", plain.as_uri(), "-r", f"{tmp_path}/second.txt")

    assert pip(*report, python=fresh) == {"torch": PIN, "cuda": "13.0"}, "why torch's own comes first"
    pip("--no-deps", "-r", f"{tmp_path}/first.txt", python=fresh)
    assert list(tmp_path.glob(f"fresh/lib/*/site-packages/torch-{PIN}+cpu.dist-info"))
    assert pip(*report, python=fresh) == {}


def test_the_lock_of_the_gpu_image_holds_its_pins_and_all_that_rlx_needs():
    lines = (REQUIREMENTS / "gpu.lock").read_text().splitlines()
    found = [re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines[1:]]
    assert all(found), "a version and a hash for each"
    locked = {canonicalize_name(each[1]): each[2] for each in found}
    project = tomllib.loads((REQUIREMENTS.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = [line for line in (REQUIREMENTS / "gpu.txt").read_text().splitlines() if line[0] not in "#-"]
    for need in map(Requirement, [*pins, *project["dependencies"], *extras["train"], *extras["lora"]]):
        assert need.name == "rlx" or need.specifier.contains(locked[canonicalize_name(need.name)]), need


def test_a_local_index_with_builds_for_the_cpu_is_taken():
    settings = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    folders = re.findall(r"find-links='([^']+)'", settings)
    if not any(list(Path(folder).glob(f"torch-{PIN}+cpu-*.whl")) for folder in folders):
        pytest.skip(f"pip has no folder here (find-links) with torch {PIN}+cpu")
    report = ("--dry-run", "--no-deps", "--ignore-installed", "--report", "-", f"torch=={PIN}")
    assert pip(*report, isolated=False) == {"torch": f"{PIN}+cpu"}
