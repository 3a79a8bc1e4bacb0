"""Models and tokenizers of transformers, log-probs of tokens, LoRA."""
