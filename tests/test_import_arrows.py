"""Imports go along the arrows of docs/architecture.md, wherever in a file they stand, and never in a circle."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "rlx"
PAGE = ROOT.parent / "docs" / "architecture.md"


def section(title: str) -> str:
    """A section of docs/architecture.md."""
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


ROWS = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", section("The packages"), re.MULTILINE)
# Which parts of rlx a part may import, beside itself and the leaves, and of which parts it may import some modules.
MAY_IMPORT = {name: set(re.findall(r"\w+", re.sub("`.*?`|nothing|only|and", "", cell))) for name, cell in ROWS}
MAY_IMPORT_OF = {
    name: {path.replace("/", ".") for path in re.findall(r"`(.*?)(?:/|\.py)`", cell)} for name, cell in ROWS
}
# Modules that every part may import, but for those that are libraries of their own.
LEAVES = {
    "rlx",
    *(f"rlx.config.{name}" for name in ["schema", "schema.roles", "schema.rollout", "vllm_range", "host_memory"]),
    *(
        f"rlx.{name}"
        for name in ["data.batch", "errors", "heartbeat", "identity", "program", "scratch", "row_files", "step_folders"]
    ),
    "rlx.supervisor.link",
}
WITHOUT_LEAVES = {"algorithms", "offload"}

# The rooms of the activation engine from the bottom up. A room imports only rooms that come before it.
OFFLOAD_ROOMS = [
    *("plan", "storage", "runtime", "recompute", "replay", "streaming", "tiling", "autotune", "save_all", "api"),
    *("__init__", "layer_costs", "plan_command"),
]

# What these may import at all beside the standard library.
ONLY = {
    f"rlx.{name}": set(allowed.split())
    for name, allowed in {
        "config.schema": "rlx.config.schema rlx.offload.runtime.options",
        "config.compose": "hydra omegaconf yaml rlx.config.compose rlx.config.faults rlx.config.schema rlx.config.secrets rlx.errors",
        "config.forecast": "rlx.config.faults rlx.config.forecast rlx.config.machine rlx.config.schema rlx.offload.plan "
        "rlx.offload.runtime.options rlx.config.vllm_range",
        "config.vllm_range": "",
        "config.host_memory": "psutil",
        "config.faults": "",
        "heartbeat": "",
        "identity": "psutil",
        "program": "",
        "scratch": "rlx.identity",
        "step_folders": "",
        "processes.child": "",
        "supervisor": "psutil rlx.errors rlx.processes.child rlx.program rlx.scratch rlx.step_folders rlx.supervisor",
        "main_ppo": "rlx.supervisor.keeper",
        "cli": "rlx rlx.program",
        "offload.plan": "rlx.offload.plan",
        "offload.runtime.options": "rlx.offload.storage.ranges",
        "offload.storage.ranges": "",
        "data.batch": "numpy tensordict torch",
        "errors": "",
        "user_code": "rlx.errors",
        "algorithms": "torch rlx.algorithms",
        "offload": "torch rlx.offload",
    }.items()
}
# The offloading engine's command-line tools load these when they run, not when they are imported.
LATE = {
    "rlx.offload": {"transformers", "huggingface_hub", "matplotlib", "trl", "peft", "bitsandbytes"},
    "rlx.config.forecast": {"huggingface_hub"},
}
# The parts that a library belongs to.
OWNERS = {
    "ray": {"cluster", "driver"},
    "hydra": {"config"},
    "omegaconf": {"config"},
    "vllm": {"rollout"},
    "peft": {"models", "offload"},
    "bitsandbytes": {"offload"},
    "datasets": {"data"},
    "math_verify": {"rewards"},
    "wandb": {"trainer"},
    "tensorboard": {"trainer"},
}


class Import(NamedTuple):
    """One import: who, in which line, what (`name` a module of rlx as far as it is one, else a library), and whether late."""

    importer: str
    line: int
    name: str
    late: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name}"


def module_names(root: Path) -> dict[str, Path]:
    """Every module below `root` by its dotted name; a package goes by its own name."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = [root.name, *file.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(root: Path) -> list[Import]:
    """All imports below `root` that are not of the standard library."""
    modules = module_names(root)
    found = []
    for importer, file in modules.items():
        tree = ast.parse(file.read_text(), str(file))
        inside = {
            id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
        }
        for node in ast.walk(tree):
            for name in targets(node, importer, file.name == "__init__.py", modules):
                if name.split(".")[0] not in sys.stdlib_module_names:
                    found.append(Import(importer, node.lineno, name, id(node) in inside))
    return found


def targets(node: ast.AST, importer: str, is_package: bool, modules: dict[str, Path]) -> Iterator[str]:
    """What a statement imports: the deepest module of rlx that is meant, or the library's first name."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = importer.split(".")[: len(importer.split(".")) + is_package - node.level] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        names = [f"{module}.{alias.name}" for alias in node.names]
    own = next(iter(modules)).split(".")[0]
    for name in names:
        if name.split(".")[0] != own:
            yield name.split(".")[0]
            continue
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        yield name


def part_of(module: str) -> str:
    """`data` for `rlx.data.batch`; the root is a part of its own, `rlx`."""
    return module.split(".")[1] if "." in module else module


def within(module: str, prefixes: set[str]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def crossed_arrows(imports: list[Import]) -> list[str]:
    """Imports between parts that the table does not allow."""
    wrong = []
    for found in imports:
        importer, imported = part_of(found.importer), part_of(found.name)
        if not within(found.name, {"rlx"}) or imported == importer:
            continue
        leaf_allowed = found.name in LEAVES and importer not in WITHOUT_LEAVES
        if within(found.name, MAY_IMPORT_OF.get(importer, set())):
            continue
        if not leaf_allowed and imported not in MAY_IMPORT.get(importer, set()):
            wrong.append(str(found))
    return wrong


def misplaced_libraries(imports: list[Import]) -> list[str]:
    """Imports of a library outside the parts that it belongs to, and anything but the little that some modules may have."""
    wrong = []
    for found in imports:
        owners = OWNERS.get(found.name.split(".")[0])
        if owners is not None and part_of(found.importer) not in owners:
            wrong.append(str(found))
        for module, allowed in ONLY.items():
            late = LATE.get(module, set()) if found.late else set()
            is_inside = within(found.importer, {module}) and found.importer != f"{module}.__main__"
            if is_inside and not within(found.name, allowed | late):
                wrong.append(str(found))
    return wrong


def circle(imports: list[Import]) -> list[str]:
    """The modules of one import circle; empty when there is none."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        if within(found.name, {"rlx"}) and found.name != found.importer:
            graph.setdefault(found.importer, set()).add(found.name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def room_of(module: str) -> str:
    """A file or folder directly in `rlx.offload`."""
    return module.removeprefix("rlx.offload").split(".")[1] if module != "rlx.offload" else "__init__"


def arrows(imports: list[Import]) -> set[tuple[str, str]]:
    """Pairs of rooms of the engine, the importer first. Programs (`__main__.py`) are above all rooms."""
    inside = [
        found for found in imports if within(found.importer, {"rlx.offload"}) and within(found.name, {"rlx.offload"})
    ]
    pairs = {
        (room_of(found.importer), room_of(found.name)) for found in inside if not found.importer.endswith(".__main__")
    }
    return {(upper, lower) for upper, lower in pairs if upper != lower}


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return imports_of(ROOT)


def test_the_table_names_every_part():
    parts = {part_of(module) for module in module_names(ROOT)} - {"rlx"}
    assert parts <= set(MAY_IMPORT)


def test_parts_import_along_the_arrows(imports: list[Import]):
    assert crossed_arrows(imports) == []


def test_nothing_imports_the_benchmarks(imports: list[Import]):
    assert not [str(i) for i in imports if i.name == "benchmarks"]


def test_the_arrows_have_no_circle():
    assert set(TopologicalSorter(MAY_IMPORT).static_order()) == set(MAY_IMPORT)


def test_libraries_stay_where_they_belong(imports: list[Import]):
    assert misplaced_libraries(imports) == []


def test_two_files_import_vllm(imports: list[Import]):
    assert {found.importer for found in imports if found.name == "vllm"} == {
        "rlx.rollout.vllm",
        "rlx.rollout.vllm_exact",
    }


def test_nothing_imports_an_entry_point(imports: list[Import]):
    """`python -m package` starts at `package.__main__`, which is above everything: the rules of its package skip it."""
    assert [str(found) for found in imports if found.name.endswith(".__main__")] == []


def test_the_rooms_of_the_engine_import_downwards(imports: list[Import]):
    found = {room_of(module) for module in module_names(ROOT) if within(module, {"rlx.offload"})}
    assert set(OFFLOAD_ROOMS) == found
    level = {room: number for number, room in enumerate(OFFLOAD_ROOMS)}
    assert [arrow for arrow in arrows(imports) if level[arrow[0]] < level[arrow[1]]] == []


def test_boundary_mode_is_read_without_replay_and_autotune(imports: list[Import]):
    assert {lower for upper, lower in arrows(imports) if upper == "recompute"} == {"runtime", "storage"}


def test_no_circles(imports: list[Import]):
    assert circle(imports) == []


# The check itself


def write(root: Path, **files: str) -> list[Import]:
    for name, text in files.items():
        file = root / "rlx" / f"{name.replace('__', '/').replace('ENTRY', '__main__')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return imports_of(root / "rlx")


@pytest.mark.parametrize(
    ("files", "arrows", "libraries"),
    [
        ({"engine__a": "from rlx.trainer.b import f", "trainer__b": ""}, 1, 0),
        ({"engine__a": "def f():\n    import rlx.trainer.b", "trainer__b": ""}, 1, 0),
        ({"engine__a": "from ..trainer import b", "trainer__b": ""}, 1, 0),
        ({"engine__a": "from rlx.config.compose import build", "config__compose__build": ""}, 1, 0),
        ({"offload__a": "from rlx.config.schema import PPOConfig", "config__schema": ""}, 1, 1),
        ({"offload__a": "import transformers"}, 0, 1),
        ({"offload__a": "def main():\n    import transformers"}, 0, 0),
        ({"offload__a": "def main():\n    import ray"}, 0, 2),
        ({"offload__plan__a": "import torch"}, 0, 1),
        ({"offload__plan__a": "def f():\n    from rlx.offload.api import b", "offload__api": ""}, 0, 1),
        ({"offload__plan__ENTRY": "from rlx.offload.api import b", "offload__api": ""}, 0, 0),
        ({"engine__a": "import torch, json\nfrom torch import nn"}, 0, 0),
    ],
)
def test_the_check_sees_what_it_should(tmp_path: Path, files: dict[str, str], arrows: int, libraries: int):
    imports = write(tmp_path, **files)
    assert len(crossed_arrows(imports)) == arrows
    assert len(misplaced_libraries(imports)) == libraries
