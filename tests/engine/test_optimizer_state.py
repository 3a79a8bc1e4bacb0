"""An optimizer whose state waits in host memory steps as one that keeps it, to the last bit."""

import pytest
import torch
from torch.optim import AdamW

from rlx.config.host_memory import HostMemory
from rlx.engine.host_offload import HandOverError
from rlx.engine.optimizer import MasterAdamW, ShardAdamW
from rlx.engine.optimizer_state import OptimizerStateOnHost
from rlx.offload import HostArena

SIZES = (40, 3, 100, 1, 64, 64, 7, 70, 70, 50, 20, 60)  # fp32 elements
CPU = torch.device("cpu")


def parameters():
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, generator=g)) for n in SIZES]


def give_gradients(parameters, seed, without=()):
    g = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=g)
        parameter.grad = None if number in without else gradient.to(parameter)


def pair(arena=None, piece_bytes=600, fused=None):
    """Parameters and optimizer that keep their state, and the same with the state on the host."""
    kept, moved = parameters(), parameters()
    options = {"lr": 0.1, "weight_decay": 0.1, "fused": fused}
    optimizers = [AdamW(kept, **options), ShardAdamW(moved, **options)]
    state = OptimizerStateOnHost(optimizers[1], arena or HostArena(pinned=False), "state", CPU, piece_bytes)
    return kept, moved, *optimizers, state


def on_device_bytes(optimizer):
    states = [values.items() for values in optimizer.state.values()]
    storages = [x.untyped_storage() for each in states for name, x in each if name != "step"]
    return sum(storage.nbytes() for storage in storages)


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("piece_bytes", [1, 600, 1 << 30])
def test_steps_in_pieces_are_those_of_the_whole(piece_bytes, fused):
    kept, moved, whole, pieces, state = pair(piece_bytes=piece_bytes, fused=fused)
    for number in range(4):
        for each in (kept, moved):
            give_gradients(each, number, without=(1,) if number < 2 else ())  # one joins later
        for optimizer in (whole, pieces):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        whole.step()
        state.step()
        assert same(kept, moved)
        assert on_device_bytes(pieces) == 0
        assert [len(group["params"]) for group in pieces.param_groups] == [len(SIZES)]
    state.to_device()
    for parameter, other in zip(kept, moved, strict=True):
        assert same(whole.state[parameter].values(), pieces.state[other].values())
    state.to_host()
    state.to_host()
    assert on_device_bytes(pieces) == 0


@pytest.mark.parametrize("makes", [MasterAdamW, ShardAdamW])
@pytest.mark.parametrize("large", [5000, 4 * 997 + 1])
def test_the_device_holds_three_pieces_at_most_also_of_a_state_that_is_larger(makes, large, monkeypatch):
    """From the first step on: a new state is made a tensor at a time."""
    piece_bytes = 4096
    g = torch.Generator().manual_seed(0)
    kept = [torch.nn.Parameter(torch.randn(n, generator=g).bfloat16()) for n in (*SIZES, large)]
    moved = [torch.nn.Parameter(p.detach().clone()) for p in kept]
    whole, pieces = (makes(each, lr=0.1, weight_decay=0.1) for each in (kept, moved))
    state = OptimizerStateOnHost(pieces, HostArena(pinned=False), "state", CPU, piece_bytes)
    of_one = (12 if makes is MasterAdamW else 4) * large
    assert max(sum(each.nbytes for each in piece) for piece in state.pieces) <= piece_bytes + 64 * 12 < of_one / 3
    held = []
    pieces.register_step_pre_hook(lambda optimizer, *_: held.append(on_device_bytes(optimizer)))
    for number in range(3):
        for each in (kept, moved):
            give_gradients(each, number)
        whole.step()
        state.step()
        assert same(kept, moved) and on_device_bytes(pieces) == 0
    assert 0 < max(held) <= 3 * piece_bytes
    state.to_device()
    for parameter, other in zip(kept, moved, strict=True):
        assert same(whole.state[parameter].values(), pieces.state[other].values())


def test_a_divided_state_whose_parameter_has_no_gradient_stays_as_it_is():
    kept, moved, whole, _, state = pair(piece_bytes=1)
    for number, without in enumerate([(2,), (), (2, 4), ()]):
        for each in (kept, moved):
            give_gradients(each, number, without)
        whole.step()
        state.step()
        assert same(kept, moved)


def test_a_device_without_room_is_named_before_anything_moves(monkeypatch):
    _, moved, _, pieces, state = pair()
    for number in range(2):
        give_gradients(moved, number)
        before = [parameter.detach().clone() for parameter in moved]
        with monkeypatch.context() as patch:
            for piece in state.pieces:
                patch.setattr(piece[0], "nbytes", 1 << 60)
            with pytest.raises(HandOverError, match=r"state: the optimizer's step needs .* GB of device memory"):
                state.step()
        assert same(before, moved) and on_device_bytes(pieces) == 0
        state.step()
        assert not same(before, moved)


def test_a_host_without_room_leaves_a_whole_step_and_is_named_when_the_engine_moves(monkeypatch):
    arena = HostArena(pinned=False)
    kept, moved, whole, pieces, state = pair(arena)
    for each in (kept, moved):
        give_gradients(each, 0)
    whole.step()
    with monkeypatch.context() as patch:
        patch.setattr("rlx.engine.host_offload.host_memory", lambda: HostMemory(0, 1 << 40))
        state.step()
        assert same(kept, moved) and on_device_bytes(pieces) > 0
        with pytest.raises(HandOverError, match=r"state: .* to offload to host memory"):
            state.to_host()
    for each in (kept, moved):
        give_gradients(each, 1)
    whole.step()
    state.step()
    assert same(kept, moved) and on_device_bytes(pieces) == 0
    assert arena.holders()["state"] == sum(2 * 4 * n for n in SIZES)


STATE_BYTES = 12 * sum(SIZES)  # with masters


def split_pair(device, device_bytes):
    """fp32 weights under AdamW, and bf16 weights with masters whose state is split over device and host."""
    narrow = [torch.nn.Parameter(p.detach().bfloat16().to(device)) for p in parameters()]
    wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    options = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    arena = HostArena(pinned=device.type != "cpu")
    masters = MasterAdamW(narrow, **options)
    return (
        wide,
        narrow,
        AdamW(wide, **options),
        masters,
        arena,
        OptimizerStateOnHost(masters, arena, "state", device, piece_bytes=600, device_bytes=device_bytes),
    )


@pytest.mark.parametrize("device_bytes", [0, 1300, 4000, STATE_BYTES])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
def test_a_state_split_over_device_and_host_steps_as_fp32_weights_do(device, device_bytes):
    wide, narrow, reference, masters, arena, state = split_pair(torch.device(device), device_bytes)
    for number in range(4):
        give_gradients(narrow, number)
        for one, other in zip(wide, narrow, strict=True):
            one.grad = other.grad.float() * (0.5 if number == 2 else 1.0)
        masters.gradient_scale = 0.5 if number == 2 else 1.0
        reference.step()
        state.step()
        assert all(torch.equal(one.bfloat16(), other) for one, other in zip(wide, narrow, strict=True))
        stays = sum(12 * p.numel() for p in state.staying)
        assert on_device_bytes(masters) == stays <= device_bytes
        assert arena.holders()["state"] == STATE_BYTES - stays
    state.to_device()
    for one, other in zip(wide, narrow, strict=True):
        assert torch.equal(one, masters.state[other]["master"])
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(reference.state[one][moment], masters.state[other][moment])


def test_large_states_stay_on_the_device():
    *_, state = split_pair(CPU, 12 * 170)
    assert [p.numel() for p in state.staying] == [100, 70]
    assert sum(each.nbytes for piece in state.pieces for each in piece) == STATE_BYTES - 12 * 170
