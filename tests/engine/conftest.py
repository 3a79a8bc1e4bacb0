import pytest
import torch


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A two-layer Qwen3 with tied embeddings and its byte tokenizer."""
    from rlx.config.schema import TinyModelConfig
    from rlx.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("model")
    config = TinyModelConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1
    )
    for part in make_tiny(config):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen3-MoE of three layers, the first one dense, with 2 of 8 experts for a token and routers that prefer some."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        mlp_only_layers=[0],
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3 if ".gate." in name else 0.15)
    folder = tmp_path_factory.mktemp("experts")
    model.save_pretrained(folder)
    return str(folder)
