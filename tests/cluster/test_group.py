import logging
import os
import re
import time
from dataclasses import dataclass

import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table

from rlx.cluster import group as group_module
from rlx.cluster.errors import WorkerFailure
from rlx.cluster.group import WorkerGroup
from rlx.cluster.placement import Mesh, Placement
from rlx.data.batch import Batch, concat

pytestmark = pytest.mark.usefixtures("ray_session")


class Records(logging.Handler):
    """Keeps what the driver logs while the group starts."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def emit(self, record):
        self.kept.append(record)


@pytest.fixture(scope="module")
def started():
    return Records()


@pytest.fixture(scope="module")
def group(ray_session, worker_class, started):
    meshes, logger = {"pair": Mesh.of(2, 2)}, logging.getLogger("rlx")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)  # set, it would be taken as it is
        patch.setattr(group_module, "SLOW_START_S", 0.01)
        patch.setattr(logger, "level", logging.INFO)
        logger.addHandler(started)
        group = WorkerGroup(Placement.reserve(1, [2], "cpu"), worker_class, meshes).build("x")
        logger.removeHandler(started)
    with group:
        yield group


def batch(rows):
    tensors = {"seed": torch.arange(rows), "values": torch.rand(rows, 3)}
    return Batch.of(tensors, {"prompt_text": [f"row {i}" for i in range(rows)]})


def test_each_process_knows_its_place_before_torch_starts(group):
    answers = group.call("any", "environment")
    threads = str(max(1, int(ray.cluster_resources()["CPU"]) // 2))
    for rank, (environment, torch_threads, torch_came_early) in enumerate(answers):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == "2"
        assert environment["CUDA_VISIBLE_DEVICES"] == ""
        assert environment["OMP_NUM_THREADS"] == threads == str(torch_threads)
        if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
            assert environment["OMP_WAIT_POLICY"] == "PASSIVE" and environment["GOMP_SPINCOUNT"] == "3000"
        assert not torch_came_early
    assert answers[0][0]["MASTER_PORT"] == answers[1][0]["MASTER_PORT"]


@pytest.mark.parametrize("rows", [5, 2, 1, 0])
@pytest.mark.parametrize("role", ["each", "pair"])
def test_split_returns_rows_in_order(group, rows, role):
    sent = batch(rows)
    got = group.split(role, "echo", sent)
    assert torch.equal(got["seed"], sent["seed"]) and torch.equal(got["values"], sent["values"])
    assert got.info == sent.info


def test_a_call_with_a_batch_deals_its_shares_and_has_a_result_for_each(group):
    first, second = group.call("each", "facts", 10, batch=batch(5))
    assert (first, second) == ({"rank": 0, "rows": 3, "sum": 30}, {"rank": 1, "rows": 2, "sum": 70})
    assert group.call("pair", "facts", 1, batch=batch(5)) == [{"rank": 0, "rows": 5, "sum": 10}]


def seeing(seen, folder):
    """Notes what is finished, in a list and as files."""

    def see(finished, wait_s):
        seen.extend(finished)
        for row in finished:
            (folder / str(row)).touch()
        return False

    return see


@pytest.mark.parametrize("role", ["each", "pair"])
def test_what_a_call_has_finished_arrives_while_it_runs(group, role, tmp_path):
    seen, sent = [], batch(4)
    begun = group.begin(role, "show", tmp_path, batch=sent, meanwhile=seeing(seen, tmp_path))
    assert concat(group.results(begun)).info == sent.info
    assert sorted(seen) == [0, 1, 2, 3], "once, also of ranks with the same rows"


def test_a_call_returns_results_by_rank(group):
    assert group.call("any", "add", 2, 3) == [(0, 5), (1, 5)]


def test_an_answer_of_another_length_is_refused(group):
    with pytest.raises(ValueError, match=r"each\.shorter answered 0 rows for 3"):
        group.split("each", "shorter", batch(6))


def test_a_slow_start_gets_a_line_and_what_workers_log_comes_once(group, started):
    (line,) = [record.getMessage() for record in started.kept if "have not started" in record.getMessage()]
    assert re.match(r"\d of 2 worker processes", line) and re.search(r"raylet\.err .* of Ray's session_\S+$", line)
    texts = sorted(record.getMessage() for record in started.kept if record.name == "rlx.tests")
    assert texts == ["built x", "rank 0 speaks", "rank 1 speaks"]


@dataclass(frozen=True)
class NoRoomForRank1(Placement):
    """Ray never finds a place for rank 1, which asks for more cores than any machine has."""

    def options(self, slot):
        return {"num_cpus": 100_000} if slot.local_rank == 1 else super().options(slot)


def test_a_process_that_dies_at_the_start_is_told_of_while_others_still_start(worker_class, caplog):
    reserved = Placement.reserve(1, [2], "cpu")
    group = WorkerGroup(NoRoomForRank1(**vars(reserved)), worker_class)
    ray.kill(group._processes[0])
    start_s = time.monotonic()
    with pytest.raises(WorkerFailure, match="the worker process died"):
        group.load()
    assert time.monotonic() - start_s < group_module.SLOW_START_S / 2
    assert "have not started" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "cause"), [("raise", "ValueError: the true cause"), ("die", "the worker process died")]
)
def test_first_cause_wins_over_the_collective_that_others_sit_in(worker_class, deed, cause):
    group = WorkerGroup(Placement.reserve(1, [2], "cpu"), worker_class).build(deed, True)
    start_s = time.monotonic()
    with pytest.raises(WorkerFailure) as caught:
        group.call("actor", "reduce", deed)
    assert time.monotonic() - start_s < 120, "far below the collective's own timeout of half an hour"
    failure = caught.value
    assert (failure.rank, failure.role, failure.method) == (1, "actor", "reduce")
    last_line = str(failure).splitlines()[-1]
    assert last_line.startswith(
        f"rank 1 (pid {failure.location.pid} on {failure.location.node_ip}), actor.reduce: {cause}"
    )
    with pytest.raises(RuntimeError, match="closed or has failed"):
        group.call("actor", "add", 1, 2)


def test_pools_work_at_the_same_time_and_a_failure_of_one_ends_a_call_of_the_other(worker_class, tmp_path):
    pools = {"train": 0, "sample": 1}
    group = WorkerGroup(Placement.reserve(1, (1, 1), "cpu"), worker_class, pool_of=pools).build("x")
    begun = group.begin("sample", "add", 2, 3)
    assert group.call("train", "add", 1, 1) == [(0, 2)] and group.results(begun) == [(0, 5)]
    assert group.call("process", "add", 1, 2) == [(0, 3)] * 2, "each is rank 0 of its process group"
    begun = group.begin("sample", "traced", str(tmp_path))
    ray.wait([*begun.ranks])
    assert [group.call("train", "add", 1, 1) for _ in range(3)] == [[(0, 2)]] * 3 and len(group.results(begun)) == 1
    assert len([*tmp_path.iterdir()]) == 2, (
        "a result, which may be large, is read once for its failure and once for its value"
    )
    seen, sent = [], batch(3)
    begun = group.begin("sample", "show", tmp_path, batch=sent, meanwhile=seeing(seen, tmp_path))
    group.split("train", "show", sent, tmp_path)  # ends when the driver has seen the rows of the other call
    assert seen == [0, 1, 2] and group.results(begun)[0].info == sent.info
    group.begin("sample", "reduce", "nothing")  # fails: torch.distributed is not set up
    with pytest.raises(WorkerFailure) as caught:
        group.call("train", "work_slowly", 100)
    assert (caught.value.rank, caught.value.role, caught.value.method) == (1, "sample", "reduce")


def test_a_constructor_that_raises_ends_the_group(worker_class):
    pool = Placement.reserve(1, [1], "cpu")
    with pytest.raises(WorkerFailure) as caught:
        WorkerGroup(pool, worker_class).build("fails")
    last_line = str(caught.value).splitlines()[-1]
    assert last_line.endswith("worker.__init__: ValueError: the constructor does not like this")
    # Not by the CPUs that are free: a group that ended before this one may be giving its places back meanwhile.
    assert placement_group_table(pool.group)["state"] == "REMOVED", "the places are given back"


@pytest.mark.slow
def test_a_stuck_collective_names_the_rank_that_the_others_wait_for(worker_class):
    """A frozen process, which cannot answer, is stopped in the nightly runs of benchmarks/chaos."""
    group = WorkerGroup(Placement.reserve(1, [2], "cpu"), worker_class).build("x", True)
    group._hang_timeout_s = 3.0  # now that torch is there, whose import is one long call on a busy machine
    assert group.call("any", "work_slowly", 4.5) == [4.5] * 2, "a slow call is no hang"
    with pytest.raises(WorkerFailure) as raised:
        group.call("any", "reduce", "sleep")
    lines = str(raised.value).splitlines()
    at = r"no progress for \d+ s at .*conftest.py:\d+ reduce"
    assert re.match(r"rank 1 \(pid \d+ on .*\), any.reduce: " + at, lines[-1])
    assert re.match(r"meanwhile on rank 0: no progress for \d+ s at .*, inside .*distributed_c10d.py", lines[-2])
    assert "time.sleep(1000)" in str(raised.value), "its stack"
    assert raised.value.fault.curable


@pytest.mark.slow
def test_a_call_that_hangs_is_noticed_while_others_are_waited_for(worker_class, tmp_path):
    pools = {"train": 0, "sample": 1}
    group = WorkerGroup(Placement.reserve(1, (1, 1), "cpu"), worker_class, pool_of=pools).build("x")
    group.call("train", "work_slowly", 0.1)
    group._hang_timeout_s = 3.0
    group.begin("sample", "show", tmp_path, batch=batch(1))  # nobody sees its row
    with pytest.raises(WorkerFailure, match=r"rank 1 .*, sample.show: no progress for \d+ s") as raised:
        for _ in range(100):
            group.call("train", "work_slowly", 0.5)
    assert raised.value.fault.curable
