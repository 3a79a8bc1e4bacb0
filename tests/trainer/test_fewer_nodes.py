"""A run on two nodes of a Ray cluster goes on with one of them when the other is killed: `trainer.min_nodes`."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from run_tools import KEPT, metrics_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 3
IMPATIENT = """
import functools
import sys
from rlx.cluster import placement
placement.nodes_to_take = functools.partial(placement.nodes_to_take, wait_s=2.0)  # for a node that stays away
from rlx.driver import main
sys.exit(main(sys.argv[1:]))
"""
"""As `rlx.main_ppo`, but the driver waits two seconds for a node, not two minutes."""
REWARD = """
import time
from pathlib import Path

def varied(data_source, solution_str, ground_truth, extra_info=None):
    until_s = time.monotonic() + 20
    while has_rows() and not Path(__file__).with_name("killed").exists() and time.monotonic() < until_s:
        time.sleep(0.05)  # the run does not end before the node does
    return len(set(solution_str)) / 16

def has_rows():
    return sum(file.read_bytes().count(b"\\n") for file in Path(__file__).parent.glob("runs/*/metrics.jsonl")) >= 2
"""
RESULTS = ("reward/mean", "actor/loss", "actor/grad_norm", "train/policy_version")


@pytest.fixture
def two_nodes():
    """A cluster of two nodes on this machine, and the one without the head."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        second = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        yield cluster, second
    finally:
        cluster.shutdown()


def started(cluster: Cluster, log: Path, *command: str) -> subprocess.Popen:
    """The command: a supervisor and its driver."""
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(Path(__file__).parents[2])}
    with log.open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-c", KEPT, IMPATIENT, *command], stdout=output, stderr=output, env=environment
        )


def rows(runs: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in runs.glob("*/metrics.jsonl"))


def test_a_run_whose_second_node_is_killed_goes_on_with_one(short_run, two_nodes, tmp_path):
    cluster, second = two_nodes
    command = [*short_run, "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.min_nodes=1", "trainer.device=cpu"]
    command += [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.resume_mode=auto"]
    (tmp_path / "reward.py").write_text(REWARD)
    command += [f"custom_reward_function.path={tmp_path}/reward.py", "custom_reward_function.name=varied"]
    runs, log = tmp_path / "runs", tmp_path / "log"
    run = started(cluster, log, *command)
    try:
        deadline_s = time.monotonic() + 120
        while rows(runs) < 2 and run.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert run.poll() is None, log.read_text()
        (folder,) = runs.glob("2*")
        written = folder / "checkpoints/global_step_1/actor/model"
        assert len(list(written.iterdir())) == 2, "one file of each node"
        before, done = metrics_of(folder), rows(runs)
        cluster.remove_node(second, allow_graceful=False)
        (tmp_path / "killed").touch()
        assert run.wait(240) == 0, log.read_text()
    finally:
        run.terminate()
    said = log.read_text()
    assert said.count("\nrlx restart 1 of 3: step ") == 1 and "\nrlx restart 2" not in said, said
    assert "the run takes 1 of 2 nodes, because others stay away" in said
    after = metrics_of(folder)
    assert sorted(after) == list(range(1, STEPS + 1)) and len(list(runs.glob("2*"))) == 1
    assert len(list((folder / f"checkpoints/global_step_{STEPS}/actor/model").iterdir())) == 1
    for name in RESULTS:
        assert [after[step][name] for step in range(1, done)] == [before[step][name] for step in range(1, done)], name
