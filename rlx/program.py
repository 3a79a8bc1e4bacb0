"""A leaf: what the user calls rlx's commands, `rlx export` or `python -m rlx.export`, so that messages name what works."""

import os

CALLED_AS = "RLX_CALLED_AS"
"""The environment variable with the command line's first words, such as `rlx train`; without it the module was run."""
MODULES = {
    "train": "rlx.main_ppo",
    "check": "rlx.main_ppo --check",
    "export": "rlx.export",
    "report": "rlx.trainer.report",
    "gsm8k": "rlx.data.gsm8k",
    "view": "rlx.view",
}


def program(command: str) -> str:
    """Return how to call a command here: `rlx export` if this process is a command of `rlx`, else `python -m rlx.export`."""
    called = os.environ.get(CALLED_AS)
    return f"{called.rpartition(' ')[0]} {command}" if called else f"python -m {MODULES[command]}"
