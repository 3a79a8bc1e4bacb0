"""A reward of your own that waits: the response is a program, run side by side with those of other samples.

    rlx train custom_reward_function.path=examples/custom_reward_async.py reward.max_concurrent=8

A program earns 1 when it prints the ground truth. It runs in a process of its own, which ends with the call, also when
`reward.timeout_s` ends it. That keeps it from stopping the run, not from your files: models may write anything, so run
programs in a container.
"""

import asyncio
import sys

LIMIT_S = 10.0


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", solution_str),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        return {"score": 0.0, "too_slow": 1.0}
    finally:
        if process.returncode is None:
            process.kill()
    return {"score": float(printed.decode(errors="replace").strip() == str(ground_truth)), "too_slow": 0.0}
