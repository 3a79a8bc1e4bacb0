import json

import pytest
import torch
from peft import PeftModel
from torch import nn

from rlx.config.schema import LoraConfig, ModelConfig
from rlx.models.loading import ModelError, load_model, load_skeleton
from rlx.models.lora import AdapterKind, adapter_faults, adapter_weights, add_lora, load_adapters, write_adapters
from rlx.models.preflight import faults_of

IDS = torch.arange(12).reshape(2, 6)
KINDS = {"LoRA": LoraConfig(), "rsLoRA": LoraConfig(use_rslora=True), "DoRA": LoraConfig(use_dora=True)}


def config_of(folder, kind="LoRA", **changed):
    given = {"path": folder, "lora_rank": 3, "lora_alpha": 12, "lora": KINDS[kind]}
    return ModelConfig(**(given | changed))


def adapted(config, seed):
    model = load_model(config, "lm", torch.float32)
    adapters = add_lora(model, config, seed)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if ".lora_" in name:
            nn.init.uniform_(parameter, 0.1, 0.9, generator=torch.Generator().manual_seed(seed + i))
    return model, dict(adapter_weights(dict(model.named_parameters()), adapters))


@pytest.fixture
def written(folders, tmp_path):
    """kind -> a model with adapters, and the folder that it was written to."""

    def write(kind="LoRA", **changed):
        config = config_of(folders["qwen3"], kind, **changed)
        model, weights = adapted(config, seed=3)
        write_adapters(tmp_path, weights, AdapterKind.of(config))
        return model, str(tmp_path)

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_what_is_written_and_computes_the_same(kind, written, folders):
    model, path = written(kind)
    theirs = PeftModel.from_pretrained(load_model(ModelConfig(path=folders["qwen3"]), "lm", torch.float32), path)
    assert torch.allclose(theirs(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_starts_from_what_peft_wrote(kind, written, folders, tmp_path):
    model, path = written(kind)
    theirs = PeftModel.from_pretrained(load_model(ModelConfig(path=folders["qwen3"]), "lm", torch.float32), path)
    theirs.save_pretrained(tmp_path / "theirs")
    config = config_of(folders["qwen3"], kind, lora_adapter_path=str(tmp_path / "theirs"))
    own, _ = adapted(config, seed=5)
    load_adapters(own, config)
    assert all(torch.equal(p, own.get_parameter(name)) for name, p in model.named_parameters())
    skeleton = load_skeleton(config, "lm", torch.float32)
    with torch.device("meta"):
        add_lora(skeleton, config)
    load_adapters(skeleton, config)  # on other ranks
    assert faults_of(config, "lm") == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_rank": 4}, "have r=3, but lora_rank=4; set lora_rank=3"),
        ({"lora_alpha": 16}, "lora_alpha=12, but lora_alpha=16"),
        ({"lora": LoraConfig(use_dora=True)}, "have use_dora=False, but lora.use_dora=True"),
        ({"target_modules": "q_proj"}, "has in excess .* Set target_modules=down_proj,gate_proj,k_proj,"),
    ],
)
def test_adapters_of_another_kind_are_refused_before_a_run(changed, message, written, folders):
    _, path = written()
    (fault,) = faults_of(config_of(folders["qwen3"], **{"lora_adapter_path": path} | changed), "lm")
    with pytest.raises(ModelError, match=message):
        raise ModelError(fault)


def test_adapters_of_fewer_layers_or_of_another_model_are_refused(written, folders):
    _, path = written(target_modules="q_proj")
    (fault,) = faults_of(config_of(folders["qwen3"], lora_adapter_path=path), "lm")
    assert "lacks" in fault and "Set target_modules=q_proj" in fault
    wide = {"intermediate_size": 24, "num_attention_heads": 8}
    config = config_of(folders["qwen3"], lora_adapter_path=path, target_modules="q_proj", override_config=wide)
    (fault,) = faults_of(config, "lm")
    assert "belong to another model" in fault


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bias", "all"),
        ("modules_to_save", ["score"]),
        ("rank_pattern", {"q_proj": 1}),
        ("init_lora_weights", "pissa"),  # it changes the base weights too
    ],
)
def test_options_of_peft_that_rlx_lacks_are_named(name, value, written, folders):
    _, path = written()
    file = f"{path}/adapter_config.json"
    with open(file) as opened:
        settings = json.load(opened)
    with open(file, "w") as opened:
        json.dump(settings | {name: value}, opened)
    (fault,) = adapter_faults(path, config_of(folders["qwen3"]))
    assert f"peft's {name}={value!r}" in fault


def test_a_folder_without_adapters_is_refused(folders, tmp_path):
    (fault,) = adapter_faults(str(tmp_path), config_of(folders["qwen3"]))
    assert "has no adapter_config.json and no adapter_model.safetensors" in fault


def test_a_configuration_that_is_nested_too_deep_is_named(written, folders):
    _, path = written()
    with open(f"{path}/adapter_config.json", "w") as opened:
        opened.write('{"peft_type": ' + "[" * 100_000 + "]" * 100_000 + "}")
    (fault,) = adapter_faults(path, config_of(folders["qwen3"]))
    assert "adapter_config.json cannot be read as JSON" in fault
