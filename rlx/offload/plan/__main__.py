"""The entry point `python -m rlx.offload.plan`. The command needs all of `rlx.offload` with `--measure`, so it is not here."""

import sys

from rlx.offload.plan_command import main

if __name__ == "__main__":
    sys.exit(main())
