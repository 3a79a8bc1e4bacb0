"""Damaged checkpoints: each is refused, none is trained on, and none runs code.

A resume looks three times: the driver at names, sizes and small files (`refusal_of`), the workers at the digests of their shares
(`damaged_chunks`), and the engine at the tensors' names, shapes, types and places before it reads any. Damage by accident
stops at the first two. A forged checkpoint has a manifest that fits (`seal`), so the engine has to refuse it.
"""

import json
import math
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlx.checkpoint.manifest import CheckpointError, damaged_chunks, seal
from rlx.checkpoint.role import read_description
from rlx.export import main
from rlx.trainer.checkpoints import DriverState, refusal_of, write_driver_state

STEP = "global_step_3"
MODEL, OPTIMIZER = (f"actor/{part}/shard-0000{{}}-of-00002.safetensors".format for part in ("model", "optimizer"))
NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


def state_of(step):
    sampler = {"epoch": 0, "position": 6, "size": 9, "shuffle": True, "seed": 1}
    return DriverState(step, 1, 4, sampler, {"type": "fixed", "coef": 0.1}, 0, {"val/accuracy": 0.25})


@pytest.fixture(scope="module")
def saved(model_folder, two_ranks, tmp_path_factory):
    """Two checkpoints of two processes: that of step 3, and an older one with other weights."""
    base = tmp_path_factory.mktemp("saved")
    for step, updates in ((3, 2), (2, 1)):
        folder = base / f"global_step_{step}"
        folder.mkdir()
        contents = ("model", "optimizer", "extra")
        two_ranks("checkpoint", "stopped", model_folder, "fsdp2", str(folder / "actor"), 0, contents, updates)
        write_driver_state(folder, state_of(step))
        seal(folder, {})
    return base


class Bomb:
    """Makes the file RAN when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path(os.environ["RAN"]),)


def bombs():
    return pickle.dumps(Bomb())


# By accident: what it does to the folder, and what is said of it. -----------------------------------------------------


def flip(name, where=0.5):
    def harm(folder):
        data = bytearray((folder / name).read_bytes())
        data[int(where * (len(data) - 1))] ^= 4
        (folder / name).write_bytes(data)

    return harm


def cut(name, left):
    return lambda folder: os.truncate(folder / name, int(left * (folder / name).stat().st_size))


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def remove(name):
    def harm(folder):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return harm


def from_older(name, to=None):
    """Put a part of the older checkpoint in its place."""

    def harm(folder):
        source, target = folder.parent / "global_step_2" / name, folder / (to or name)
        if source.is_dir():
            shutil.rmtree(target)
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)

    return harm


def link(name, to):
    def harm(folder):
        target = folder.parent / STEP / "linked"
        (folder / name).rename(target) if to == "itself" else remove(name)(folder)
        (folder / name).symlink_to(target if to == "itself" else to)

    return harm


def instead(name, make):
    return lambda folder: (remove(name)(folder), make(folder / name))


ENTRY = '{"format": 2, "files": {"%s": {"bytes": %s, "xxh3_128": %s}}}'
CHANGED, MISSING, ALIEN = "have changed since they were written", "is missing", "is no manifest that rlx wrote"
ACCIDENTS = {
    "bit of a shard's header": (flip(MODEL(1), 0.01), CHANGED),
    "bit of the weights": (flip(MODEL(2)), CHANGED),
    "bit of the manifest": (flip("manifest.json", 0.9), "manifest.json|have changed"),
    "half a shard": (cut(MODEL(1), 0.5), "got .* bytes, expected"),
    "missing shard of the model": (remove(MODEL(1)), MISSING),
    "missing role": (remove("actor"), MISSING),
    "missing manifest": (remove("manifest.json"), MISSING),
    "stale shard of another division": (
        from_older(MODEL(1), "actor/model/shard-00001-of-00001.safetensors"),
        "is not in the manifest",
    ),
    "stale shard of the same name": (from_older(MODEL(2)), CHANGED),
    "link to the same shard": (link(MODEL(1), "itself"), "is a symbolic link"),
    "pipe instead of the driver's state": (instead("driver.json", os.mkfifo), MISSING),
    "pickle beside the shards": (lambda c: write("actor/model/.metadata", bombs())(c), "is not in the manifest"),
    "manifest of another version": (write("manifest.json", '{"format": 3}'), "this version reads 2"),
    "manifest without end": (write("manifest.json", "[" * 99_999), "is not valid JSON"),
    "manifest of 10^5 files": (
        lambda c: write(
            "manifest.json",
            json.dumps({"format": 2, "files": {f"f{i}": {"bytes": 0, "xxh3_128": [""]} for i in range(10**5)}}),
        )(c),
        "is missing",
    ),
    "manifest with a size that is true": (write("manifest.json", ENTRY % ("driver.json", "true", '[""]')), ALIEN),
    "manifest with a path outside": (write("manifest.json", ENTRY % ("../driver.json", 0, '[""]')), ALIEN),
    "manifest without digests": (write("manifest.json", ENTRY % ("driver.json", 9, "[]")), ALIEN),
    "manifest of nothing": (write("manifest.json", '{"format": 2, "files": {}}'), "is not in the manifest"),
}


# Forged: the manifests fit. ------------------------------------------------------------------------------------------


def rewritten(change, *shards, part="model"):
    """Change the tensors and places of some shards of the model, or of the optimizer."""

    def harm(folder):
        for path in folder.glob(f"actor/{part}/*"):
            if not shards or path.name[10] in shards:
                with safe_open(path, "pt") as file:
                    tensors, metadata = {n: file.get_tensor(n) for n in file.keys()}, file.metadata()  # noqa: SIM118
                offsets = json.loads(metadata["DCP_SHARDING_INFO"])
                change(tensors, offsets)
                save_file(tensors, path, {**metadata, "DCP_SHARDING_INFO": json.dumps(offsets)})

    return harm


def header(change, shard=1):
    """Change the header of a shard of the model, as text."""

    def harm(folder):
        data = (folder / MODEL(shard)).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        text = change(data[8:end].decode()).encode()
        (folder / MODEL(shard)).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return harm


def edited(name, **values):
    def harm(folder):
        found = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**found, **values}))

    return harm


def pickled(folder):
    """In format 1: tensors in pickles, as DCP writes them by default."""
    edited("actor/checkpoint.json", format=1)(folder)
    for part in ("model", "optimizer"):
        for path in folder.glob(f"actor/{part}/*"):
            path.unlink()
        for name in (".metadata", "__0_0.distcp"):
            write(f"actor/{part}/{name}", bombs())(folder)


def without(name):
    return lambda tensors, offsets: (tensors.pop(name), offsets.pop(name))


def place(*at):
    return lambda _, offsets: offsets[UP].update(saved_offsets=list(at))


def beside_a_third(folder):
    """Of 48 x 32 numbers 48 x 16, 2 x 16 beside them, and 46 x 16 over the first."""
    for shard, shape, at in (("1", (48, 16), (0, 0)), ("2", (2, 16), (0, 16))):
        rewritten(lambda t, o, s=shape: t.update({UP: torch.zeros(s, dtype=torch.float64)}), shard)(folder)
        rewritten(place(*at), shard)(folder)
    third = {"format": "pt", "DCP_SHARDING_INFO": json.dumps({UP: {"saved_offsets": [1, 0]}})}
    path = folder / "actor/model/shard-00003-of-00003.safetensors"
    save_file({UP: torch.zeros(46, 16, dtype=torch.float64)}, path, third)


FORGED = {
    "missing tensor": (rewritten(without(NORM)), f"{NORM} is not in it"),
    "missing piece": (rewritten(without(UP), "1"), "elements, expected"),
    "another type": (
        rewritten(lambda tensors, _: tensors.update({n: t.float() for n, t in tensors.items()})),
        "got torch.float32, expected torch.float64",
    ),
    "another shape": (
        rewritten(lambda tensors, _: tensors.update({NORM: torch.zeros(7, dtype=torch.float64)})),
        r"expected \(32,\)",
    ),
    "foreign tensor": (
        rewritten(lambda t, o: (t.update(other=torch.zeros(1)), o.update(other={"saved_offsets": [0]}))),
        "other is not in this model",
    ),
    "piece in another piece's place": (rewritten(place(24, 0), "1"), "two of its pieces overlap"),
    "piece outside": (rewritten(place(999, 0), "1"), r"got shape .*expected \(48, 32\)"),
    "pieces without places": (
        header(lambda text: text.replace("DCP_SHARDING_INFO", "DCP_SHARDING_OFNI"), shard=2),
        "cannot be read|does not fit",
    ),
    "tensor beyond the end": (
        header(lambda t: re.sub(r"(data_offsets.: .\d+, )(\d+)", r"\g<1>9\2", t, count=1)),
        "cannot be read",
    ),
    "header of 2^62 bytes": (lambda c: write(MODEL(1), (1 << 62).to_bytes(8, "little") + b"{}")(c), "cannot be read"),
    "pickle for a shard": (lambda c: write(MODEL(1), bombs())(c), "cannot be read"),
    "no shard": (remove("actor/model"), "cannot be read|does not fit"),
    "head of another role": (edited("actor/checkpoint.json", head="value"), "got head value"),
    "adapters of another form": (edited("actor/checkpoint.json", adapters=[1]), "is no description that rlx wrote"),
    "unknown field": (edited("actor/checkpoint.json", code="import os"), "has code, which this version does not know"),
    "description of another version": (edited("actor/checkpoint.json", format=9), "this version reads 2"),
    "pickles of an earlier version": (pickled, "got format 1, this version reads 2"),
    "state of another step": (edited("driver.json", step=7), "got the state of step 7"),
    "step that is a text": (edited("driver.json", seed="1"), "got seed='1', which"),
    "sampler that is a list": (edited("driver.json", sampler=[]), "sampler.epoch=None"),
    "another type in one of two shards": (
        rewritten(lambda tensors, _: tensors.update({UP: tensors[UP].view(torch.int64)}), "2"),
        f"{UP}: got pieces of F64 and I64",
    ),
    "pieces that overlap beside a third one": (beside_a_third, "two of its pieces overlap"),
    **{
        f"optimizer's state with {name}": (
            rewritten(lambda tensors, _, n=f"state.{UP}.{key}", v=value: tensors[n].fill_(v), "2", part="optimizer"),
            f"{UP}.{key} is {said}",
        )
        for name, key, value, said in (
            ("squares below 0", "exp_avg_sq", -1e-3, "-0.001, which is too small"),
            ("moments that are no numbers", "exp_avg", math.nan, "NaN or infinite"),
        )
    },
    "weights that are no numbers": (
        rewritten(lambda tensors, _: tensors[UP].view(-1)[3:5].copy_(torch.tensor([math.nan, -math.inf])), "1"),
        f"NaN or infinite weights: {UP} .2 of",
    ),
    **{
        f"driver's state with {name}": (edited("driver.json", **{key: value}), said)
        for name, key, value, said in (
            ("a position below 0", "sampler", {"epoch": 0, "position": -3}, "sampler.position=-3"),
            ("a position beyond the end", "sampler", {"epoch": 0, "position": 10, "size": 9}, "=10 of 9 prompts"),
            ("steps below 0", "skipped_steps", -1, "skipped_steps=-1"),
            ("a version of 2^64", "policy_version", 1 << 64, "policy_version=18446"),
            ("a coefficient below 0", "kl_controller", {"coef": -1.0}, "kl_controller.coef=-1.0"),
            ("a validation of texts", "first_validation", {"val/accuracy": "1"}, "first_validation.val/accuracy='1'"),
        )
    },
}


@pytest.fixture
def harmed(saved, tmp_path, monkeypatch):
    """harmed(harm) returns a checkpoint that was harmed, beside an older one."""
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))

    def make(harm):
        for step in (3, 2):
            shutil.copytree(saved / f"global_step_{step}", tmp_path / f"global_step_{step}")
        harm(tmp_path / STEP)
        return tmp_path / STEP

    yield make
    assert not (tmp_path / "ran").exists(), "a pickle was read"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("contents", "model"),
        ("contents", ["model", "pickle"]),
        ("updates", "2"),
        ("updates", -1),
        ("steps", "1"),
        ("updates", 0),  # after 2 steps
        ("head", []),
        ("base", 5),
        ("adapters", {"x": [math.inf, False]}),
        ("adapters", {"x": [1.0, False, False, "weight", -1]}),
    ],
)
def test_a_forged_description_is_named(name, value, harmed):
    folder = harmed(edited("actor/checkpoint.json", **{name: value})) / "actor"
    with pytest.raises(CheckpointError, match=rf"checkpoint.json: is no description .* got .*{name}="):
        read_description(folder)


@pytest.mark.parametrize("damage", ACCIDENTS)
def test_damage_by_accident_is_found_before_any_tensor_is_read(damage, harmed):
    harm, said = ACCIDENTS[damage]
    checkpoint = harmed(harm)
    faults = refusal_of(checkpoint).faults or damaged_chunks(checkpoint)
    assert any(re.search(said, fault) for fault in faults), faults
    assert all(str(checkpoint) in fault for fault in faults), "each names its file"
    assert not refusal_of(checkpoint.parent / "global_step_2").faults, "the older one is whole"


@pytest.mark.slow
@pytest.mark.parametrize("damage", FORGED)
def test_a_forged_checkpoint_is_refused_and_nothing_has_changed(damage, harmed, model_folder, two_ranks):
    harm, said = FORGED[damage]
    checkpoint = harmed(harm)
    for folder in (checkpoint / "actor", checkpoint):
        (folder / "manifest.json").unlink()
        seal(folder, {})
    assert damaged_chunks(checkpoint) == []
    if faults := refusal_of(checkpoint).faults:
        assert re.search(said, faults[0]), faults
        return
    message, unchanged = two_ranks("checkpoint", "damaged", model_folder, str(checkpoint / "actor"))[0]
    assert re.search(said, message) and str(checkpoint / "actor") in message, message
    in_place = damage == "weights that are no numbers" or damage.startswith("optimizer's state")
    assert unchanged or in_place, "numbers are looked at when they are in place"


def test_pickles_beside_the_tensors_are_never_read_even_if_they_are_listed(harmed, model_folder, two_ranks, tmp_path):
    def harm(folder):
        for name in ("model/.metadata", "optimizer/.metadata", "model/__0_0.distcp", "card/rlx.pkl"):
            write(f"actor/{name}", bombs())(folder)

    folder = harmed(harm) / "actor"
    assert main([str(folder), str(tmp_path / "out")]) == 2
    (folder / "manifest.json").unlink()
    seal(folder, {})
    two_ranks("checkpoint", "resumed", model_folder, "fsdp2", str(folder))
    assert main([str(folder), str(tmp_path / "out")]) == 0


def test_a_checkpoint_without_damage_is_taken(saved):
    assert not refusal_of(saved / STEP).faults and damaged_chunks(saved / STEP) == []
