"""Commands that measure rlx, each run as `python -m benchmarks.NAME`; nothing imports them."""
