"""Commands that measure rlx, each run as `python -m rlx.benchmarks.NAME`; nothing imports them."""
