"""Commands: `python -m benchmarks.offload` measures activation offloading on this machine; the planner's command."""
