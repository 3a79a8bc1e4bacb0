"""The default run learns. It takes minutes: RLX_NIGHTLY=1 has it run, as the nightly workflow does."""

import os
import subprocess
import sys
from statistics import mean

import pytest

from rlx.trainer.report import read_metrics

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("RLX_NIGHTLY") != "1", reason="takes minutes; RLX_NIGHTLY=1 runs it"),
]


MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
# Adapters alone, and a KL to the actor without them.
LORA = (f"{MODEL}.lora_rank=16", f"{MODEL}.lora_alpha=32", f"{ACTOR}.optim.lr=4e-3", f"{ACTOR}.use_kl_loss=True")


@pytest.mark.parametrize(
    ("estimator", "more"), [("grpo", ()), ("gae", ()), ("grpo", LORA)], ids=["grpo", "gae", "adapters"]
)
def test_held_out_accuracy_rises_by_ten_points(estimator, more, tmp_path):
    """Seeds are fixed. By rounding alone warm starts on two kinds of processor led to 61 and to 75 % in the end, so it counts what is
    learned: 12 points or more in the runs of docs/benchmarks.md at this difficulty, whatever their seed and algorithm.
    """
    overrides = [f"algorithm.adv_estimator={estimator}", f"trainer.default_local_dir={tmp_path}", *more]
    done = subprocess.run(
        [sys.executable, "-m", "rlx.main_ppo", "experiment=arithmetic", *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = read_metrics(next(tmp_path.glob("*/metrics.jsonl")))
    assert metrics[0]["val/accuracy"] < 0.55, "the warm start leaves something to learn"
    assert metrics[50]["val/accuracy"] >= metrics[0]["val/accuracy"] + 0.10
    first, last = (mean(metrics[step]["reward/mean"] for step in steps) for steps in (range(1, 6), range(46, 51)))
    assert last >= first + 0.08
