import json
import subprocess
import sys

import pytest
import torch

from rlx.workers.worker import MemoryLog, memory_in_use

CPU = torch.device("cpu")
MEGABYTES_100 = 25_000_000  # fp32 numbers


RUN_OF_CALLS = """
import json, torch
from rlx.workers.worker import MemoryLog
size, log, kept = 25_000_000, MemoryLog(torch.device("cpu")), []
with log.around("actor.update"):
    kept.append(torch.ones(size))
kept.append(torch.ones(size))
with log.around("actor.update"):
    kept.append(torch.ones(size))
with log.around("rollout.sync"):
    kept.clear()
print(json.dumps([log.take(), log.take()]))
"""


@pytest.mark.slow
def test_a_run_of_calls_counts_from_its_first_to_its_last():
    # In a process of its own, because what other tests have freed may be given out again without a change of size.
    done = subprocess.run([sys.executable, "-c", RUN_OF_CALLS], check=True, capture_output=True, text=True)
    figures, again = json.loads(done.stdout)
    assert figures.keys() == {f"{n}_{m}_gb" for n in ("actor.update", "rollout.sync") for m in ("before", "after")}
    assert figures["actor.update_after_gb"] - figures["actor.update_before_gb"] == pytest.approx(0.3, abs=0.05)
    assert figures["rollout.sync_before_gb"] - figures["rollout.sync_after_gb"] == pytest.approx(0.3, abs=0.05)
    assert again == {}


def test_a_second_run_and_what_follows_a_report_begin_anew():
    log, kept = MemoryLog(CPU), []
    for name in ("sync", "generate", "sync"):
        with log.around(name):
            kept.append(torch.ones(MEGABYTES_100))
    figures = log.take()
    assert figures["sync_before_gb"] == pytest.approx(figures["generate_after_gb"], abs=0.05)
    with log.around("sync"):
        pass
    assert log.take()["sync_before_gb"] == pytest.approx(figures["sync_after_gb"], abs=0.05)


def test_a_call_that_fails_has_no_figure_after_it():
    log = MemoryLog(CPU)
    with pytest.raises(ValueError, match="boom"), log.around("actor.update"):
        raise ValueError("boom")
    assert log.take().keys() == {"actor.update_before_gb"}


@pytest.mark.gpu
def test_on_a_device_all_that_is_in_use_counts_and_what_torch_has_allocated():
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before = memory_in_use(device)
    block = torch.ones(MEGABYTES_100 * 10, device=device)
    during = memory_in_use(device)
    del block
    cached = memory_in_use(device)
    torch.cuda.empty_cache()
    assert during["allocated_gb"] - before["allocated_gb"] == pytest.approx(1.0, abs=0.01)
    assert during["gb"] - before["gb"] >= 0.99 and cached["gb"] == during["gb"], "what torch keeps for later is in use"
    assert cached["allocated_gb"] == before["allocated_gb"]
    assert memory_in_use(device)["gb"] <= before["gb"] + 0.05


@pytest.mark.gpu
def test_on_a_device_a_call_has_a_peak_and_the_process_that_of_all_its_calls():
    log = MemoryLog(torch.device("cuda", 0))
    log.take_peak_gb()
    for name, size in ("actor.update", 3), ("rollout.sync", 1), ("actor.update", 2):
        with log.around(name):
            torch.ones(MEGABYTES_100 * size, device="cuda:0")
    peaks = log.take()
    assert peaks["actor.update_peak_allocated_gb"] - peaks["rollout.sync_peak_allocated_gb"] == pytest.approx(
        0.2, abs=0.01
    )
    assert log.take_peak_gb() == peaks["actor.update_peak_allocated_gb"]
