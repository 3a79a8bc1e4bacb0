"""The entry point `python -m rlx.offload.plan`.

The command also measures layers, which needs `rlx.offload` as a whole. This package imports nothing but itself, so the command's
code is in `rlx.offload.benchmark`.
"""

import sys

from rlx.offload.benchmark.plan_command import main

if __name__ == "__main__":
    sys.exit(main())
