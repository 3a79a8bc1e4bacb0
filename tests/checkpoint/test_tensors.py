"""Files of tensors: what is written, torch's own reader and safetensors read."""

import hashlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from rlx.checkpoint import manifest, tensors
from rlx.checkpoint.manifest import CheckpointError
from rlx.checkpoint.tensors import SAFETENSORS_DTYPES, Piece, Source, load, load_all, shard_name, write_safetensors


def source(name, tensor, offsets=None, parts=1):
    """A source that hands the bytes out in several parts."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    return Source(Piece(name, offsets or (0,) * tensor.ndim, tensor), lambda: list(data.tensor_split(parts)))


def of_every_type():
    values = torch.arange(35).reshape(5, 7)
    found = {str(dtype): values.to(dtype) for dtype in SAFETENSORS_DTYPES}
    return {**found, "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "a/b.c": torch.ones(1, dtype=torch.int8)}


def test_every_type_comes_back_and_the_digests_are_those_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "WRITE_BYTES", 16)
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 100)
    wanted = of_every_type()
    path = tmp_path / shard_name(0, 1)
    entry = write_safetensors(path, [source(name, tensor, parts=3) for name, tensor in wanted.items()])
    manifest.seal(tmp_path, {path.name: entry})
    assert manifest.damaged_chunks(tmp_path) == []
    assert entry.nbytes == path.stat().st_size and len(entry.digests) == -(-entry.nbytes // 100)
    for found in (load_file(path), load_all(tmp_path)):
        assert found.keys() == wanted.keys()
        assert all(
            torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in wanted.items()
        )


def test_the_pieces_of_several_processes_make_one_tensor_for_torchs_reader(tmp_path):
    whole = torch.randn(10, 3)
    for rank, (start, end) in enumerate(((0, 4), (4, 8), (8, 10))):
        write_safetensors(tmp_path / shard_name(rank, 3), [source("w", whole[start:end], (start, 0))])
    state = {"w": torch.zeros(10, 3)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["w"], whole)
    (tmp_path / shard_name(0, 3)).unlink()
    with pytest.raises(CheckpointError, match="w: got 18 elements, expected 30"):
        load({"w": torch.zeros(10, 3)}, tmp_path)


def test_a_parameter_may_lack_all_of_its_state_but_not_a_part(tmp_path):
    write_safetensors(tmp_path / shard_name(0, 1), [source("a.avg", torch.ones(3)), source("a.step", torch.ones(()))])
    state = {name: torch.full((3,) if "avg" in name else (), 7.0) for name in ("a.avg", "a.step", "b.avg", "b.step")}
    assert load(state, tmp_path, of_optimizer=True) == {"b"}
    assert [tensor.sum().item() for tensor in state.values()] == [3, 1, 21, 7]
    with pytest.raises(CheckpointError, match=r"a\.square is not in it"):
        load({**state, "a.square": torch.ones(3)}, tmp_path, of_optimizer=True)
    with pytest.raises(CheckpointError, match=r"b\.avg is not in it; b\.step is not in it"):
        load(state, tmp_path)


def test_equal_states_give_equal_files(tmp_path):
    sums = set()
    for name in ("a", "b"):
        write_safetensors(tmp_path / name, [source(name, tensor) for name, tensor in of_every_type().items()])
        sums.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(sums) == 1


@pytest.mark.parametrize("data", [b"", b"x", b"\xff" * 64, b"\x08" + bytes(7) + b"{}      "])
def test_a_file_that_is_none_of_tensors_is_named(data, tmp_path):
    (tmp_path / shard_name(0, 1)).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{tmp_path}"):
        load({"w": torch.zeros(1)}, tmp_path)
