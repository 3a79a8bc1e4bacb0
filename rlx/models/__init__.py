"""Models and tokenizers of transformers, log-probs of tokens, attention over packed sequences, LoRA."""
