"""The entry point `python -m rlx.offload.plan`.

With `--measure` the command needs `rlx.offload` as a whole. This package imports nothing but itself, so the command is outside it.
"""

import sys

from rlx.offload.plan_command import main

if __name__ == "__main__":
    sys.exit(main())
