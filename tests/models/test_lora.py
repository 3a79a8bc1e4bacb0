"""Adapters: in a model, merged, and in folders of peft's format."""

import copy
import json
import re
import sys
import warnings
from dataclasses import replace

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from torch import nn

from rlx.config.schema import LoraConfig, ModelConfig
from rlx.models.loading import ModelError, load_model, load_skeleton
from rlx.models.lora import (
    Adapter,
    AdapterKind,
    adapted_experts,
    adapter_faults,
    adapter_targets,
    adapter_weights,
    adapters_off,
    add_lora,
    load_adapters,
    merged_weights,
    require_called_adapters,
    write_adapters,
)
from rlx.models.preflight import faults_of
from tests.tiny_models import config_of, tiny_model

IDS = torch.arange(12).reshape(2, 6)


KINDS = {"LoRA": LoraConfig(), "rsLoRA": LoraConfig(use_rslora=True), "DoRA": LoraConfig(use_dora=True)}
kinds = pytest.mark.parametrize("kind", KINDS)


def adapted(folder, head="lm", dtype=torch.float32, targets="all-linear", seed=0, kind="LoRA"):
    """A model before adapters, the same with them, and what add_lora said; the adapters are no longer 0."""
    config = ModelConfig(path=folder, lora_rank=3, lora_alpha=12, target_modules=targets, lora=KINDS[kind])
    plain = load_model(config, head, dtype)
    model = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapters = add_lora(model, config, seed)
    if dtype != torch.bfloat16:  # FSDP casts adapters to the type of computation
        tolerance = 1e-5 if kind == "DoRA" else 0
        assert torch.allclose(model(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=0, atol=tolerance)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(i))
        elif "magnitude" in name:
            nn.init.uniform_(parameter, 0.5, 1.5, generator=torch.Generator().manual_seed(i))
    return plain, model, adapters


def parameters(model):
    return dict(model.named_parameters())


@kinds
@pytest.mark.parametrize("head", ["lm", "value"])
def test_merged_model_computes_the_same(folder, head, kind):
    plain, model, adapters = adapted(folder, head, torch.float64, kind=kind)
    merged = dict(merged_weights(parameters(model), adapters))
    assert list(merged) == list(parameters(plain))
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, plain.get_parameter(name))}
    assert changed == {f"{layer}.weight" for layer in adapters}
    plain.load_state_dict(merged, strict=False)
    logits = model(input_ids=IDS).logits
    assert torch.allclose(plain(input_ids=IDS).logits, logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("targets", "kind"), [("all-linear", "LoRA"), ("q_proj, mlp.down_proj", "rsLoRA"), ("all-linear", "DoRA")]
)
def test_equals_pefts_own_merge(folders, targets, kind):
    plain, model, adapters = adapted(folders["qwen3"], targets=targets, kind=kind)
    names = "all-linear" if targets == "all-linear" else ["q_proj", "mlp.down_proj"]
    options = {"use_dora": KINDS[kind].use_dora, "use_rslora": KINDS[kind].use_rslora, "task_type": "CAUSAL_LM"}
    theirs = get_peft_model(plain, peft.LoraConfig(r=3, lora_alpha=12, target_modules=names, **options))
    state = {f"base_model.model.{n.replace('.default', '')}": p for n, p in parameters(model).items() if "lora_" in n}
    state = {n.replace("magnitude_vector.weight", "magnitude_vector"): p for n, p in state.items()}
    assert not set_peft_model_state_dict(theirs, state).unexpected_keys
    assert torch.allclose(theirs(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=1e-6)
    expected = parameters(theirs.merge_and_unload())
    merged = dict(merged_weights(parameters(model), adapters))
    assert list(merged) == list(expected)
    assert all(torch.allclose(merged[n], expected[n], rtol=0, atol=1e-7) for n in expected)


def test_which_layers_get_adapters(folders):
    _, _, adapters = adapted(folders["llama"])
    kinds = {name.rpartition(".")[2] for name in adapters}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(adapters) == 14 and set(adapters.values()) == {Adapter(scale=4.0, transposed=False)}
    _, _, adapters = adapted(folders["gpt2"])
    assert set(adapters.values()) == {Adapter(scale=4.0, transposed=True)}
    _, _, adapters = adapted(folders["llama"], targets="q_proj,mlp.down_proj")
    assert {re.sub(r"\d", "*", name) for name in adapters} == {
        "model.layers.*.self_attn.q_proj",
        "model.layers.*.mlp.down_proj",
    }


@pytest.mark.parametrize("head", ["lm", "value"])
def test_only_adapters_and_a_value_head_learn(folder, head):
    _, model, _ = adapted(folder, head)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    fresh = {n for n in learning if not re.search(r"\.lora_[AB]\.default\.weight$", n)}
    kept = {"lm": [set()], "value": [{"score.weight", "score.bias"}, {"classifier.weight", "classifier.bias"}]}
    assert fresh in kept[head] and len(learning) > len(fresh)
    model(input_ids=IDS).logits.sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == learning


def test_adapters_are_the_same_everywhere(folders):
    state = torch.random.get_rng_state()
    _, model, _ = adapted(folders["qwen3"])
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(99)
    _, again, _ = adapted(folders["qwen3"])
    _, other, _ = adapted(folders["qwen3"], seed=1)
    same = {n: torch.equal(p, again.get_parameter(n)) for n, p in model.named_parameters()}
    assert all(same.values())
    different = {n for n, p in model.named_parameters() if not torch.equal(p, other.get_parameter(n))}
    assert different == {n for n in same if "lora_A" in n}


@kinds
@pytest.mark.parametrize("head", ["lm", "value"])
def test_what_is_trained_on_bf16_is_fp32(folders, head, kind):
    _, model, _ = adapted(folders["qwen3"], head, torch.bfloat16, kind=kind)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False), (torch.float32, True)}


def test_bf16_is_merged_in_fp32(folders):
    _, model, adapters = adapted(folders["qwen3"], dtype=torch.bfloat16)
    layer = "model.layers.0.mlp.up_proj"
    part = {n: p.double() for n, p in parameters(model).items() if n.startswith(f"{layer}.")}
    exact = dict(merged_weights(part, adapters))[f"{layer}.weight"]
    merged = dict(merged_weights(parameters(model), adapters))[f"{layer}.weight"]
    assert merged.dtype == torch.bfloat16
    assert ((merged.double() - exact).abs() <= exact.abs() * 2**-8).all()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("q_porj", "the model has no module 'q_porj'; did you mean q_proj"),
        ("q_proj,", "the model has no module ''; expected `all-linear` or names"),
        ("embed_tokens", r"model\.embed_tokens is no linear layer but Embedding"),
        ("lm_head", "lm_head shares its weight with another module"),
        ("input_layernorm", r"layers\.0\.input_layernorm is no linear layer but Qwen3RMSNorm"),
        ("score", "score is the value head, which is trained as a whole; leave it out"),
    ],
)
def test_target_errors(folders, targets, message):
    with pytest.raises(ModelError, match=message):
        adapted(folders["qwen3"], "value" if targets == "score" else "lm", targets=targets)


def test_other_errors(folders, monkeypatch):
    model = load_model(ModelConfig(path=folders["qwen3"]), "lm", torch.float32)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"lora_rank=2 needs peft .*; pip install 'peft>=0.17'"):
        add_lora(model, ModelConfig(lora_rank=2))


def with_adapters(row, targets="all-linear"):
    model = tiny_model(config_of(row), torch.float32)
    return model, add_lora(model, ModelConfig(lora_rank=3, target_modules=targets))


@pytest.mark.parametrize("row", ["deepseek_v3", "llama4_text"])
def test_dense_layers_of_mixtures_of_experts_get_adapters_and_routers_of_another_kind_none(row):
    """peft would put adapters on the experts in place of layers that are called like their parts."""
    model, adapters = with_adapters(row)
    assert any("shared_expert" in name for name in adapters)
    assert {name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")} == set(
        adapters
    )
    assert not any(name.endswith(".router") for name in adapters)


@pytest.mark.parametrize(
    "row", ["qwen3_moe", "gpt_oss", "llama4_text"]
)  # grouped, transposed, with a forward of its own
@pytest.mark.parametrize("targets", ["experts", "all-linear,experts.down_proj"])
def test_adapters_of_experts_compute_what_the_merged_model_does(row, targets):
    plain = tiny_model(config_of(row), torch.float32)
    model = copy.deepcopy(plain)
    adapters = add_lora(model, ModelConfig(lora_rank=3, lora_alpha=6, target_modules=targets))
    assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    with torch.no_grad(), adapters_off(model):
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    merged = dict(merged_weights(parameters(model), adapters))
    assert list(merged) == list(parameters(plain))
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, plain.get_parameter(name))}
    assert {name for name, _ in adapted_experts(model)} == {name for name in changed if ".experts." in name}
    plain.load_state_dict(merged, strict=False)
    exactly = {
        "rtol": 0,
        "atol": 0 if targets == "experts" else 1e-4,
    }  # beside linear layers, B (A x) is no merged product
    torch.testing.assert_close(plain(input_ids=IDS).logits, model(input_ids=IDS).logits, **exactly)
    require_called_adapters(model, lambda: model(IDS))
    model(input_ids=IDS).logits.sum().backward()
    assert {n for n, p in parameters(model).items() if p.grad is not None} == set(
        dict(adapter_weights(parameters(model)))
    )


def test_adapters_of_experts_are_those_of_peft(tmp_path):
    """peft loads what is written, and computes the same."""
    plain = tiny_model(config_of("qwen3_moe"), torch.float32)
    model, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
    config = ModelConfig(lora_rank=3, lora_alpha=6, target_modules="q_proj,experts", lora_adapter_path=str(tmp_path))
    add_lora(model, config)
    for _, parameter in adapter_weights(parameters(model), lambda parameter: parameter):
        nn.init.normal_(parameter, std=0.1)
    names = tuple(name for name, _ in adapted_experts(model))
    kind = AdapterKind.of(config)._replace(experts=names)
    write_adapters(tmp_path, dict(adapter_weights(parameters(model))), kind)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path)
    torch.testing.assert_close(theirs(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=1e-4)
    again = copy.deepcopy(plain)
    add_lora(again, config, seed=7)
    load_adapters(again, config)
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in model.named_parameters())
    other = replace(config, target_modules="q_proj,experts.gate_up_proj")
    add_lora(plain, other)
    with pytest.raises(ModelError, match=r"has target_parameters=\[.*down_proj.*name the same ones in target_modules"):
        load_adapters(plain, other)


def test_experts_take_no_dora():
    with pytest.raises(
        ModelError, match=r"lora\.use_dora: got True with experts as targets \(model.*; set it to False"
    ):
        add_lora(
            tiny_model(config_of("qwen3_moe"), torch.float32),
            ModelConfig(lora_rank=3, target_modules="experts", lora=LoraConfig(use_dora=True)),
        )


def test_layers_that_share_their_weights_get_no_adapters_of_their_own():
    model = tiny_model(config_of("zamba"), torch.float32)
    assert [name for name in adapter_targets(model, "all-linear") if "shared_transf" in name] == []


def test_adapters_that_the_model_does_not_call_are_refused():
    model, _ = with_adapters("jamba")
    with pytest.raises(
        ModelError, match=r"JambaForCausalLM reads the weights of dt_proj .*; set target_modules=.*q_proj"
    ):
        require_called_adapters(model, lambda: model(IDS))
    model, _ = with_adapters("gemma3n_text")
    with pytest.raises(ModelError, match=r"reads the weights of correction_coefs .*; set target_modules=down_proj,"):
        require_called_adapters(model.train(), lambda: model(IDS))  # it clips them in training
    model, _ = with_adapters("jamba", "q_proj,in_proj")
    require_called_adapters(model, lambda: model(IDS))
    assert not any(module._forward_hooks for module in model.modules())


def lora_config(folder, kind="LoRA", **changed):
    given = {"path": folder, "lora_rank": 3, "lora_alpha": 12, "lora": KINDS[kind]}
    return ModelConfig(**(given | changed))


def started(config, seed):
    model = load_model(config, "lm", torch.float32)
    add_lora(model, config, seed)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if ".lora_" in name:
            nn.init.uniform_(parameter, 0.1, 0.9, generator=torch.Generator().manual_seed(seed + i))
    return model, dict(adapter_weights(dict(model.named_parameters())))


@pytest.fixture
def written(folders, tmp_path):
    """kind -> a model with adapters, and the folder that it was written to."""

    def write(kind="LoRA", **changed):
        config = lora_config(folders["qwen3"], kind, **changed)
        model, weights = started(config, seed=3)
        write_adapters(tmp_path, weights, AdapterKind.of(config))
        return model, str(tmp_path)

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_peft_and_rlx_load_what_the_other_wrote_and_compute_the_same(kind, written, folders, tmp_path):
    model, path = written(kind)
    theirs = PeftModel.from_pretrained(load_model(ModelConfig(path=folders["qwen3"]), "lm", torch.float32), path)
    assert torch.allclose(theirs(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    config = lora_config(folders["qwen3"], kind, lora_adapter_path=str(tmp_path / "theirs"))
    own, _ = started(config, seed=5)
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
    (fault,) = faults_of(lora_config(folders["qwen3"], **{"lora_adapter_path": path} | changed), "lm")
    with pytest.raises(ModelError, match=message):
        raise ModelError(fault)


def test_adapters_of_fewer_layers_or_of_another_model_are_refused(written, folders):
    _, path = written(target_modules="q_proj")
    (fault,) = faults_of(lora_config(folders["qwen3"], lora_adapter_path=path), "lm")
    assert "lacks" in fault and "Set target_modules=q_proj" in fault
    wide = {"intermediate_size": 24, "num_attention_heads": 8}
    config = lora_config(folders["qwen3"], lora_adapter_path=path, target_modules="q_proj", override_config=wide)
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
    (fault,) = adapter_faults(path, lora_config(folders["qwen3"]))
    assert f"peft's {name}={value!r}" in fault


def test_a_folder_without_adapters_is_refused(folders, tmp_path):
    (fault,) = adapter_faults(str(tmp_path), lora_config(folders["qwen3"]))
    assert "has no adapter_config.json and no adapter_model.safetensors" in fault


def test_a_configuration_that_is_nested_too_deep_is_named(written, folders):
    _, path = written()
    with open(f"{path}/adapter_config.json", "w") as opened:
        opened.write('{"peft_type": ' + "[" * 100_000 + "]" * 100_000 + "}")
    (fault,) = adapter_faults(path, lora_config(folders["qwen3"]))
    assert "adapter_config.json cannot be read as JSON" in fault
