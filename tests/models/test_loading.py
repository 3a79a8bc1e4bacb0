import json
import logging
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlx.config.schema import ModelConfig
from rlx.errors import ExplainedError
from rlx.models.loading import ModelError, load_config, load_model, load_skeleton, load_tokenizer
from tests.tiny_models import config_of, write_tiny

IDS = torch.arange(12).reshape(2, 6)


def edit_weights(folder, target, change):
    """A copy of the folder whose weights went through `change`."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    save_file(change(weights), target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


# ----------------------------------------------------------------------------------------------------- tokenizer


def word_tokenizer(**special):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a")), **special)


def test_tokenizer_without_pad_token_pads_with_eos(tmp_path):
    word_tokenizer(eos_token="</s>").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), False).pad_token_id == 1


def test_tokenizer_errors(tmp_path, folders):
    with pytest.raises(ModelError, match=r"has none of tokenizer\.json.*save the tokenizer in the model's folder"):
        load_tokenizer(folders["qwen3"], False)
    word_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no EOS token"):
        load_tokenizer(str(tmp_path), False)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="could not load the tokenizer of"):
        load_tokenizer(str(tmp_path), False)
    for path in (str(tmp_path / "gone"), "builtin:tiny", None):
        with pytest.raises(ModelError, match=r"model\.path: "):
            load_tokenizer(path, False)


# -------------------------------------------------------------------------------------------------------- config


def test_config_has_no_dropout_and_no_cache(folder):
    config = load_config(ModelConfig(path=folder))
    rates = {k: v for k, v in config.to_dict().items() if "drop" in k}
    assert rates and not any(rates.values())
    assert config.use_cache is False


@pytest.mark.parametrize("row", ["mixtral", "dbrx", "bart"])
def test_config_has_no_noise_and_no_dropout_in_its_parts(row, tmp_path):
    config = config_of(row)
    config.save_pretrained(tmp_path)
    loaded = load_config(ModelConfig(path=str(tmp_path)))
    rate = {
        "mixtral": lambda config: config.router_jitter_noise,
        "dbrx": lambda config: config.attn_config.attn_pdrop,
        "bart": lambda config: config.decoder_layerdrop,
    }[row]
    assert rate(config) == 0.1 and rate(loaded) == 0


def test_parameters_that_the_class_does_not_train_are_not_trained(tmp_path):
    write_tiny(tmp_path, config_of("afmoe"), torch.float32)
    model = load_model(ModelConfig(path=str(tmp_path)), "lm", torch.float32)
    frozen = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"expert_bias"}


def test_overrides(folders):
    def loaded(name="gpt2", **overrides):
        return load_config(ModelConfig(path=folders[name], override_config=overrides))

    assert loaded(resid_pdrop=0.25).resid_pdrop == 0.25
    assert loaded(hidden_size=32).n_embd == 32  # transformers' common name of n_embd
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    assert loaded("qwen3", rope_parameters=rope).rope_parameters["factor"] == 2.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"num_hiden_layers": 1},
            r"model\.override_config\.num_hiden_layers: Qwen3Config has no such key; did you mean num_hidden_layers",
        ),
        ({"qqq": 1}, "has no such key; known: .*vocab_size"),
        ({"vocab_size": "many"}, r"override_config\.vocab_size: got 'many'"),
        ({"dtype": "bfloat16"}, r"cannot be overridden; set fsdp_config\.model_dtype instead"),
        ({"use_cache": True}, "cannot be overridden"),
    ],
)
def test_override_errors(folders, overrides, message):
    with pytest.raises(ModelError, match=message):
        load_config(ModelConfig(path=folders["qwen3"], override_config=overrides))


# --------------------------------------------------------------------------------------------------------- models


def test_language_model_equals_what_was_saved(folder):
    model = load_model(ModelConfig(path=folder), "lm", torch.float32)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert not model.training and {p.device.type for p in model.parameters()} == {"cpu"}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    # Dropout is off in training too, and no cache comes back.
    out = model.train()(input_ids=IDS)
    assert torch.equal(out.logits, saved.eval()(input_ids=IDS).logits) and out.past_key_values is None


def test_fresh_value_head(folder, capfd, caplog):
    config = ModelConfig(path=folder)
    state = torch.random.get_rng_state()
    model = load_model(config, "value", torch.float32)
    assert torch.equal(state, torch.random.get_rng_state())
    # Quiet: a fresh head is meant.
    assert "REPORT" not in caplog.text + "".join(capfd.readouterr())
    values = model.train()(input_ids=IDS).logits
    assert values.shape == (2, 6, 1)
    assert 0 < values.abs().max() < 0.1
    # Equal wherever it is made, whatever the caller's random state; another seed gives another head.
    torch.manual_seed(123)
    again, other = load_model(config, "value", torch.float32), load_model(config, "value", torch.float32, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    different = [
        n for (n, a), b in zip(model.named_parameters(), other.parameters(), strict=True) if not torch.equal(a, b)
    ]
    assert different in (["score.weight"], ["classifier.weight"])
    # The backbone is the checkpoint's, and it learns from the first step.
    saved = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    backbone = {n: p for n, p in model.named_parameters() if n.startswith(f"{model.base_model_prefix}.")}
    assert len(backbone) > 10 and all(torch.equal(p, saved[n]) for n, p in backbone.items())
    values.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert sum(p.grad.abs().sum() for p in backbone.values()) > 0
    assert not any(m.p for m in model.modules() if isinstance(m, nn.Dropout))


def test_trained_value_head_is_kept(folder, tmp_path):
    model = load_model(ModelConfig(path=folder), "value", torch.float32)
    nn.init.constant_(next(p for n, p in model.named_parameters() if n in ("score.weight", "classifier.weight")), 0.5)
    model.save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path)), "value", torch.float32)
    assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_incomplete_checkpoint_is_refused(folders, tmp_path, head):
    lost = "model.layers.1.mlp.up_proj.weight"
    broken = edit_weights(folders["llama"], tmp_path / "m", lambda w: {k: v for k, v in w.items() if k != lost})
    with pytest.raises(ModelError, match=f"lacks {lost}") as caught:
        load_model(ModelConfig(path=broken), head, torch.float32)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_reward_model_gives_one_score_and_all_its_weights(folders, tmp_path):
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForSequenceClassification.from_pretrained(folders["qwen3"], num_labels=1, pad_token_id=0)
    model.save_pretrained(tmp_path / "one")
    config = ModelConfig(path=str(tmp_path / "one"))
    loaded, skeleton = load_model(config, "score", torch.float32), load_skeleton(config, "score", torch.float32)
    assert torch.equal(loaded.score.weight, model.score.weight)
    assert skeleton.state_dict().keys() == loaded.state_dict().keys()
    with pytest.raises(ModelError, match=r"no pad_token_id.*override_config"):
        load_model(ModelConfig(path=config.path, override_config={"pad_token_id": None}), "score", torch.float32)
    with pytest.raises(ModelError, match=r"ForCausalLM'\] with 2 labels, expected one for sequence"):
        load_model(ModelConfig(path=folders["qwen3"]), "score", torch.float32)
    headless = edit_weights(
        tmp_path / "one", tmp_path / "two", lambda w: {k: v for k, v in w.items() if k != "score.weight"}
    )
    with pytest.raises(ModelError, match=r"the checkpoint lacks score\.weight"):
        load_model(ModelConfig(path=headless), "score", torch.float32)


def test_value_model_is_no_language_model(folders, tmp_path):
    load_model(ModelConfig(path=folders["llama"]), "value", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight of LlamaForCausalLM; is it a lm model"):
        load_model(ModelConfig(path=str(tmp_path)), "lm", torch.float32)


@pytest.mark.parametrize("head", ["lm", "value"])
def test_mismatched_shapes_are_refused(folders, head):
    config = ModelConfig(path=folders["llama"], override_config={"intermediate_size": 96})
    with pytest.raises(
        ModelError, match=r"down_proj\.weight: \(48, 64\) instead of \(48, 96\).* and 2 more; check model\.override"
    ):
        load_model(config, head, torch.float32)


def test_weights_left_out_are_told(folders, caplog):
    config = ModelConfig(path=folders["llama"], override_config={"num_hidden_layers": 1})
    with caplog.at_level(logging.WARNING, logger="rlx"):
        load_model(config, "value", torch.float32)
    assert "does not use the weights model.layers.1." in caplog.text and "REPORT" not in caplog.text


@pytest.mark.parametrize("head", ["lm", "value"])
def test_skeleton_is_the_model_without_weights(folder, head):
    config = ModelConfig(path=folder)
    model, skeleton = load_model(config, head, torch.bfloat16), load_skeleton(config, head, torch.bfloat16)
    assert {t.device.type for t in skeleton.state_dict().values()} == {"meta"}
    shapes = [[(n, t.shape, t.dtype) for n, t in m.state_dict().items()] for m in (model, skeleton)]
    assert shapes[0] == shapes[1]
    assert [n for n, _ in skeleton.named_parameters()] == [n for n, _ in model.named_parameters()]  # ties too
    skeleton.to_empty(device="cpu").load_state_dict(model.state_dict())
    buffers = dict(model.named_buffers())
    for name, buffer in skeleton.named_buffers():
        buffer.copy_(buffers[name])
    assert torch.equal(skeleton(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_model_errors(folders, tmp_path):
    with pytest.raises(ModelError, match=f"model.path: got {tmp_path}/gone, which is not a folder"):
        load_model(ModelConfig(path=f"{tmp_path}/gone"), "lm", torch.float32)
    with pytest.raises(ModelError, match="could not load the config of") as caught:
        load_model(ModelConfig(path=str(tmp_path)), "lm", torch.float32)
    assert isinstance(caught.value, ExplainedError) and caught.value.__cause__ is None, "no traceback is shown"
    assert "\n" not in str(caught.value), "the last line of a failed run holds it all"
    with pytest.raises(ModelError, match=r"could not load .* as lm model: ValueError: .*no_such_kernel"):
        load_model(ModelConfig(path=folders["qwen3"], attn_implementation="no_such_kernel"), "lm", torch.float32)
    shutil.copytree(folders["qwen3"], tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"could not load .* as value model: OSError: .*model\.safetensors"):
        load_model(ModelConfig(path=str(tmp_path / "m")), "value", torch.float32)
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(ModelError, match="no_such_type"):
        load_config(ModelConfig(path=str(tmp_path / "m")))


def test_home_folder(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(folders["gpt2"], tmp_path / "m")
    assert load_config(ModelConfig(path="~/m")).model_type == "gpt2"
