import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 97
LAYERS = 2


def _qwen3(**overrides):
    shape = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, num_hidden_layers=LAYERS, **{**shape, **overrides}))


def _llama():
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_hidden_layers=LAYERS, attention_dropout=0.1, **shape))


def _gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_layer=LAYERS, n_embd=48, n_head=2, n_positions=64))


MAKERS = {"qwen3": lambda: _qwen3(tie_word_embeddings=True), "llama": _llama, "gpt2": _gpt2}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Saved random models by architecture; qwen3 and gpt2 have tied embeddings, gpt2 and llama dropout."""
    folders = {}
    for name, make in MAKERS.items():
        torch.manual_seed(1)
        folders[name] = str(tmp_path_factory.mktemp(name))
        make().save_pretrained(folders[name])
    return folders


@pytest.fixture(params=list(MAKERS))
def folder(request, folders):
    return folders[request.param]
