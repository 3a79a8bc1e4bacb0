"""The entry: what it prints, where, and with which exit code; from a checkout and from an installed wheel."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlx.checkpoint.manifest import seal
from rlx.cluster.errors import RankFault, WorkerFailure
from rlx.config.machine import Machine
from rlx.driver import _asked_to_end, main
from rlx.errors import ExplainedError, InProcess
from rlx.offload.plan.shapes import SHAPES
from rlx.supervisor.link import Terminated
from rlx.trainer import checkpoints as ck

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def run_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Puts a function in the place of the run that follows a configuration without faults."""

    def replace(function: Callable[..., object]) -> None:
        monkeypatch.setattr("rlx.driver.launch", lambda *given: function(*given) or Path("no run"))

    return replace


def fails(error: BaseException) -> Callable[..., object]:
    def run(config: object, yaml: str) -> None:
        raise error

    return run


def started(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "rlx.main_ppo", *arguments, folder=folder, **environment)


def python(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


# What it prints


def test_check_prints_the_tree_and_the_memory(capsys: pytest.CaptureFixture[str], run_is):
    run_is(fails(AssertionError("--check must not run")))
    assert main(["--check", "--tree", "trainer.device=cpu"]) == 0
    printed = capsys.readouterr()
    assert "path: builtin:tiny" in printed.out
    assert re.search(r"\nupdate_actor .* backward\n", printed.out)
    assert max(map(len, printed.out.splitlines())) <= 100
    assert printed.err == "" and "warm start: before step 1 builtin:tiny learns" in printed.out
    assert "one checkpoint will be written, after the last step" in " ".join(printed.out.split())
    assert re.fullmatch(r"rlx check: valid; fits 1 CPU process\(es\): \w+ takes .* GB", printed.out.splitlines()[-1])
    assert main(["--check", "trainer.device=cpu"]) == 0
    assert "path: builtin:tiny" not in capsys.readouterr().out, "the tree comes on request"


def test_check_plans_for_a_machine_that_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    command = ["--on", "8xh100", f"actor_rollout_ref.model.path={tmp_path}"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "trainer.n_gpus_per_node=8" in printed and "of a device: 80.0 GB" in printed
    verdict = r"rlx check: valid; fits 8 GPU\(s\): \w+ takes [\d.]+ of 7\d.\d GB; its packages are not checked"
    assert re.fullmatch(verdict, printed.splitlines()[-1])
    assert "\nnothing was started: --on only checks\n" in printed
    assert main(["--check", *command]) == 0 and "nothing was started" not in capsys.readouterr().out
    assert main(["--on", "8xh1000"]) == 2
    told = capsys.readouterr().err
    assert "expected a number and one of a100-40" in told and "such as 8xh100 or 1x24gb" in told


def test_check_plans_for_a_card_that_is_named_by_its_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    command = [f"actor_rollout_ref.model.path={tmp_path}"]
    assert main(["--on", "4x80GB", *command]) == 0
    assert "of a device: 80.0 GB" in capsys.readouterr().out
    assert main(["--on", "1x24gb", *command]) == 2
    assert "does not fit 1 GPU(s)" in capsys.readouterr().out
    assert main(["--on", "2x80gb", *command, "trainer.n_gpus_per_node=4"]) == 2
    assert "plan for a machine with 4: --on 4x80gb" in " ".join(capsys.readouterr().err.split())
    assert main(["--on", "1x0gb"]) == 2


def test_check_plans_for_several_machines_and_tells_of_none_but_the_named_one(capsys, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    model = f"actor_rollout_ref.model.path={tmp_path}"
    assert main(["--on", "8xh100", model, "trainer.nnodes=2", "trainer.save_freq=5"]) == 0
    printed = capsys.readouterr().out
    assert "checkpoints: " in printed and "are free" not in printed, "the disk of this machine is not meant"
    assert printed.splitlines()[-1].startswith("rlx check: valid; fits 16 GPU(s): ")
    assert main(["--on", "4xh100", model, "trainer.n_gpus_per_node=8"]) == 2
    printed = capsys.readouterr()
    told = " ".join(printed.err.split())
    assert "on 1 machine(s); 4xh100 has 4 GPU(s)" in told
    assert "remedy: set trainer.n_gpus_per_node=4, or plan for a machine with 8: --on 8xh100" in told
    verdict = "rlx check: 1 fault(s), listed above; fits 8 GPU(s) (4xh100 has 4): "
    assert printed.out.splitlines()[-1].startswith(verdict)


def test_a_model_too_large_for_the_sampler_of_one_gpu_is_shared_by_several(capsys, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2.5-32b"]))
    command = ["--on", "8xh100", f"actor_rollout_ref.model.path={tmp_path}"]
    assert main(command) == 2
    shared = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"  # the smallest that suffices
    assert shared in capsys.readouterr().err
    assert main([*command, shared, "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"]) == 0


def test_vllm_is_given_as_many_processes_as_divide_the_heads(capsys, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))  # 28 heads
    command = ["--on", "8xrtx4090", f"actor_rollout_ref.model.path={tmp_path}"]
    assert main(command) == 2
    remedy = "".join(capsys.readouterr().err.split())
    assert "tensor_model_parallel_size=" in remedy and "tensor_model_parallel_size=8" not in remedy


def test_check_predicts_what_train_would_take_and_names_the_way_to_another_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
):
    laptop = Machine(0, 8, frozenset(), vllm="0.26.0", device_bytes=10**10, host_bytes=10**10)
    monkeypatch.setattr("rlx.driver.inspect_machine", lambda cluster: laptop)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    command = ["--check", f"actor_rollout_ref.model.path={tmp_path}"]
    assert main([*command, "trainer.device=cpu"]) == 2
    given, hint = capsys.readouterr(), "to check for another one: python -m rlx.main_ppo --check --on 8xh100"
    assert main(command) == 2
    found = capsys.readouterr()
    assert "does not fit into host memory" in found.err and found.err == given.err
    assert "memory of the host" in found.out and hint in " ".join(found.out.split())


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_faults_are_numbered_and_exit_with_2(capsys: pytest.CaptureFixture[str], run_is, check: list[str]):
    run_is(fails(AssertionError("must not run")))
    assert main([*check, "trainer.sed=1", "data.train_batch_size=30", "data.val_files=/none.jsonl"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ("rlx check: 3 fault(s), listed above\n" if check else "")
    assert printed.err.startswith("3 fault(s)")
    assert all(
        text in printed.err for text in ("1. unknown key trainer.sed", "2. ", "3. ", "did you mean trainer.seed?")
    )


def test_a_model_that_the_hub_does_not_give_is_a_fault_of_the_run_and_a_warning_of_a_check(capsys, run_is, monkeypatch):
    run_is(fails(AssertionError("a run with faults starts")))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    command = ["actor_rollout_ref.model.path=rlx-tests/nowhere", "data.train_files=missing.jsonl"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "2 fault(s)" in error and "hf download rlx-tests/nowhere" in error and "missing.jsonl" in error
    assert main([*command, "--check"]) == 2
    error = capsys.readouterr().err
    assert "1 fault(s)" in error and "hf download rlx-tests/nowhere" in error[: error.index("fault(s)")]
    known = ["actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
    assert main(["--on", "8xh100", *known]) == 0
    printed = capsys.readouterr()
    assert "The forecast takes the shape of qwen2-7b" in " ".join(printed.err.split()) and "update_actor" in printed.out


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_code_of_the_users_own_is_tried_before_anything_starts(capsys, run_is, check: list[str], tmp_path: Path):
    run_is(fails(AssertionError("must not run")))
    (tmp_path / "mine.py").write_text("def policy_loss(log_probs, old_log_probs, advantages): ...")
    keys = ("actor_rollout_ref.actor.policy_loss", "custom_reward_function")
    command = [f"{key}.path={tmp_path}/mine.py" for key in keys]
    assert main([*check, *command, "trainer.device=cpu", "trainer.sed=1", "data.val_files=/none.jsonl"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ("rlx check: 4 fault(s), listed above\n" if check else "")
    assert (
        "Traceback" not in printed.err and "4 fault(s)" in printed.err and "1. unknown key trainer.sed" in printed.err
    )
    assert "3. the reward function of your own cannot be used" in printed.err
    assert "no 'compute_score'" in " ".join(printed.err.split()), "long lines are wrapped"
    assert "4. the policy loss of your own cannot be used" in printed.err
    (tmp_path / "mine.py").write_text("def policy_loss(*tensors): ...\n\ndef compute_score(**of_sample): ...")
    run_is(lambda config, yaml: None)
    assert main([*check, *command, "trainer.device=cpu"]) == 0


def test_warnings_come_once_and_the_run_gets_the_configuration(capsys: pytest.CaptureFixture[str], run_is):
    seen = []
    run_is(lambda config, yaml: seen.append((config, yaml)))
    assert main(["algorithm.gamma=0.5", "trainer.device=cpu"]) == 0
    ((config, yaml),) = seen
    assert config.algorithm.gamma == 0.5
    assert "gamma: 0.5" in yaml
    printed = capsys.readouterr()
    assert printed.err.count("algorithm.gamma=0.5") == 1
    assert printed.out.startswith("memory: computed on the CPU; up to ")


def on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device_gb: float) -> list[str]:
    """The command of a 7B model on a machine with one GPU of so much memory."""
    device_bytes, host_bytes = int(device_gb * 1e9), 10**12
    machine = Machine(1, 8, frozenset(), vllm="0.26.0", device_bytes=device_bytes, host_bytes=host_bytes)
    monkeypatch.setattr("rlx.driver.inspect_machine", lambda cluster: machine)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen2-7b"]))
    rollout = ("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    return [
        f"actor_rollout_ref.model.path={tmp_path}",
        *rollout,
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
    ]


def test_a_run_says_what_its_phases_will_hold(capsys, run_is, monkeypatch, tmp_path: Path):
    run_is(lambda config, yaml: None)
    command = [*on_gpus(monkeypatch, tmp_path, 80), "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    head, *rows = printed.out.splitlines()
    assert head.split("  ")[0] == "memory by phase"
    assert [row.split()[0] for row in rows[:4]] == ["rollout", "old_log_prob", "update_actor", "sync"]
    for quiet in ("trainer.memory_check=off", "trainer.logger=[jsonl]"):
        assert main([*command, quiet]) == 0
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("check", [[], ["--check"]])
def test_a_checkpoint_of_another_run_is_a_fault_before_anything_starts(capsys, run_is, tmp_path: Path, check):
    run_is(fails(AssertionError("must not run")))
    folder, model = tmp_path / "runs/a/checkpoints/global_step_2", tmp_path / "model"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/checkpoint.json").write_text(json.dumps({"contents": ["model"], "adapters": {}}))
    sampler = {"epoch": 0, "position": 4, "size": 16, "rows": "of other files"}
    ck.write_driver_state(folder, ck.DriverState(2, 1, 2, sampler, {"type": "fixed", "coef": 0.1}, 0, {}))
    for sealed in (folder / "actor", folder):
        seal(sealed, {})
    (folder.parent.parent / "config.yaml").write_text("actor_rollout_ref:\n  model:\n    path: another/model\n")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES["qwen2-0.5b"]))
    command = [f"actor_rollout_ref.model.path={model}", "trainer.device=cpu", "actor_rollout_ref.rollout.name=hf"]
    given = {
        "resume_path": ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}"],
        "auto": ["trainer.resume_mode=auto", f"trainer.default_local_dir={tmp_path}/runs"],
    }
    for keys in given.values():
        assert main([*check, *command, *keys]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "1 fault(s)" in said and f"path: another/model -> {model} (the starting model" in said
        assert "remedy: set them back, or start a new run" in said
    assert main([*check, *command, *given["auto"], "algorithm.adv_estimator=gae"]) == 2
    assert "there is no critic in it, only ['actor']: resume with" in " ".join(capsys.readouterr().err.split())


# How a run ends


def test_a_failed_run_ends_with_its_cause(capsys: pytest.CaptureFixture[str], run_is):
    run_is(fails(ValueError("data.jsonl, row 7: got nothing")))
    assert main(["trainer.device=cpu"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "rlx stopped: ValueError: data.jsonl, row 7: got nothing"
    assert any(line.startswith("Traceback") for line in lines)
    assert any('test_main_ppo.py", line ' in line for line in lines)


def test_the_traceback_of_a_users_function_comes_as_it_is(capsys: pytest.CaptureFixture[str], run_is):
    error = ExplainedError("compute_score in reward.py raised KeyError: 'a'; correct the function")
    error.__cause__ = InProcess("Traceback (most recent call last):\n  File \"reward.py\", line 2\nKeyError: 'a'\n")
    run_is(fails(error))
    assert main(["trainer.device=cpu"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", '  File "reward.py", line 2']
    assert lines[-1].endswith("correct the function")


def test_a_finished_run_names_whole_commands_that_go_on_from_it(capsys, run_is, tmp_path: Path):
    run = tmp_path / "my run"
    run_is(lambda config, yaml: run)
    command = ["trainer.device=cpu", "trainer.total_training_steps=10", "trainer.logger=[jsonl]", "trainer.seed=7"]
    assert main(command) == 0 and "rlx" not in capsys.readouterr().out
    for name in ("checkpoints/global_step_9", "checkpoints/global_step_10", "tensorboard", "transcripts"):
        (run / name).mkdir(parents=True)
    assert main(command) == 0
    export, more, samples, curves = map(shlex.split, capsys.readouterr().out.splitlines()[-4:])
    saved = str(run / "checkpoints/global_step_10")
    assert export[:5] == ["python", "-m", "rlx.export", saved, "my-model"]
    again = ["trainer.device=cpu", "trainer.logger=[jsonl]", "trainer.seed=7", "trainer.resume_mode=resume_path"]
    again += [f"trainer.resume_from_path={saved}", "trainer.total_training_steps=20"]
    assert more[:9] == ["python", "-m", "rlx.main_ppo", *again]
    assert samples[:4] == ["python", "-m", "rlx.view", str(run)]
    assert Path(curves[0]).name == "tensorboard" and curves[1:3] == ["--logdir", str(run)]


def test_a_failed_worker_ends_with_the_first_cause(capsys: pytest.CaptureFixture[str], run_is):
    first = RankFault(1, "error", "OutOfMemoryError: 3 GiB asked for", "Traceback of rank 1")
    after = RankFault(0, "collective", "DistBackendError: connection closed")
    run_is(fails(WorkerFailure("actor", "update", first, others=(after,))))
    assert main(["trainer.device=cpu"]) == 1
    printed = capsys.readouterr().err
    assert "OutOfMemoryError: 3 GiB asked for" in printed.splitlines()[-1]
    assert "Traceback of rank 1" in printed
    assert printed.count("Traceback") == 1, "the driver's own says nothing"


# As a command


def test_help_and_check_load_neither_torch_nor_ray(tmp_path: Path):
    code = "import sys; from rlx.driver import main; main([sys.argv[1]]); print(*({'torch', 'ray'} & set(sys.modules)), file=sys.stderr)"
    for option in ("--help", "--check"):
        # torch is what tells how many devices there are: on a machine with a driver --check asks it.
        done = subprocess.run(
            [sys.executable, "-c", code, option],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        loaded = set(done.stderr.split())
        assert done.returncode == 0
        assert loaded == set() or (option == "--check" and loaded == {"torch"} and Path("/dev/nvidiactl").exists())


def test_a_cluster_that_does_not_answer_is_a_fault(tmp_path: Path):
    done = started("--check", folder=tmp_path, RAY_ADDRESS="127.0.0.1:1")
    assert done.returncode == 2
    assert "127.0.0.1:1" in done.stderr
    by_key = started("--check", "+ray_kwargs.ray_init.address=127.0.0.1:1", folder=tmp_path)
    assert by_key.returncode == 2
    assert "the Ray cluster cannot be joined" in by_key.stderr


# In a process of its own: this one may have joined a cluster already.
THREE_GPUS = """
import json, os, ray, subprocess, sys
from contextlib import ExitStack
from rlx.config.schema import PPOConfig
from rlx.driver import join_cluster

ray.init(address="local", num_cpus=1, num_gpus=3, include_dashboard=False, log_to_driver=False)
os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
with ExitStack() as stack:
    cluster = join_cluster(PPOConfig(), stack)
ends = []
for asked in (4, 3):
    command = [sys.executable, "-m", "rlx.main_ppo", "--check", f"trainer.n_gpus_per_node={asked}"]
    done = subprocess.run(command, capture_output=True, text=True)
    ends.append((done.returncode, done.stderr))
print(json.dumps([cluster.node_gpus, cluster.error, ends]))
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_that_fills_the_machines_memory_ends_with_the_remedy_and_is_not_repeated(untrained: str, tmp_path: Path):
    """Ray's limit is set below what the machine uses already, so it ends the first worker."""
    full = {"RAY_memory_usage_threshold": "0.0001", "RAY_memory_monitor_refresh_ms": "50"}
    small = ["trainer.device=cpu", "actor_rollout_ref.rollout.name=hf", "trainer.total_training_steps=1"]
    done = started(f"actor_rollout_ref.model.path={untrained}", *small, folder=tmp_path, **full)
    _, cause, remedy = " ".join(done.stderr.split()).partition("Ray killed it: ")
    assert done.returncode == 1 and cause and "to need less memory, set actor_rollout_ref." in remedy
    assert "docs/out_of_memory.md" in done.stderr.splitlines()[-1] and "rlx restart" not in done.stderr
    assert len(done.stderr.splitlines()) < 20


@pytest.mark.slow
@pytest.mark.e2e
def test_the_gpus_of_a_cluster_are_counted(tmp_path: Path):
    done = python("-c", THREE_GPUS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    gpus, error, ((code, text), (code_of_three, text_of_three)) = json.loads(done.stdout.splitlines()[-1])
    assert (gpus, error) == ([3], None)
    assert code == 2 and "has 3 GPU(s)" in " ".join(text.split()), "lines are wrapped"
    assert code_of_three == 0, text_of_three


# From a wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rlx installed from its wheel, built from a copy so that nothing is left in the checkout."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("rlx", "configs", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = wheels.glob("rlx-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_every_file_of_configs(installed: Path):
    def below(folder: Path, pattern: str) -> set[str]:
        return {str(file.relative_to(folder)) for file in folder.rglob(pattern)}

    assert below(installed / "rlx", "*.py") == below(ROOT / "rlx", "*.py")
    assert below(installed / "rlx" / "configs", "*.yaml") == below(ROOT / "configs", "*.yaml")
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"rlx", "bin"}
    assert (installed / "rlx" / "py.typed").exists() and (installed / "bin" / "rlx").exists()


def test_the_installed_wheel_runs_from_any_folder(installed: Path, tmp_path: Path):
    done = started(
        "--check", "--tree", "trainer.device=cpu", "trainer.seed=7", folder=tmp_path, PYTHONPATH=str(installed)
    )
    assert done.returncode == 0, done.stderr
    assert "seed: 7" in done.stdout
    place = "import rlx.config.compose.command_line as c; print(c.config_folder())"
    where = python("-c", place, folder=tmp_path, PYTHONPATH=str(installed))
    assert Path(where.stdout.strip()) == installed / "rlx" / "configs"


ONE_STEP = (
    *("experiment=arithmetic", "data.arithmetic.train_size=8", "data.arithmetic.val_size=2"),
    *("data.train_batch_size=4", "data.max_response_length=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *("actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1", "trainer.val_before_train=False"),
    *("trainer.test_freq=-1", "trainer.device=cpu"),
)

# Every process that comes to import rlx.workers.roles writes down which folder it finds it in.
WITNESS = """
import os, pathlib, sys

class Witness:
    def find_spec(name, path=None, target=None):
        if name == "rlx.workers.roles":
            pathlib.Path(__file__).with_name(f"{os.getpid()}.seen").write_text(*path)

sys.meta_path.insert(0, Witness)
"""


@pytest.mark.slow
@pytest.mark.e2e
def test_the_installed_wheel_trains_in_any_folder(installed: Path, untrained: str, tmp_path: Path):
    witness, work = tmp_path / "witness", tmp_path / "work"
    for folder in (witness, work):
        folder.mkdir()
    (witness / "sitecustomize.py").write_text(WITNESS)
    path = f"{witness}{os.pathsep}{installed}"
    done = started(*ONE_STEP, f"actor_rollout_ref.model.path={untrained}", folder=work, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    (run,) = work.glob("outputs/rlx/arithmetic/*")
    (metrics,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics["step"] == metrics["train/policy_version"] == 1
    assert done.stdout.startswith("memory: computed on the CPU; up to ")
    assert "summary" in done.stdout and (run / "report.png").exists()
    seen = [file.read_text() for file in witness.glob("*.seen")]
    assert seen == [str(installed / "rlx" / "workers")], "the worker; the driver starts it by name"


@pytest.mark.parametrize("signal", [Terminated(), KeyboardInterrupt()])
def test_a_signal_during_a_call_of_compiled_code_is_no_failure(signal):
    """Such a call wraps what the signal's handler raises in an error of its own."""
    try:
        try:
            raise signal
        except BaseException as raised:
            raise SystemError("<cyfunction wait> returned a result with an exception set") from raised
    except SystemError as error:
        assert _asked_to_end(error) is signal
    try:
        try:
            raise signal
        except BaseException:
            raise OSError("disk full") from None
    except OSError as error:
        assert _asked_to_end(error) is None, "a fault of its own"
    assert _asked_to_end(SystemError("another")) is None
