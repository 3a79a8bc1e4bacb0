import pickle

import pytest
import torch

from rlx.cluster.errors import (
    ClusterError,
    RankFault,
    WorkerFailure,
    WorkerLocation,
    death_of,
    end_of,
    fault_of,
    first_cause,
)
from rlx.errors import cause_of, kernel_line
from rlx.supervisor.link import OUT_OF_MEMORY

GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1")
RAY_REPORT = """The actor died unexpectedly before finishing this task.
\tclass_name: WorkerProcess
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed"""


def caught(error):
    try:
        raise error
    except Exception as same:
        return same


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), "error"),
        (RuntimeError("shape mismatch"), "error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "error"),
        (ValueError("NCCL is spelt with two C"), "error"),
        (GLOO, "collective"),
        (torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp"), "collective"),
        (torch.distributed.DistNetworkError("The client socket has timed out"), "collective"),
    ],
)
def test_errors_of_collectives_are_told_from_a_ranks_own(error, kind):
    assert fault_of(3, caught(error)).kind == kind


def test_an_error_that_explains_itself_has_the_traceback_of_its_cause_alone():
    def explained(cause):
        try:
            raise ClusterError("what and why") from cause
        except ClusterError as error:
            return fault_of(0, error)

    assert (explained(None).detail, explained(None).summary) == ("", "ClusterError: what and why")
    assert explained(cause_of("Traceback\nKeyError: 'k'\n")).detail == "Traceback\nKeyError: 'k'"
    assert explained(KeyError("k")).detail == "KeyError: 'k'"


def test_the_first_cause_is_the_earliest_that_is_no_collectives():
    peer = RankFault(0, "collective", "connection closed", time_s=1.0)
    own = RankFault(2, "error", "ValueError: x", time_s=3.0)
    late = RankFault(1, "died", "gone", time_s=4.0)
    assert first_cause([peer, late, own]) is own
    assert first_cause([peer]) is peer


def test_last_line_names_rank_node_call_and_cause_on_one_line():
    fault = fault_of(1, caught(ValueError("two\nlines")))
    others = tuple(RankFault(rank, "collective", "connection closed") for rank in range(2, 9))
    failure = WorkerFailure("actor", "update", fault, WorkerLocation(1, "n", "10.0.0.7", 42), others)
    lines = str(failure).splitlines()
    assert lines[-1] == "rank 1 (pid 42 on 10.0.0.7), actor.update: ValueError: two lines"
    assert any("test_errors.py" in line for line in lines), "the worker's traceback is shown"
    assert sum("meanwhile" in line for line in lines) == 3, "not one line for each of a thousand ranks"


def test_death_is_told_in_rays_words_without_its_ballast():
    summary = death_of(1, RAY_REPORT).summary
    assert "Worker unexpectedly exits with a connection error code 2. End of file." in summary
    assert "class_name" not in summary and "common causes" not in summary and "\n" not in summary


RAY_KILLED = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: 2e) was 22.61GB used / 23.54GB limit (0.96)
Object store memory usage: [- objects spillable: 0
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
42\t21.27\tray::WorkerProcess.call
Refer to the documentation"""


def test_a_worker_killed_for_memory_ends_with_figures_and_a_remedy():
    fault = death_of(0, RAY_KILLED)
    last = str(WorkerFailure("actor", "update", fault)).splitlines()[-1]
    assert last.startswith("rank 0, actor.update: Ray killed it: 22.61GB used / 23.54GB of host memory. ")
    assert "data.train_batch_size" in last and "spillable" not in str(WorkerFailure("actor", "update", fault))
    assert "42\t21.27" in fault.detail
    assert end_of(WorkerFailure("actor", "update", fault))["error"] == OUT_OF_MEMORY


def test_the_kernels_line_about_a_killed_process_is_found(tmp_path):
    log = tmp_path / "kmsg"
    killed = "Out of memory: Killed process 4711 (ray::Worker) total-vm:9kB, anon-rss:8kB"
    log.write_text(f"6,1,1,-;eth0 up\n3,2,2,-;{killed}\n6,3,3,-;Killed process 47 (x)\n")
    assert kernel_line(4711, str(log)) == killed and kernel_line(4, str(log)) == ""
    assert kernel_line(4711, str(tmp_path / "none")) == ""


def test_standard_error_of_a_dead_worker_is_shown(tmp_path):
    log = tmp_path / "worker.err"
    log.write_text(":job_id:01\n" + "\n".join(f"line {i}" for i in range(50)))
    text = str(WorkerFailure("a", "b", death_of(0, RAY_REPORT), WorkerLocation(0, "n", "ip", 1, log=str(log))))
    assert "line 49" in text and "line 5\n" not in text and ":job_id:" not in text
    elsewhere = WorkerLocation(0, "n", "ip", 1, log="/on/another/node.err")
    assert "/on/another/node.err" in str(WorkerFailure("a", "b", death_of(0, RAY_REPORT), elsewhere))


def test_failure_survives_pickling():
    failure = WorkerFailure(
        "actor", "update", fault_of(1, caught(ValueError("bad"))), WorkerLocation(1, "n", "10.0.0.7", 42)
    )
    again = pickle.loads(pickle.dumps(failure))
    assert (again.role, again.method, again.rank, again.cause) == ("actor", "update", 1, "ValueError: bad")
    assert str(again) == str(failure)
