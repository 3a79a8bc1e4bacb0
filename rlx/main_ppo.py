"""The entry: `python -m rlx.main_ppo [--check] [--help] [group=file ...] [key=value ...]`.

This process stays small: it starts `rlx.driver` with the same arguments, keeps watch, and starts it again after a failure.
"""

import signal
import sys

if __name__ == "__main__":
    # A signal that comes during the import waits until the supervisor takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    from rlx.supervisor.keeper import Keeper

    sys.exit(Keeper([sys.executable, "-m", "rlx.driver", *sys.argv[1:]]).keep())
