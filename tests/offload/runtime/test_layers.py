import pytest
from torch import nn

from rlx.offload.runtime.layers import find_layers


def names(model, layers=None):
    return [name for name, _ in find_layers(model, layers)]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))


def test_no_split_modules_come_first():
    class Block(nn.Module):
        pass

    class Model(nn.Module):
        _no_split_modules = ("Block", "Embeddings")

        def __init__(self):
            super().__init__()
            self.embeddings = type("Embeddings", (nn.Module,), {})()
            self.other = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
            self.blocks = nn.ModuleList(Block() for _ in range(2))

    assert names(Model()) == ["blocks.0", "blocks.1"]
    assert names(nn.ModuleDict({"inner": Model()})) == ["inner.blocks.0", "inner.blocks.1"]


def test_the_outermost_lists_of_one_class():
    model = nn.Module()
    model.encoder = nn.ModuleList(Experts() for _ in range(2))
    model.decoder = nn.ModuleList(Experts() for _ in range(2))
    model.mixed = nn.ModuleList([nn.Linear(1, 1), nn.ReLU()])
    assert names(model) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


def test_the_blocks_of_a_sequential():
    assert names(nn.Sequential(nn.Embedding(2, 2), Block(), Block(), nn.Linear(2, 2))) == ["1", "2"]
    model = nn.Module()
    model.stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert names(model) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    model.layers = nn.ModuleList([Block()])
    assert names(model) == ["layers.0"], "a list comes first"
    for alone in (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(Block(), nn.Tanh())):
        with pytest.raises(
            ValueError, match=r"no layers found.*put several into one nn.Sequential each.*layers=\[...\]"
        ):
            names(alone)
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["Linear"]) == ["0", "1"]


def mlp():
    return nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))


def test_sequentials_of_one_structure_in_a_sequential_are_blocks():
    blocks = [str(index) for index in range(8)]
    assert names(nn.Sequential(*(mlp() for _ in blocks))) == blocks
    head = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 3))
    assert names(nn.Sequential(*(mlp() for _ in blocks), head)) == blocks
    stages = nn.Sequential(nn.Sequential(mlp(), mlp()), nn.Sequential(mlp(), mlp()), head)
    assert names(stages) == ["0.0", "0.1", "1.0", "1.1"]
    assert names(nn.Sequential(mlp(), mlp(), Block(), Block())) == ["2", "3"], (
        "blocks of a class of their own come first"
    )


def test_layers_are_named_in_any_way_and_kept_in_order(toys):
    model = toys.stack()
    wanted = ["layers.0", "layers.2"]
    assert names(model, ["layers.2", "layers.0"]) == wanted
    assert names(model, [model.layers[2], model.layers[0]]) == wanted
    assert names(model, ["Block"]) == names(model, [type(model.layers[0])]) == ["layers.0", "layers.1", "layers.2"]


def test_the_model_is_no_layer_of_its_own_class_if_others_are():
    for layer in ("Sequential", nn.Sequential):
        assert names(nn.Sequential(mlp(), mlp()), [layer]) == ["0", "1"]
        assert names(mlp(), [layer]) == [""]


def test_bad_layers_are_told(toys):
    with pytest.raises(ValueError, match="layers="):
        find_layers(nn.Linear(1, 1), None)
    with pytest.raises(ValueError, match=r"'layers\.7'"):
        find_layers(toys.stack(), ["layers.7"])
    with pytest.raises(ValueError, match="the string 'Block'"):
        find_layers(toys.stack(), "Block")
    for single in (nn.Linear, nn.Linear(1, 1)):
        with pytest.raises(ValueError, match=r"layers= is (class|module) Linear, expected a sequence of modules"):
            find_layers(toys.stack(), single)
    with pytest.raises(ValueError, match="class Bilinear is not a module, module name, class"):
        find_layers(toys.stack(), [nn.Bilinear])
    with pytest.raises(ValueError, match="the model itself contains the layer '0'"):
        find_layers(mlp(), ["", "0"])
    with pytest.raises(ValueError, match="module Linear"):
        find_layers(toys.stack(), [nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="inside one another"):
        find_layers(toys.stack(), ["layers.0", "layers.0.up"])
