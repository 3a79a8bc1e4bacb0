"""Small models of transformers."""

from functools import partial

import torch
import transformers

SMALL = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True}
CONFIGS = {
    "qwen2": partial(transformers.Qwen2Config, attention_dropout=0.1),
    "qwen3": partial(transformers.Qwen3Config, head_dim=16),
    "llama": partial(transformers.LlamaConfig, attention_bias=True, attention_dropout=0.1),
    "gemma3": partial(transformers.Gemma3TextConfig, head_dim=16, sliding_window=8, attention_dropout=0.1),
    "mistral": partial(transformers.MistralConfig, sliding_window=8),
    # GPT-2 with a cache attends to copies of its keys, whose strides change the last bit of plain gradients already.
    "gpt2": partial(transformers.GPT2Config, n_positions=64, bos_token_id=1, eos_token_id=2, use_cache=False),
    "gpt_neox": partial(transformers.GPTNeoXConfig, attention_dropout=0.1, hidden_dropout=0.1),
    "qwen3_moe": partial(transformers.Qwen3MoeConfig, **EXPERTS, head_dim=16, attention_dropout=0.1),
    "mixtral": partial(
        transformers.MixtralConfig, num_local_experts=4, output_router_logits=True, attention_dropout=0.1
    ),
}


def build(name, attention="sdpa"):
    torch.manual_seed(0)
    config = CONFIGS[name](**SMALL)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
