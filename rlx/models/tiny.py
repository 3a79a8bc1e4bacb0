"""Make `builtin:tiny`, a small transformer over bytes."""

from typing import TYPE_CHECKING

import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from rlx.config.schema import TinyModelConfig

if TYPE_CHECKING:  # the driver needs the tokenizer only, and transformers takes a second to import a model
    from transformers import Qwen3Config, Qwen3ForCausalLM

ROLES = ("system", "user", "assistant")
# One token per role and nothing between messages: tokens are bytes, so each character of a template costs compute. A tool speaks
# as the user does.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{ raise_exception('role is ' + message.role + ', expected system, user, assistant or tool') }}"
    "{%- endif -%}"
    "{{ '<|' + ('user' if message.role == 'tool' else message.role) + '|>' + message.content }}"
    "{%- if message.role == 'assistant' -%}{{ eos_token }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)
MAX_POSITIONS = 4096


def make_tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Return ByT5's byte tokenizer with one token per chat role and a chat template."""
    markers = [f"<|{role}|>" for role in ROLES]
    return ByT5Tokenizer(extra_ids=0, additional_special_tokens=markers, chat_template=CHAT_TEMPLATE)


def make_tiny_config(config: TinyModelConfig, tokenizer: PreTrainedTokenizerBase) -> "Qwen3Config":
    """Return the model's config for this tokenizer."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def make_tiny(config: TinyModelConfig) -> "tuple[Qwen3ForCausalLM, PreTrainedTokenizerBase]":
    """Return a Qwen3 model with fresh weights, fp32 on CPU, and its tokenizer; both depend on `config` alone."""
    from transformers import Qwen3ForCausalLM

    tokenizer = make_tiny_tokenizer()
    model_config = make_tiny_config(config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Qwen3ForCausalLM(model_config)
    return model.eval(), tokenizer
