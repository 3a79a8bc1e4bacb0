"""Formulas of a decoder's layers against what torch computes and keeps, against published sizes, and against measured steps."""

import dataclasses
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.offload.models import Case, build
from rlx.config.schema import ModelConfig
from rlx.models.lora import add_lora
from rlx.offload.plan.decoder import ARCHITECTURES as READ
from rlx.offload.plan.decoder import read_decoder
from rlx.offload.plan.hardware import MATMUL_SHARE, PROFILES, profile_of
from rlx.offload.plan.memory import forward_bytes, head_bytes, head_chunk, layer_bytes
from rlx.offload.plan.model_costs import head_cost, layer_cost
from rlx.offload.plan.run_memory import ModelMemory
from rlx.offload.plan.shapes import SHAPES

H200 = PROFILES["h200"]
SMALL = {
    **{"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 8},
    **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64},
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
ARCHITECTURES = [
    {"model_type": "qwen2"},
    {"model_type": "llama"},
    {"model_type": "qwen3"},
    {"model_type": "qwen3_moe", **EXPERTS},
]


@pytest.mark.parametrize("kind", ARCHITECTURES, ids=lambda kind: kind["model_type"])
def test_a_layer_saves_as_many_bytes_as_the_formula_says(kind):
    shape, tokens = {**SMALL, **kind}, 512
    model = build(shape, Case(tokens, 1), torch.device("cpu"), torch.bfloat16)
    of_model = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found, alive, layer = {}, [], model.layers[0]

    def pack(tensor):
        storage = tensor.untyped_storage()
        alive.append(storage)  # so that no address is used twice
        if storage.data_ptr() not in of_model:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    begin = layer.register_forward_pre_hook(lambda *_: hooks.__enter__())
    end = layer.register_forward_hook(lambda *_: hooks.__exit__())
    inputs = torch.randn(1, tokens, shape["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    model(inputs_embeds=inputs, use_cache=False)
    begin.remove()
    end.remove()
    # Rotary tables and single numbers for each token and norm are not counted.
    assert sum(found.values()) == pytest.approx(layer_cost(read_decoder(shape), 0, tokens, H200).saved_bytes, rel=0.03)


@pytest.mark.parametrize("mlp_width", [300, 640, 1500])
@pytest.mark.parametrize("kind", ARCHITECTURES, ids=lambda kind: kind["model_type"])
def test_without_backward_a_model_holds_as_much_as_its_widest_layer(kind, mlp_width, tmp_path):
    shape, tokens, trace = {**SMALL, **kind, "intermediate_size": mlp_width}, 512, tmp_path / "trace.json"
    model = build(shape, Case(tokens, 2), torch.device("cpu"), torch.bfloat16)
    inputs = torch.randn(1, tokens, shape["hidden_size"], dtype=torch.bfloat16)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(inputs_embeds=inputs, use_cache=False)
    profiler.export_chrome_trace(str(trace))
    found = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    first, *_ = found = [event["args"] for event in sorted(found, key=lambda event: event["ts"])]
    peak = max(args["Total Allocated"] for args in found) - first["Total Allocated"] + first["Bytes"]
    rotary_tables = tokens * (2 * 2 * shape["head_dim"] + 8)
    expected = forward_bytes(read_decoder(shape), 0, tokens)
    assert expected == pytest.approx(peak - rotary_tables, rel=0.1)


@pytest.mark.parametrize("kind", ARCHITECTURES[:3], ids=lambda kind: kind["model_type"])
def test_linear_maps_compute_as_much_as_the_formula_says(kind):
    shape, tokens = {**SMALL, **kind}, 512
    model = build(shape, Case(tokens, 1), torch.device("cpu"), torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        inputs = torch.randn(1, tokens, shape["hidden_size"], dtype=torch.bfloat16)
        model(inputs_embeds=inputs, use_cache=False)
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    cost = layer_cost(read_decoder(shape), 0, tokens, H200)
    down = 2 * tokens * shape["hidden_size"] * shape["intermediate_size"]
    linear_s = sum(op.seconds for op in cost.operations if op.name != "attention")
    assert linear_s * H200.peak_flops * MATMUL_SHARE == pytest.approx(counted - down)


def test_what_is_read_of_a_configuration():
    with_objects = read_decoder(
        build(SMALL | ARCHITECTURES[3], Case(8, 4), torch.device("meta"), torch.bfloat16).config
    )
    assert with_objects == read_decoder(SMALL | ARCHITECTURES[3])
    sliding = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}
    assert read_decoder(SMALL | sliding).windows == (128, None, 128, None)
    assert read_decoder(SMALL | sliding, layers=3).windows == (128, None, 128)
    assert read_decoder(SMALL | {"sliding_window": 128}).windows == (128,) * 4
    assert read_decoder(SMALL | {"sliding_window": 128, "use_sliding_window": False}).windows == (None,) * 4
    dense_first = {**EXPERTS, "first_k_dense_replace": 1, "mlp_only_layers": [2], "n_shared_experts": 2}
    assert read_decoder(SMALL | dense_first).sparse == (False, True, False, True)
    assert read_decoder(SMALL | dense_first).shared_width == 2 * 96
    assert read_decoder(SMALL | EXPERTS | {"decoder_sparse_step": 2}).sparse == (False, True, False, True)
    assert not read_decoder(SMALL).tied


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"model_type": "gemma3_text"}, "layers of another kind"),
        ({"model_type": "starcoder2"}, "layers of another kind"),
    ],
)
def test_what_the_formulas_do_not_cover_is_refused(change, what):
    with pytest.raises(ValueError, match=what):
        read_decoder({**SMALL, **change})


def test_the_head_holds_one_chunk_of_logits():
    decoder = read_decoder(SHAPES["qwen2-7b"])
    h, vocabulary = decoder.width, decoder.vocabulary
    # In fp32, beside their gradient in bf16.
    assert head_bytes(decoder, 1000) == 6 * 1000 * vocabulary + 4 * h * 1000 + 2 * h * vocabulary
    chunk = head_chunk(decoder)
    more = head_bytes(decoder, 524_288) - 4 * h * 524_288 - 4 * h * vocabulary
    assert more == 6 * chunk * vocabulary <= 3 * 2**30
    # In fp32 the sum is the gradient; where logits are few, the copy in bf16 is larger than they.
    assert head_bytes(decoder, 10_000, element=4) == 4 * (
        head_chunk(decoder, 4) * vocabulary + h * (vocabulary + 20_000)
    )
    wide = dataclasses.replace(decoder, width=100_000)
    assert head_bytes(wide, 524_288) == 6 * 100_000 * vocabulary + 4 * 100_000 * 524_288
    assert head_cost(decoder, 524_288, H200).backward_s > head_cost(decoder, chunk, H200).backward_s * 524_288 / chunk


def test_tiles_bound_what_grows_with_the_mlp():
    decoder, tokens = read_decoder(SHAPES["qwen2-7b"]), 524_288
    hidden = 2 * decoder.width * tokens
    whole, tiled = layer_bytes(decoder, 0, tokens), layer_bytes(decoder, 0, tokens, tile=0)
    assert whole.working > 40 * hidden
    # Three results of norms and sums, q and attention's result, k and v; with their gradients, that of q in fp32 too, the input
    # and two more.
    assert tiled.saved == pytest.approx((5 + 2 / 7) * hidden, rel=0.01)
    assert tiled.working == tiled.late == pytest.approx((12 + 4 / 7) * hidden, rel=0.01)
    assert layer_bytes(decoder, 0, 8192, tile=0) == layer_bytes(decoder, 0, 8192)
    # Of an MLP of 2 tiles the norms are whole: copies in fp32, and results before and after the weight.
    chosen, both = layer_bytes(decoder, 0, 32_768, tile=0), layer_bytes(decoder, 0, 32_768, tile=16_384)
    assert chosen.saved - both.saved == chosen.working - both.working == (2 * 8 - 6) * decoder.width * 32_768
    experts = read_decoder(SMALL | EXPERTS)
    assert layer_bytes(experts, 0, tokens, tile=0) == layer_bytes(experts, 0, tokens)


def test_a_shared_sequence_costs_each_its_part():
    decoder = read_decoder(SHAPES["qwen2-7b"])
    one, four = layer_cost(decoder, 0, 65_536, H200), layer_cost(decoder, 0, 65_536, H200, shared_by=4)
    assert four.forward_s == pytest.approx(one.forward_s / 4)
    assert four.saved_bytes == one.saved_bytes / 4
    seven = layer_bytes(decoder, 0, 65_536 // 7, shared_by=7)  # 4 key heads for 7 processes
    assert seven.saved - layer_bytes(decoder, 0, 65_536 // 7).saved == 4 * 3 * 128 * (65_536 // 7)


def test_states_are_cut_and_gathered():
    decoder = read_decoder(SHAPES["llama3-70b"])
    one, many = ModelMemory(decoder).update, ModelMemory(decoder, 64).update
    assert sum(one[:3]) == 16 * decoder.parameters
    assert sum(many[:3]) == pytest.approx(sum(one[:3]) / 64)
    assert many.gathered == one.gathered == 2 * (decoder.root_parameters + 3 * decoder.layer_parameters(0))
    assert ModelMemory(decoder, stored=2).update.gathered == 0


@pytest.mark.parametrize("kind", [ARCHITECTURES[0], ARCHITECTURES[3]], ids=lambda kind: kind["model_type"])
def test_adapters_are_as_many_as_peft_makes(kind):
    shape = {**SMALL, **kind}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
        add_lora(model, ModelConfig(lora_rank=4))
    decoder = read_decoder(shape)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    states = ModelMemory(decoder, 2, adapter_rank=4).update
    assert decoder.adapters(4) == trained
    assert states[:3] == (2 * (decoder.parameters + trained), 2 * trained, 4 * trained)


@pytest.mark.parametrize("name", READ)
def test_every_architecture_that_is_read_has_as_many_weights_as_its_decoder(name):
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(name, **{**SMALL, "vocab_size": 320}, **tokens)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert read_decoder(config).parameters == pytest.approx(count, rel=0.002)


@pytest.mark.parametrize(
    ("device", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA RTX A6000", 47.5, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, None),
        ("NVIDIA A10G", 22.1, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, None),
    ],
)
def test_a_device_has_the_profile_of_its_name_and_memory(device, gib, name):
    assert profile_of(device, gib * 2**30) == PROFILES.get(name)
