"""The supervisor with small scripts in place of the driver: restarts, signals, and what is left behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from rlx.supervisor.keeper import HINT, End, refusal, what_is_left

ROOT = Path(__file__).parents[2]
LOST = "finished steps that are lost"
KEEP = "import sys; from rlx.supervisor.keeper import Keeper; sys.exit(Keeper([sys.executable, *sys.argv[1:]]).keep())"
SIGNAL_AT = """
import os, signal
from rlx.supervisor import family, keeper
def signalled(place, name):
    work = getattr(place, name)
    def both(*arguments):
        result = work(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return result
    setattr(place, name, both)
"""
"""Lets the supervisor get SIGTERM at the end of one of its functions, so at one moment for sure."""


def _mind_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def keep(tmp_path):
    """keep(script, before) starts a supervisor whose driver runs the script; all that it prints goes to the process's pipes.

    The supervisor runs the lines `before` before it begins.
    """
    started = []

    def start(script: str, before: str = "") -> subprocess.Popen[str]:
        file = tmp_path / "driver.py"
        file.write_text("import os, sys, time\nfrom rlx.supervisor.link import *\n" + textwrap.dedent(script))
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", before + KEEP, str(file)]
        # A shell that starts the tests in the background lets them ignore Ctrl-C.
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, preexec_fn=_mind_ctrl_c, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def without_checkpoint(lost: int) -> str:
    return f"rlx ended without a checkpoint; {LOST}: {lost}{HINT}"


def end(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    out, errors = process.communicate(timeout=60)
    return process.returncode, out, errors.splitlines()


@pytest.mark.parametrize("code", [0, 2, 7])
def test_a_driver_that_never_began_is_not_started_again(keep, code):
    assert end(keep(f"print('once'); sys.exit({code})")) == (code, "once\n", [])


def test_a_driver_that_was_killed_before_it_began_is_started_again(keep):
    kill = "os.kill(os.getpid(), 9)"
    code, _, errors = end(keep(f"if not restarts(): {kill}"))
    assert code == 0 and len(errors) == 1
    assert re.fullmatch(r"rlx restart 1 of 1: the driver \(pid \d+\) was killed by SIGKILL.*", errors[0])
    script = f"""
        if len(restarts()) == 0:
            tell(max_restarts=2, step=4)
            time.sleep(0.5)
        if len(restarts()) < 2:
            {kill}
    """
    code, _, errors = end(keep(script))
    assert (code, len(errors)) == (0, 2), "the second one was killed before it could tell its max_restarts"


def test_a_killed_driver_is_started_again_in_its_folder_and_knows_why(keep, tmp_path):
    script = f"""
        tell(max_restarts=3, folder={str(tmp_path)!r}, step=4)
        print(folder_to_continue(), restarts(), flush=True)
        if len(restarts()) < 2:
            os.kill(os.getpid(), 9)
    """
    code, out, errors = end(keep(script))
    assert code == 0
    reasons = [line.partition(" of 3: step 4: ")[2] for line in errors]
    assert all(re.match(r"the driver \(pid \d+\) was killed by SIGKILL", reason) for reason in reasons)
    assert [line.partition(" of ")[0] for line in errors] == ["rlx restart 1", "rlx restart 2"]
    assert out.splitlines() == ["None []", f"{tmp_path} {reasons[:1]}", f"{tmp_path} {reasons}"]


def test_the_restarts_end_with_all_reasons(keep):
    code, _, errors = end(keep("tell(max_restarts=1, step=2); sys.exit(1)"))
    reason = "step 2: the driver ended without a message (exit code 1)"
    assert code == 1
    assert errors == [
        f"rlx restart 1 of 1: {reason}",
        f"rlx restart 1 was because {reason}",
        f"rlx stopped: {reason}; no restart is left (trainer.max_restarts=1)",
    ]


def test_an_error_that_a_restart_does_not_cure_ends_the_run_with_what_the_driver_said(keep):
    script = """
        tell(max_restarts=3)
        print("rlx stopped: row 7", file=sys.stderr)
        tell(end={"reason": "row 7", "error": "ValueError", "curable": False})
        sys.exit(1)
    """
    assert end(keep(script)) == (1, "", ["rlx stopped: row 7"])


FAMILY = """
    import mmap, subprocess
    tell(max_restarts=3, step=5)
    middle = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)"
    subprocess.run([sys.executable, "-c", middle])  # the sleeper is an orphan now
    name = f"/dev/shm/rlx_test_{os.getpid()}"
    with open(name, "w+b") as file:
        file.truncate(4096)
        shared = mmap.mmap(file.fileno(), 4096)
    print(name, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize(("signum", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_signal_leaves_no_process_and_no_shared_memory(keep, signum, word):
    process = keep(FAMILY)
    orphan, shared = psutil.Process(int(process.stdout.readline())), Path(process.stdout.readline().strip())
    assert shared.exists()
    process.send_signal(signum)
    code, _, errors = end(process)
    assert (code, errors) == (128 + signum, [f"rlx {word} in step 5", without_checkpoint(4)])
    assert not orphan.is_running() and not shared.exists()


def test_a_driver_that_does_not_end_in_time_is_killed(keep):
    script = """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(max_restarts=3, step=5, grace_s=0.5)
        print("ready", flush=True)
        time.sleep(1000)
    """
    process = keep(script)
    process.stdout.readline()
    process.terminate()
    assert end(process)[0] == 143


def test_what_a_driver_told_before_a_signal_counts_for_it(keep):
    """The signal comes when the supervisor has just looked at the pipe; the driver told before that it is ready."""
    tell_and_signal = """
from rlx.supervisor.keeper import Driver
listen = Driver.listen
def late(driver):
    listen(driver)
    if not driver.facts.get("step"):
        open("go on", "w").close()
        while not os.path.exists("told"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
Driver.listen = late
"""
    script = """
        import signal
        def save(number, frame):
            tell(saved="global_step_5")
            sys.exit(143)
        signal.signal(signal.SIGTERM, save)
        while not os.path.exists("go on"):
            time.sleep(0.01)
        tell(max_restarts=3, step=5, grace_s=60)
        open("told", "w").close()
        time.sleep(1000)
    """
    process = keep(script, SIGNAL_AT + "import time\n" + tell_and_signal)
    assert end(process)[::2] == (143, ["rlx ended by SIGTERM in step 5; global_step_5 was saved"])


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_signal_counts_until_all_processes_have_ended_unless_the_run_is_done(keep, code):
    """It comes after the driver's own end, while the supervisor ends what is left."""
    process = keep(f"tell(max_restarts=3, step=9); sys.exit({code})", SIGNAL_AT + "signalled(family, 'end_all')\n")
    interrupted = (143, "", ["rlx ended by SIGTERM in step 9", without_checkpoint(8)])
    assert end(process) == (interrupted if code else (0, "", []))


@pytest.mark.parametrize("code", [0, 2, 7])
def test_a_signal_after_the_end_changes_nothing(keep, code):
    assert end(keep(f"sys.exit({code})", SIGNAL_AT + "signalled(keeper, '_remove')\n")) == (code, "", [])


def test_a_signal_before_the_beginning_ends_the_run(keep):
    """As `rlx.main_ppo` does, which blocks signals while it imports the supervisor."""
    early = "import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); os.kill(os.getpid(), 15)\n"
    assert end(keep("time.sleep(1000)", early)) == (143, "", ["rlx ended by SIGTERM"])


def test_a_signal_between_two_drivers_ends_the_run(keep):
    """It comes when the restart has been decided: the next driver is ended before it does anything."""
    script = "tell(max_restarts=3, step=4); time.sleep(1000 * len(restarts())); os.kill(os.getpid(), 9)"
    code, _, errors = end(keep(script, SIGNAL_AT + "signalled(keeper, '_remove')\n"))
    assert code == 143 and any(line.startswith("rlx ended by SIGTERM") for line in errors[-2:]), errors


def test_a_driver_that_alone_was_asked_to_end_is_not_started_again(keep):
    """Some schedulers signal each process; the driver's end may come first."""
    code, _, errors = end(keep("tell(max_restarts=3, step=4); sys.exit(143)"))
    assert (code, errors) == (143, ["rlx ended by SIGTERM in step 4", without_checkpoint(3)])


@pytest.mark.slow
@pytest.mark.parametrize("facts", ["", "tell(max_restarts=1)"])
def test_a_frozen_driver_is_started_again(keep, facts):
    script = f"""
        {facts}
        if not restarts():
            os.kill(os.getpid(), 19)
    """
    code, _, errors = end(keep(script, "from rlx.supervisor import keeper; keeper.FROZEN_S = 1.0\n"))
    assert code == 0 and len(errors) == 1
    assert re.fullmatch(r"rlx restart 1 of 1: the driver \(pid \d+\) was frozen for 1 s", errors[0])


def test_a_killed_supervisor_takes_the_driver_along(keep):
    process = keep("print(os.getpid(), flush=True); time.sleep(1000)")
    driver = psutil.Process(int(process.stdout.readline()))
    process.kill()
    driver.wait(20)
    assert not driver.is_running()


RAY = """
    import shutil, subprocess
    from rlx.processes.child import end_with
    if restarts():
        sys.exit(0)
    os.makedirs("bin", exist_ok=True)
    me, processes = os.getpid(), {}
    for name in ("gcs_server", "raylet"):
        shutil.copy("/bin/sleep", f"bin/{name}")
        command = [os.path.abspath(f"bin/{name}"), "1000"]
        processes[name] = subprocess.Popen(command, preexec_fn=lambda: end_with(me)).pid
    tell(max_restarts=1, ray="PHASE", step=7)
    time.sleep(1.0)
"""
"""A driver with programs that bear the names of Ray's; they end with it, as Ray's do."""


@pytest.mark.parametrize(
    ("phase", "victim", "said"),
    [
        ("starts", "processes['raylet']", r"the raylet of Ray \(pid {}\) died"),
        ("runs", "processes['raylet']", r"the raylet of Ray \(pid {}\) died"),
        ("runs", "me", r"the driver \(pid {}\) was killed by SIGKILL.*"),  # though Ray dies with it
    ],
)
def test_the_death_of_a_daemon_or_of_the_driver_beside_ray_restarts(keep, phase, victim, said):
    script = f"""
    {RAY.replace("PHASE", phase)}
    print({victim}, flush=True)
    os.kill({victim}, 9)
    time.sleep(1000)
    """
    code, out, errors = end(keep(script))
    assert code == 0 and len(errors) == 1
    assert re.fullmatch(rf"rlx restart 1 of 1: step 7: {said.format(out.strip())}", errors[0])


def test_faults_that_a_restart_finds_are_a_failure(keep):
    """A unit that restarts on failure alone tries again when the cluster is back."""
    code, _, errors = end(keep("tell(max_restarts=3, step=2); sys.exit(2 if restarts() else 1)"))
    assert code == 1
    assert errors[0].startswith("rlx restart 1 of 3: step 2")
    assert "has changed since" in errors[1]


@pytest.mark.parametrize(("step", "code"), [(1, 1), (9, 0)])
def test_a_run_killed_for_memory_in_its_first_step_is_not_started_again(keep, step, code):
    script = f"""
        if restarts():
            sys.exit(0)
        tell(max_restarts=3, step={step})
        tell(end={{"reason": "rank 0: killed", "error": OUT_OF_MEMORY, "curable": True}})
        sys.exit(1)
    """
    assert end(keep(script))[0] == code


def test_the_command_that_goes_on_from_the_newest_checkpoint(tmp_path):
    overrides = ["data.train_files=a b.jsonl", "trainer.resume_mode=disable"]
    assert what_is_left(overrides, None, 0) is None and what_is_left(overrides, str(tmp_path), 0) is None
    (tmp_path / "checkpoints" / "global_step_11.aside").mkdir(parents=True)
    for step in (9, 10):
        (tmp_path / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    command = (
        "python -m rlx.main_ppo 'data.train_files=a b.jsonl' trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={tmp_path}/checkpoints/global_step_10"
    )
    saved = "ended; newest checkpoint: step 10"
    assert what_is_left(overrides, str(tmp_path), 11) == f"{saved}; to continue from it:\n{command}"
    lost = f"{saved}; {LOST}: 3; to continue from it:\n{command}"
    assert what_is_left(overrides, str(tmp_path), 14) == lost


def test_a_run_without_a_checkpoint_says_what_is_lost_and_how_to_save(keep):
    script = "tell(folder='/runs/a', step=34, overrides=['trainer.seed=1']); print(1, flush=True); time.sleep(1000)"
    process = keep(script)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert end(process)[2] == [
        "rlx interrupted in step 34; the run's folder is /runs/a",
        f"rlx ended without a checkpoint; {LOST}: 33; trainer.save_freq=20 saves every 20 steps",
    ]
    assert what_is_left(["trainer.save_freq=50"], None, 34) == f"ended without a checkpoint; {LOST}: 33"
    assert what_is_left(["trainer.save_freq=50"], None, 1) == "ended without a checkpoint"


DIED = End("rank 1 died", step=7)
OUT_OF_MEMORY = End("rank 0: OutOfMemoryError: 3 GiB", step=7, error="OutOfMemoryError in actor.update")


def test_the_same_error_at_the_same_step_ends_the_run_the_second_time():
    assert refusal([OUT_OF_MEMORY], 3) is None
    other_size = OUT_OF_MEMORY._replace(reason="rank 1: OutOfMemoryError: 4 GiB")
    assert "came twice in step 7" in refusal([OUT_OF_MEMORY, DIED, other_size], 9)
    assert refusal([OUT_OF_MEMORY, OUT_OF_MEMORY._replace(step=8)], 3) is None
    assert refusal([OUT_OF_MEMORY, OUT_OF_MEMORY._replace(error="OutOfMemoryError in critic.update")], 3) is None
