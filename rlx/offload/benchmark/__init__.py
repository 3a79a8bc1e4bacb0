"""What activation offloading costs and saves on this machine: `python -m rlx.offload.benchmark`."""
