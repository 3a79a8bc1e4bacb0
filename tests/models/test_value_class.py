"""Critics of architectures that transformers has no class with a number per token for."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, BartConfig

from rlx.config.schema import ModelConfig
from rlx.models.hf_folder import FolderParts
from rlx.models.loading import ModelError, ensure_value_class, load_model, load_skeleton

SHAPE = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 97}
LLAMA_LIKE = {**SHAPE, "num_key_value_heads": 1, "intermediate_size": 48, "eos_token_id": 1, "pad_token_id": 0}
CONFIGS = {
    "Olmo2Config": LLAMA_LIKE,
    "GraniteConfig": LLAMA_LIKE,
    "Cohere2Config": {**LLAMA_LIKE, "bos_token_id": 2},
    "FalconH1Config": {**LLAMA_LIKE, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "OPTConfig": {**SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32},
}
IDS = torch.arange(3, 15).reshape(2, 6)


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request, tmp_path_factory):
    """A saved random language model."""
    config = getattr(transformers, request.param)(**CONFIGS[request.param])
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def test_values_are_a_linear_map_of_the_base_models_hidden_states(folder):
    model = load_model(ModelConfig(path=folder), "value", torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder).base_model
    assert all(torch.equal(x, model.base_model.get_buffer(name)) for name, x in base.named_buffers())
    hidden = base(input_ids=IDS).last_hidden_state
    values = model.train()(input_ids=IDS).logits  # in training: without dropout
    assert values.shape == (2, 6, 1) and 0 < values.abs().max() < 0.1
    assert torch.equal(values, hidden @ model.score.weight.T + model.score.bias)
    values.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if n.startswith("score"))
    assert sum(p.grad.abs().sum() for p in model.base_model.parameters() if p.grad is not None) > 0


def test_a_skeleton_takes_the_weights_and_layers_are_cut_as_of_the_language_model(folder):
    config = ModelConfig(path=folder)
    model, skeleton = (load(config, "value", torch.float32) for load in (load_model, load_skeleton))
    assert {n: p.shape for n, p in model.state_dict().items()} == {n: p.shape for n, p in skeleton.state_dict().items()}
    language_model = load_model(config, "lm", torch.float32)
    assert model._no_split_modules and model._no_split_modules == language_model._no_split_modules


def test_a_trained_one_is_written_and_read(folder, tmp_path):
    model = load_model(ModelConfig(path=folder), "value", torch.float32)
    torch.nn.init.constant_(model.score.weight, 0.5)
    FolderParts("value", model.config, None, None).write_with_weights(tmp_path, model.state_dict())
    again = load_model(ModelConfig(path=str(tmp_path)), "value", torch.float32)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_class_of_transformers_stays():
    config = transformers.Qwen2Config(**LLAMA_LIKE)
    ensure_value_class(config)
    assert type(AutoModelForTokenClassification.from_config(config)) is transformers.Qwen2ForTokenClassification


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    BartConfig(d_model=16, encoder_layers=1, decoder_layers=1).save_pretrained(tmp_path)
    for load in (load_model, load_skeleton):
        with pytest.raises(
            ModelError, match=r"critic: got a model of type bart, .*set critic\.model\.path.*adv_estimator"
        ):
            load(ModelConfig(path=str(tmp_path)), "value", torch.float32)
