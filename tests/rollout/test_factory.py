import pytest
import torch

from rlx.config.schema import ModelConfig, RolloutConfig
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
