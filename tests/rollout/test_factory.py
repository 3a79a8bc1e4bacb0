import pytest
import torch

from rlx.config.schema import LoraConfig, ModelConfig, RolloutConfig
from rlx.models.loading import load_model
from rlx.models.lora import adapter_weights, add_lora
from rlx.rollout.factory import build_rollout
from rlx.rollout.protocol import Request, Sampling


@pytest.fixture
def folder(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    return str(tmp_path)


def test_hf_is_built_from_the_folders_config_without_its_weights(folder, make_model):
    rollout = build_rollout(RolloutConfig(name="hf", max_num_seqs=2), ModelConfig(path=folder), torch.device("cpu"), 64)
    assert rollout.version is None
    rollout.update_weights(make_model().state_dict().items(), version=0)
    (completion,) = rollout.generate([Request((3, 4), 0, Sampling(4))])
    assert len(completion.token_ids) == 4


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(use_dora=True)], ids=["LoRA", "DoRA"])
def test_hf_keeps_the_base_and_takes_adapters(folder, lora, dtype):
    model = ModelConfig(path=folder, lora_rank=2, lora=lora)
    rollout = build_rollout(RolloutConfig(name="hf", dtype=dtype), model, torch.device("cpu"), 64)
    assert rollout.version is None
    own = load_model(model, "lm", torch.float32)
    adapters = add_lora(own, model)
    for parameter in (p for name, p in own.named_parameters() if "lora_B" in name):
        torch.nn.init.normal_(parameter, std=0.3)
    sent = dict(adapter_weights(dict(own.named_parameters()), adapters))
    rollout.update_weights(sent.items(), version=3)
    request = Request((3, 4, 5), 0, Sampling(8, temperature=0.0))
    (completion,) = rollout.generate([request])
    ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        log_probs = own(input_ids=ids).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
    assert completion.log_probs == pytest.approx(log_probs.tolist(), abs=1e-4 if dtype == "fp32" else 0.2)
    first = next(iter(sent))
    with pytest.raises(ValueError, match=r"1 of .* weights did not arrive"):
        rollout.update_weights([pair for pair in sent.items() if pair[0] != first], version=4)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*got a name that"):
        rollout.update_weights([("model.norm.weight", torch.zeros(64))], version=4)


def test_override_config_reaches_the_sampler(folder, make_model):
    model = ModelConfig(path=folder, override_config={"num_hidden_layers": 1})
    rollout = build_rollout(RolloutConfig(name="hf"), model, torch.device("cpu"), 64)
    with pytest.raises(ValueError, match=r"layers\.1.*got a name that"):
        rollout.update_weights(make_model().state_dict().items(), version=0)
    wrong = ModelConfig(path=folder, override_config={"hidden_sizes": 1})
    with pytest.raises(ValueError, match=r"override_config\.hidden_sizes"):
        build_rollout(RolloutConfig(name="hf"), wrong, torch.device("cpu"), 64)


def test_an_engine_that_does_not_exist_is_refused(folder):
    with pytest.raises(ValueError, match=r"rollout\.name: got .sglang., expected hf or vllm"):
        build_rollout(RolloutConfig(name="sglang"), ModelConfig(path=folder), torch.device("cpu"), 64)
