import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast, Qwen3Config

from rlx.rollout.hf import HFRollout

VOCAB = 48
COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _config(name):
    if name in ("qwen3", "qwen3 untied"):
        return Qwen3Config(**COMMON, **SMALL, head_dim=32, tie_word_embeddings=name == "qwen3")
    return GPT2Config(**COMMON, n_embd=64, n_layer=2, n_head=2, n_positions=64)


@pytest.fixture(scope="session")
def make_model():
    """name -> a small causal model whose weights are large enough that its distributions are far from uniform."""

    def make(name="qwen3", dtype=torch.float32):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(_config(name), dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(5)
        return model.eval()

    return make


@pytest.fixture
def make_rollout():
    def make(model, **options):
        rollout = HFRollout(model.config, dtype=model.dtype, **options)
        rollout.update_weights(model.state_dict().items(), version=1)
        return rollout

    return make


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(2, VOCAB, (length,), generator=generator).tolist()) for length in (3, 9, 1, 6)]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """One character or two for each token: ab, cd, ... behind the alphabet."""
    letters = "0123456789abcdefghijklmnopqrstuvwxyz"
    pieces = ["<pad>", "<eos>", *letters, *(letters[at : at + 2] for at in range(10, 30, 2))]
    found = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    found.decoder = Fuse()
    assert len(pieces) == VOCAB
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="session")
def folders(make_model, tokenizer, tmp_path_factory) -> dict[str, str]:
    """Models on disk: `tied` and `untied` embeddings."""
    paths = {name: tmp_path_factory.mktemp(name) for name in ("tied", "untied")}
    tokenizer.save_pretrained(paths["tied"])
    make_model("qwen3").save_pretrained(paths["tied"])
    make_model("qwen3 untied").save_pretrained(paths["untied"])
    return {name: str(path) for name, path in paths.items()}
