"""rlx trains language models by reinforcement learning on Ray and FSDP."""

__version__ = "0.1.0"
