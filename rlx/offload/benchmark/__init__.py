"""Commands: `python -m rlx.offload.benchmark` measures activation offloading on this machine; the planner's command."""
