"""The entry point `python -m rlx.offload.plan`.

It is no part of this package, which imports nothing but itself: the command also measures layers, for which it needs the
engine, so it lives with the other commands in `rlx.offload.benchmark`.
"""

import sys

from rlx.offload.benchmark.plan_command import main

if __name__ == "__main__":
    sys.exit(main())
