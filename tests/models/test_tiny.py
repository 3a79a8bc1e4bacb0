import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.config.schema import TinyModelConfig
from rlx.models.tiny import make_tiny

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Tom has 3 apples , and 4 é.\n"},
    {"role": "assistant", "content": "7"},
]
SMALL = TinyModelConfig(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)


@pytest.fixture
def saved(tmp_path):
    model, tokenizer = make_tiny(SMALL)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_comes_back_through_the_auto_classes(saved):
    model, tokenizer = make_tiny(SMALL)
    model_again, tokenizer_again = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, model_again.state_dict()[name])
    ids = tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert tokenizer_again.apply_chat_template(MESSAGES, return_dict=False) == ids
    assert tokenizer_again.get_chat_template() == tokenizer.get_chat_template()
    for one in (tokenizer, tokenizer_again):
        assert len(one) == model.config.vocab_size
        assert (one.eos_token_id, one.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)
        assert model_again.generation_config.eos_token_id == 1


def test_a_role_costs_one_token_and_a_character_its_bytes():
    _, tokenizer = make_tiny(SMALL)
    ids = tokenizer.apply_chat_template(MESSAGES, return_dict=False)
    assert len(ids) == sum(1 + len(message["content"].encode()) for message in MESSAGES) + 1
    assert ids[-1] == tokenizer.eos_token_id
    prompt = tokenizer.apply_chat_template(MESSAGES[:2], add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(message["content"] for message in MESSAGES)


def test_an_unknown_role_is_refused():
    _, tokenizer = make_tiny(SMALL)
    with pytest.raises(Exception, match="role is robot, expected system, user, assistant or tool"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])


def test_weights_depend_on_the_config_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, _ = make_tiny(SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second, _ = make_tiny(SMALL)
    other, _ = make_tiny(TinyModelConfig(**{**vars(SMALL), "seed": 1}))
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_heads_are_as_wide_as_vllm_asks():
    assert make_tiny(SMALL)[0].config.head_dim == 32
    assert make_tiny(TinyModelConfig(hidden_size=128, num_attention_heads=2))[0].config.head_dim == 64
