"""Profiles of earlier runs: a run plans with them if its first pass comes to the same bytes, and measures otherwise."""

import copy
import json
import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from rlx.offload import enable_tiling
from rlx.offload.autotune.consensus import bytes_ratio, longest_input_bytes
from rlx.offload.autotune.layer_profile import LayerProfile
from rlx.offload.autotune.op_profile import DeviceMemoryProbe
from rlx.offload.autotune.profile_cache import from_json, to_json
from rlx.offload.autotune.profile_key import describe_call, describe_layer, digest

PLENTY, CPU = 1 << 40, torch.device("cpu")


def read(model, tokens=6):
    return model(torch.linspace(-1, 1, 2 * tokens * 16).sin().view(2, tokens, 16))


class Run:
    """A model with a handle of its own, as a process has them, and how many layer calls each pass has measured."""

    def __init__(self, toys, enable, decided, folder, model=None, budget=20_000, **options):
        self.toys, self.model = toys, model or toys.decoder(4, dropout=0.2)
        self.expected = copy.deepcopy(self.model)
        self.handle = enable(
            self.model, True, save="auto", max_device_bytes=budget, cache_directory=folder and str(folder), **options
        )
        self.controller = self.handle.runner.decide.__self__
        self.samples = decided(self.handle, LayerProfile)

    def passes(self, number, step=read):
        """For each pass how many layer calls it measured, and whether it followed a plan; gradients are right."""
        found = []
        for _ in range(number):
            self.samples.clear()
            self.toys.grade(self.expected, step).assert_equal(self.toys.grade(self.model, step))
            assert self.handle.stats().held_bytes == 0
            found.append((len(self.samples), self.controller._last.plan is not None))
        return found


@pytest.fixture
def run(toys, enable, decided, tmp_path):
    """`run(model, folder=..., **options)`: a `Run`, with the same folder unless another is named."""
    return lambda model=None, folder=tmp_path / "files", **options: Run(toys, enable, decided, folder, model, **options)


AS_WITHOUT_FILES = [(0, False), (4, False), (0, True)]
CHECKED_AND_MEASURED = [(4, False), (4, False), (0, True)]
RECALLED = [(4, False), (0, True), (0, True)]


def files(folder):
    return sorted((folder / "files").glob("*.json"))


def test_a_second_run_plans_after_the_pass_that_warms_up(run, tmp_path):
    first = run()
    assert first.passes(3) == AS_WITHOUT_FILES
    assert len(files(tmp_path)) == 1
    second = run()
    assert second.passes(3) == RECALLED
    assert second.handle.measurement() == first.handle.measurement()
    assert len(second.handle.plan().layers) == 4
    assert len(files(tmp_path)) == 1


def test_lengths_that_a_run_meets_later_need_no_pass_at_all(run):
    first = run()
    first.passes(3)
    first.passes(2, lambda model: read(model, 40))
    second = run()
    assert second.passes(2) == RECALLED[:2]
    assert second.passes(2, lambda model: read(model, 40)) == [(0, True), (0, True)]
    # Longer than what was measured, in the same bucket: measured, and the longer one is kept.
    third = run()
    third.passes(2)
    assert third.passes(2, lambda model: read(model, 42)) == [(4, False), (0, True)]
    fourth = run()
    fourth.passes(2)
    assert fourth.passes(1, lambda model: read(model, 42)) == [(0, True)]


def test_nothing_is_kept_where_nobody_wants_it(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run(folder=None).passes(3)
    assert list(tmp_path.iterdir()) == []
    run(folder="auto").passes(3)
    assert len(list((tmp_path / "cache/rlx/measurements").glob("*.json"))) == 1
    assert run(folder=None).passes(3) == AS_WITHOUT_FILES
    assert run(folder="auto").passes(3) == RECALLED


PROCESS = """
import sys, torch
from torch import nn
from rlx.offload import OffloadOptions, enable_activation_offloading
from rlx.offload.autotune.layer_profile import LayerProfile

torch.manual_seed(0)
encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
model = nn.TransformerEncoder(encoder, 4, enable_nested_tensor=False)
options = OffloadOptions(save="auto", min_bytes=0, max_device_bytes=20_000, cache_directory=sys.argv[1])
handle = enable_activation_offloading(model, True, options)
follow, samples = handle.runner.decide, []
handle.runner.decide = lambda *call: samples.append(follow(*call)) or samples[-1]
for _ in range(3):
    model.zero_grad()
    torch.manual_seed(1)
    model(torch.randn(2, 6, 16)).square().mean().backward()
    print(sum(isinstance(orders, LayerProfile) for orders in samples), handle.plan() is not None)
    samples.clear()
print([parameter.grad.double().sum().item() for parameter in model.parameters()])
"""


def test_another_process_reads_what_one_has_written(tmp_path):
    said = [
        subprocess.run(
            [sys.executable, "-c", PROCESS, str(tmp_path / "files")], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for _ in range(2)
    ]
    assert said[0][:3] == [f"{samples} {is_planned}" for samples, is_planned in AS_WITHOUT_FILES]
    assert said[1][:3] == [f"{samples} {is_planned}" for samples, is_planned in RECALLED]
    assert said[0][3] == said[1][3], "gradients"


def wider(toys):
    return toys.stack(lambda: toys.attend(16, 2, 2, dropout=0.2), 4, 16)


def with_a_frozen_layer(toys):
    model = toys.decoder(4, dropout=0.2)
    model.layers[2].q.requires_grad_(False)
    return model


def with_another_head(toys):
    model = toys.decoder(4, dropout=0.2)
    model.head = nn.Linear(16, 3)
    return model


@pytest.mark.parametrize(
    "make", [wider, with_a_frozen_layer, with_another_head, lambda toys: toys.decoder(4, dropout=0.1)]
)
def test_other_layers_find_nothing(run, toys, make):
    run().passes(3)
    assert run(make(toys)).passes(3) == CHECKED_AND_MEASURED
    assert run(make(toys)).passes(2) == RECALLED[:2]


@pytest.mark.parametrize("options", [{"min_bytes": 300}, {"pin_memory": False}], ids=str)
def test_other_options_find_nothing_and_a_budget_is_no_such(run, options):
    run().passes(3)
    assert run(**options).passes(3) == CHECKED_AND_MEASURED
    assert run(budget=0, max_host_bytes=1 << 20).passes(2) == RECALLED[:2]


def test_autocast_finds_nothing(run):
    def cast(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return read(model).float()

    run().passes(3)
    assert run().passes(3, cast) == CHECKED_AND_MEASURED


def test_tiles_find_nothing(run, toys):
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    layers = [transformers.AutoModel.from_config(config) for _ in range(3)]
    plain = describe_layer(layers[0].layers[0])
    assert plain == describe_layer(layers[1].layers[0])
    enable_tiling(layers[1], 4), enable_tiling(layers[2], 8)
    assert len({plain, *(describe_layer(layer.layers[0]) for layer in layers[1:])}) == 3
    layers[0].set_attn_implementation("eager")
    assert describe_layer(layers[0].layers[0]) != plain


def test_a_damaged_file_is_said_and_measured_anew(run, tmp_path, caplog):
    run().passes(3)
    (file,) = files(tmp_path)
    file.write_text(file.read_text()[:-100])
    assert run().passes(3) == CHECKED_AND_MEASURED
    assert sum("is ignored" in record.getMessage() for record in caplog.records) == 1
    assert run().passes(2) == RECALLED[:2]


def test_a_folder_that_cannot_be_written_changes_nothing(run, tmp_path, caplog):
    (tmp_path / "files").write_text("")
    for _ in range(2):
        assert run().passes(3) == AS_WITHOUT_FILES
    said = [record.levelno for record in caplog.records if "cannot be kept" in record.getMessage()]
    assert said == [logging.WARNING] * 2
    assert sum("is ignored" in record.getMessage() for record in caplog.records) == 2


def altered(folder, length=None, **changes):
    """Change the costs in the one file, of the shortest length or of that which is given, as a run of another kind writes it."""
    (path,) = files(folder)
    content = json.loads(path.read_text())
    name = length or min(content["profiles"], key=lambda name: int(name.split(".")[1]))
    profile = from_json(content["profiles"][name])
    outside = changes.pop("loss_bytes", profile.loss_bytes)
    kinds = tuple(kind._replace(cost=replace(kind.cost, **changes)) for kind in profile.kinds)
    content["profiles"][name] = to_json(profile._replace(kinds=kinds, loss_bytes=outside))
    path.write_text(json.dumps({**content, "check": digest(content["profiles"])}))


def test_a_run_whose_bytes_are_others_measures_and_writes_anew(run, tmp_path):
    first = run()
    first.passes(3)
    right = first.handle.measurement()
    for changes in ({"working_bytes": 5}, {"saved_bytes": 1 << 20}, {"loss_bytes": 1 << 20}):
        altered(tmp_path, **changes)
        other = run()
        assert other.passes(3) == CHECKED_AND_MEASURED
        assert other.handle.measurement().loss_bytes == right.loss_bytes
        assert [k.cost.working_bytes for k in other.handle.measurement().kinds] == [
            k.cost.working_bytes for k in right.kinds
        ]
        again = run()
        assert again.passes(2) == RECALLED[:2]


def test_files_that_were_found_wrong_are_not_read_for_other_lengths(run, tmp_path):
    first = run()
    first.passes(3)
    first.passes(2, lambda model: read(model, 40))
    altered(tmp_path, working_bytes=5)
    other = run()
    assert other.passes(3) == CHECKED_AND_MEASURED
    assert other.passes(2, lambda model: read(model, 40)) == [(4, False), (0, True)]


def test_files_that_were_found_wrong_are_written_anew_as_a_whole(run, tmp_path):
    first = run()
    first.passes(3)
    first.passes(2, lambda model: read(model, 40))
    altered(tmp_path, working_bytes=5)
    assert run().passes(3) == CHECKED_AND_MEASURED
    (path,) = files(tmp_path)
    assert len(json.loads(path.read_text())["profiles"]) == 1, "lengths that the run has not met are of another kind"


def test_bytes_of_the_cache_count_as_much_more_as_the_first_pass_has_more(run, tmp_path):
    first = run()
    first.passes(3)
    right = first.handle.measurement()
    first.passes(2, lambda model: read(model, 40))
    longer = first.handle.measurement()
    (kind,) = right.kinds
    altered(tmp_path, working_bytes=round(kind.cost.working_bytes / 1.05))
    second = run()
    assert second.passes(2) == RECALLED[:2]
    own = second.handle.measurement().kinds[0].cost
    assert own.working_bytes == pytest.approx(kind.cost.working_bytes, rel=1e-3)
    assert own.saved_bytes == pytest.approx(1.05 * kind.cost.saved_bytes, rel=1e-3)
    assert own.forward_s == kind.cost.forward_s, "times are those of the file"
    second.passes(1, lambda model: read(model, 40))
    for kind, wanted in zip(second.handle.measurement().kinds, longer.kinds, strict=True):
        assert kind.cost.working_bytes == pytest.approx(1.05 * wanted.cost.working_bytes, rel=1e-3)
        for one, other in zip(kind.cost.operations, wanted.cost.operations, strict=True):
            assert one.nbytes == round(second.controller._consensus._ratio * other.nbytes)
        assert kind.cost.forward_s == wanted.cost.forward_s


def test_what_is_compared(run):
    first = run()
    first.passes(3)
    one = first.handle.measurement()
    assert bytes_ratio(one, one) == 1.0
    (kind,) = one.kinds

    def with_cost(**changes):
        return one._replace(kinds=(kind._replace(cost=replace(kind.cost, **changes)),))

    more = with_cost(saved_bytes=round(1.08 * kind.cost.saved_bytes))
    assert bytes_ratio(more, one) == pytest.approx(1.08, rel=1e-3) and bytes_ratio(one, more) == 1.0
    assert bytes_ratio(with_cost(saved_bytes=2 * kind.cost.saved_bytes), one) is None
    assert bytes_ratio(with_cost(forward_s=1e9), one) == 1.0, "times are not compared"
    assert bytes_ratio(one._replace(kinds=(kind._replace(names=kind.names[:-1]),)), one) is None
    assert bytes_ratio(one._replace(kinds=(kind._replace(members=(0, 1)),)), one) is None
    longer = with_cost(
        **{name: round(1.2 * value) for name, value in vars(kind.cost).items() if name.endswith("bytes")}
    )
    assert bytes_ratio(longer, one) == pytest.approx(1.0, abs=1e-3)
    assert longest_input_bytes(longer) > longest_input_bytes(one)


class Roomy(DeviceMemoryProbe):
    """A device on which what comes behind the layers holds as much as the test says."""

    outside = 1000

    def __init__(self, device):
        super().__init__(device)
        self._resets = 0

    def look(self):
        return 0, self.outside if self._resets == 2 else 100

    def reset(self):
        self._resets += 1


def test_another_loss_is_found_out(run, monkeypatch):
    """Layers, and what is described of the rest, are the same; what the loss holds is more."""
    monkeypatch.setattr("rlx.offload.autotune.layer_profile.DeviceMemoryProbe", Roomy)
    first = run()
    first.passes(3)
    assert first.handle.measurement().loss_bytes == 1000
    assert run().passes(2) == RECALLED[:2]
    monkeypatch.setattr(Roomy, "outside", 9000)
    other = run()
    assert other.passes(3) == CHECKED_AND_MEASURED
    assert other.handle.measurement().loss_bytes == 9000


def test_the_call_is_described(toys):
    x = torch.zeros(2, 3)
    assert describe_call([x], CPU) == {"tensors": ["torch.float32 of 2, False"], "autocast": None}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert describe_call([x], CPU)["autocast"] == "torch.bfloat16"


def test_graphs_dropped_in_the_first_pass_and_kept_over_the_second(run):
    run().passes(3)
    dropped = run()
    read(dropped.model)
    assert dropped.passes(3) == [*AS_WITHOUT_FILES[1:], (0, True)]
    kept = run()
    loss = read(kept.model)
    other = read(kept.model)
    loss.backward()
    other.backward()
    assert kept.passes(2)[-1] == (0, True)


def test_a_first_pass_that_the_device_is_behind_with_is_measured_again(run, tmp_path, monkeypatch):
    """The cache has profiles, but none of these layers: nobody waits for the first pass."""
    (tmp_path / "files").mkdir()
    late, is_known = run(), LayerProfile.is_known
    with monkeypatch.context() as patched:
        patched.setattr(LayerProfile, "is_known", False)
        assert late.passes(2) == [(4, False), (4, False)]
    assert LayerProfile.is_known is is_known
    assert late.passes(2) == [(0, True), (0, True)]
