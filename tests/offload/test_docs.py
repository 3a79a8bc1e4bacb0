"""docs/activation_offloading.md says what the code does."""

import copy
import inspect
import re
from dataclasses import fields
from pathlib import Path

import torch

from rlx.offload import OffloadOptions, OffloadStats, enable_activation_offloading, host_arena

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "activation_offloading.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}")[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_the_code_runs(toys, request):
    model = toys.stack()

    class Trainer:
        def __init__(self, model, arguments, train_dataset):
            self.model, self.arguments, self.dataset = copy.deepcopy(model), arguments, train_dataset

        def train(self):
            for batch in self.dataset:
                self.model(batch).backward()

    batch = torch.randn(4, 8)
    names = {"model": model, "batch": batch, "Trainer": Trainer, "arguments": None, "dataset": [batch, batch]}
    request.addfinalizer(lambda: host_arena(True).limit(None))
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, names)
    names["handle"].disable()


def test_every_argument_stands_there_with_its_default():
    table = dict(re.findall(r"^\| `(\w+)` \| ?`?(\w*)`? ?\|", section("One line"), re.MULTILINE))
    signature = inspect.signature(enable_activation_offloading).parameters
    assert table == {name: "" if p.default is p.empty else str(p.default) for name, p in signature.items()}


def test_every_option_stands_there_with_its_default():
    table = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section("Options"), re.MULTILINE))
    assert {name: eval(default) for name, default in table.items()} == vars(OffloadOptions())


def test_every_figure_stands_there():
    cells = re.findall(r"^\| (`.*?) \|", section("Statistics"), re.MULTILINE)
    explained = {name for cell in cells for name in re.findall(r"\w+", cell)}
    properties = {name for name, value in vars(OffloadStats).items() if isinstance(value, property)}
    assert explained == {field.name for field in fields(OffloadStats)} | properties
