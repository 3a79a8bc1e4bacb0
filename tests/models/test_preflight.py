"""What a check of a model finds before it is loaded."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch.torch_version import TorchVersion

from rlx.config.schema import LoraConfig, ModelConfig
from rlx.models.hf_folder import FolderParts
from rlx.models.loading import ModelError, load_model, load_skeleton
from rlx.models.preflight import faults_of
from tests.tiny_models import config_of


def model(folders, name="qwen3", **options):
    return ModelConfig(path=folders[name], **options)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2", "kernels-community/flash-attn2"])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_what_can_be_loaded_has_no_faults(folders, attention, head):
    """A kernel whose package is not here too: the workers' machines may have it."""
    targets = {"lora_rank": 2, "target_modules": "q_proj, down_proj"}
    assert faults_of(model(folders, attn_implementation=attention, **targets), head) == []
    assert faults_of(ModelConfig(path="builtin:tiny", attn_implementation=attention, **targets), head) == []


@pytest.mark.parametrize(
    ("options", "starts", "hint"),
    [
        ({"attn_implementation": "sdap"}, "attn_implementation: got 'sdap', expected one of eager, ", "mean sdpa?"),
        ({"attn_implementation": "paged|eager"}, "attn_implementation: got 'paged|eager', expected one of eager, ", ""),
        ({"attn_implementation": "?"}, "attn_implementation: got '?'", "set it to sdpa"),
        ({"override_config": {"rope_thet": 1}}, "model.override_config.rope_thet: Qwen3Config has no such key", ""),
        ({"lora_rank": 2, "target_modules": "q_prj"}, "target_modules: the model has no module 'q_prj'", "q_proj"),
    ],
)
def test_a_name_that_is_mistyped_is_named(folders, options, starts, hint):
    for path in (folders["qwen3"], "builtin:tiny"):
        (fault,) = faults_of(ModelConfig(path=path, **options), "lm")
        assert fault.startswith(starts) and hint in fault


@pytest.mark.parametrize(
    ("kept", "is_rejected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "do_sample": False}, False),
        ({"num_beams": 1, "early_stopping": True, "length_penalty": 2.0}, False),
        ({"pad_token_id": -1, "eos_token_id": [1, 2]}, False),
        ({"max_new_tokens": -1, "eos_token_id": [1, 2]}, True),
        ({"cache_implementation": "unknown"}, True),
    ],
    ids=["no do_sample", "beams", "pad", "no new tokens", "cache"],
)
def test_sampling_defaults_are_saved_as_they_were_read(folders, tmp_path, caplog, kept, is_rejected):
    shutil.copytree(folders["qwen3"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(kept))
    config = ModelConfig(path=str(tmp_path))
    assert faults_of(config, "lm") == []
    model, shell = load_model(config, "lm", torch.float32), load_skeleton(config, "lm", torch.float32)
    assert shell.generation_config.eos_token_id == model.generation_config.eos_token_id, "of processes without weights"
    assert ("transformers rejects it" in caplog.text) == is_rejected
    FolderParts.of(model, "lm", None).write(tmp_path / "card")
    FolderParts.read(tmp_path / "card", "lm", False).write_with_weights(tmp_path / "export", model.state_dict())
    for folder in ("card", "export"):
        assert kept.items() <= json.loads((tmp_path / folder / "generation_config.json").read_text()).items()


def test_processes_that_share_sequences_divide_the_heads(folders):
    tiny = ModelConfig(path="builtin:tiny")
    assert faults_of(tiny, "lm", sizes=(1, 2), processes=4) == []
    for shared, heads, allowed in ((tiny, 4, "1 or 2 or 4"), (model(folders), 2, "1 or 2")):
        (fault,) = faults_of(shared, "lm", sizes=[8], processes=8)
        assert f"got 8 with 8 processes and {heads} attention heads" in fault and fault.endswith(f"set it to {allowed}")


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_a_config_that_ties_unlike_weights_is_refused_and_the_remedy_uses_the_file(folders, tmp_path, shard_size):
    like = transformers.AutoModelForCausalLM.from_pretrained(folders["qwen3"])
    like.save_pretrained(
        tmp_path / "like", state_dict={**like.state_dict(), "lm_head.weight": like.lm_head.weight.clone()}
    )
    unlike = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    unlike.save_pretrained(tmp_path, max_shard_size=shard_size)
    unlike.config.tie_word_embeddings = True
    unlike.config.save_pretrained(tmp_path)
    assert faults_of(ModelConfig(path=str(tmp_path / "like")), "lm") == []
    assert faults_of(ModelConfig(path=str(tmp_path)), "value") == []
    (fault,) = faults_of(ModelConfig(path=str(tmp_path)), "lm")
    assert "ties lm_head.weight to model.embed_tokens.weight, but they differ in the checkpoint" in fault
    assert "set override_config.tie_word_embeddings=False" in fault
    with pytest.raises(ModelError, match="they differ in the checkpoint"):
        load_model(ModelConfig(path=str(tmp_path)), "lm", torch.float32)
    remedied = ModelConfig(path=str(tmp_path), override_config={"tie_word_embeddings": False})
    assert faults_of(remedied, "lm") == []
    assert torch.equal(load_model(remedied, "lm", torch.float32).lm_head.weight, unlike.lm_head.weight)


def test_a_choice_between_keys_that_score_alike_is_refused(tmp_path):
    config_of("doge: chosen keys").save_pretrained(tmp_path)
    (fault,) = faults_of(ModelConfig(path=str(tmp_path)), "lm")
    assert "keep_window_size: got 5 for a doge model of 64 positions" in fault
    remedy = {"max_position_embeddings": 5}
    assert f"max_position_embeddings={remedy['max_position_embeddings']}" in fault
    assert faults_of(ModelConfig(path=str(tmp_path), override_config=remedy), "lm") == []


@pytest.mark.parametrize("head", ["lm", "value"])
def test_a_kernel_that_drops_a_cap_of_the_scores_is_refused(tmp_path, head):
    config = transformers.Gemma2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, vocab_size=32
    )
    config.save_pretrained(tmp_path)
    capped = ModelConfig(path=str(tmp_path))
    (fault,) = faults_of(capped, head)
    assert "got sdpa for a gemma2 model that caps its attention scores at 50.0" in fault and "set it to eager" in fault
    assert faults_of(replace(capped, attn_implementation="eager"), head) == []
    assert faults_of(replace(capped, override_config={"attn_logit_softcapping": None}), head) == []


def test_several_faults_come_together(folders, tmp_path: Path):
    options = {"attn_implementation": "sdap", "override_config": {"hiden_size": 8}}
    assert len(faults_of(model(folders, **options), "lm")) == 2
    assert len(faults_of(ModelConfig(path=str(tmp_path)), "lm")) == 1, "an empty folder"
    (fault,) = faults_of(model(folders), "score")
    assert "expected one for sequence classification with one label" in fault


def test_keys_of_experts_need_experts(folders, experts_folder):
    assert faults_of(ModelConfig(path=experts_folder), "lm", needs_experts=True) == []
    for dense in (model(folders), ModelConfig(path="builtin:tiny")):
        (fault,) = faults_of(dense, "lm", needs_experts=True)
        assert "without experts, expected a mixture of experts" in fault
    (fault,) = faults_of(ModelConfig(path=experts_folder, experts_implementation="grouped"), "lm")
    assert "grouped_mm" in fault


def test_adapters_of_experts_reach_vllm_in_merged_weights(experts_folder):
    adapters = {"path": experts_folder, "lora_rank": 2, "target_modules": "all-linear,experts"}
    (fault,) = faults_of(ModelConfig(**adapters), "lm", sampler="vllm")
    assert "target_modules: got experts (model.layers." in fault and "set lora.merge=True" in fault
    assert faults_of(ModelConfig(**adapters), "lm", sampler="hf") == []
    assert faults_of(ModelConfig(**adapters, lora=LoraConfig(merge=True)), "lm", sampler="vllm") == []


def test_a_quantised_base_needs_an_fsdp_that_shards_bytes(folders, monkeypatch):
    adapters = {"path": folders["llama"], "lora_rank": 2, "quantization": "nf4"}
    assert faults_of(ModelConfig(**adapters), "lm") == []
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    (fault,) = faults_of(ModelConfig(**adapters), "lm")
    assert "got nf4 with torch 2.11.0, whose FSDP2 shards no bytes" in fault and "set layer_offload=True" in fault
    assert faults_of(ModelConfig(**adapters, layer_offload=True), "lm") == []
