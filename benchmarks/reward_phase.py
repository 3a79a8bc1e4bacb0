"""`python -m benchmarks.reward_phase` prints the seconds of generation and of rewards in steps of 512 answers on a CPU.

The tiny built-in model answers, 64 answers at a time. Each call of the reward takes `--seconds`: it waits, as for a server, or
with `--busy` computes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=0.0, busy=False):
    until = time.thread_time() + seconds
    while busy and time.thread_time() < until:
        pass
    if not busy:
        time.sleep(seconds)
    return len(set(solution_str)) / 16
"""
STEPS = 2


def main() -> None:
    """Run with the arguments above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("overrides", nargs="*", help="further keys of the run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reward.py").write_text(REWARD)
        keys = [
            *("experiment=arithmetic", "trainer.logger=[jsonl]", f"trainer.default_local_dir={folder}"),
            *(f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=False", "trainer.test_freq=-1"),
            *("data.train_batch_size=64", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.max_num_seqs=64"),
            *(f"data.max_response_length={arguments.tokens}", "trainer.save_last=False"),
            "actor_rollout_ref.rollout.ignore_eos=True",
            f"custom_reward_function.path={folder}/reward.py",
            f"custom_reward_function.reward_kwargs={{seconds: {arguments.seconds}, busy: {arguments.busy}}}",
            *arguments.overrides,
        ]
        subprocess.run([sys.executable, "-m", "rlx.main_ppo", *keys], check=True)
        (file,) = Path(folder).glob("*/metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    print(" step  rollout s  reward s  step s")
    for row in rows:
        seconds = (row[f"timing_s/{name}"] for name in ("rollout", "reward", "step"))
        print(f"{row['step']:5}" + "".join(f"{each:10.1f}" for each in seconds))


if __name__ == "__main__":
    main()
