"""What is known of models before they are loaded."""

import json
from pathlib import Path

import huggingface_hub
import pytest
from transformers import AutoConfig

from rlx.config.compose.command_line import compose
from rlx.config.forecast.decoders import TINY_VOCABULARY, config_file, decoder_of, decoders, fetch_configs, tiny_shape
from rlx.config.schema import ModelConfig, TinyModelConfig
from rlx.models.tiny import make_tiny
from rlx.offload.plan.decoder import Decoder, read_decoder

HUB_NAME = "rlx-tests/a-model"


@pytest.mark.parametrize("tiny", [TinyModelConfig(), TinyModelConfig(96, 160, 2, 8, 4)])
def test_the_tiny_shape_counts_the_weights_of_the_tiny_model(tiny: TinyModelConfig):
    model, tokenizer = make_tiny(tiny)
    assert len(tokenizer) == TINY_VOCABULARY
    assert read_decoder(tiny_shape(tiny)) == read_decoder(model.config)
    assert read_decoder(tiny_shape(tiny)).parameters == sum(p.numel() for p in model.parameters())


def test_the_keys_that_override_a_configuration_count(tmp_path: Path):
    AutoConfig.for_model("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    plain = decoder_of(ModelConfig(path=str(tmp_path)))
    deeper = decoder_of(ModelConfig(path=str(tmp_path), override_config={"num_hidden_layers": 3}))
    assert isinstance(plain, Decoder) and isinstance(deeper, Decoder)
    assert (len(plain.windows), len(deeper.windows)) == (2, 3)


def test_each_role_has_its_own_model(tmp_path: Path):
    for name, layers in (("policy", 2), ("critic", 3)):
        AutoConfig.for_model("llama", num_hidden_layers=layers).save_pretrained(tmp_path / name)
    policy = f"actor_rollout_ref.model.path={tmp_path}/policy"
    options = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True")
    same = decoders(compose([policy, *options]).partial)
    assert list(same) == ["actor", "critic", "ref"]
    actor, critic, ref = same.values()
    assert isinstance(actor, Decoder) and isinstance(critic, Decoder)
    assert actor == ref and actor.parameters - critic.parameters == 32000 * 4096
    other = decoders(compose([policy, *options, f"critic.model.path={tmp_path}/critic"]).partial)["critic"]
    assert isinstance(other, Decoder) and len(other.windows) == 3


def test_the_built_in_critic_has_the_policys_shape():
    command = ["algorithm.adv_estimator=gae", "actor_rollout_ref.model.tiny.num_hidden_layers=7"]
    found = decoders(compose(command).partial)["critic"]
    assert isinstance(found, Decoder) and len(found.windows) == 7


def test_a_hub_name_is_found_in_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert config_file(HUB_NAME) is None
    assert decoder_of(ModelConfig(path=HUB_NAME)) == f"the config.json of {HUB_NAME} is not on this machine"
    command = [f"actor_rollout_ref.model.path={HUB_NAME}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    (fault,) = fetch_configs(compose(command).partial)
    assert HUB_NAME in fault.got and "--local-dir DIR" in fault.remedy
    cached = tmp_path / "models--rlx-tests--a-model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("1234")
    (cached / "snapshots" / "1234").mkdir(parents=True)
    AutoConfig.for_model("llama").save_pretrained(cached / "snapshots" / "1234")
    assert isinstance(decoder_of(ModelConfig(path=HUB_NAME)), Decoder)
    assert fetch_configs(compose(command).partial) == []
    nowhere = "actor_rollout_ref.model.path=a/b/c/d"
    assert fetch_configs(compose([nowhere]).partial) == []  # a rule refuses it


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "is not on this machine"),
        ("{", "Expecting"),
        ("[]", "not a mapping"),
        ('{"model_type": "gpt2", "n_embd": 8}', "do not cover"),
        (json.dumps({**tiny_shape(TinyModelConfig()), "num_attention_heads": "four"}), "no num_attention_heads"),
        (json.dumps({**tiny_shape(TinyModelConfig()), "hidden_size": 0}), "no hidden_size"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, content: str | None, why: str):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    found = decoder_of(ModelConfig(path=str(tmp_path)))
    assert isinstance(found, str) and why in found and "\n" not in found
