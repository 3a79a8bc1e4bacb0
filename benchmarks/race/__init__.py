"""The same GRPO steps by rlx and other frameworks: `python -m benchmarks.race`."""
