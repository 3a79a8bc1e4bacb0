"""The entry: `python -m rlx.main_ppo [--check] [--help] [group=file ...] [key=value ...]`.

This process stays small: it starts `rlx.driver` with the same arguments, keeps watch, and starts it again after a failure.
"""

import sys

from rlx.supervisor.keeper import Keeper

if __name__ == "__main__":
    sys.exit(Keeper([sys.executable, "-m", "rlx.driver", *sys.argv[1:]]).keep())
