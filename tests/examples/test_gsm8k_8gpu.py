import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "gsm8k_tiny.jsonl"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    data = tmp_path_factory.mktemp("gsm8k")
    command = [sys.executable, "-m", "rlx.data.gsm8k", "--train", FIXTURE, "--test", FIXTURE, "--out", data]
    subprocess.run(command, check=True, capture_output=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "DATA": str(data), "MODEL": "builtin:tiny", "CUDA_VISIBLE_DEVICES": ""}


def check(environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "examples" / "gsm8k_8gpu.sh"), "--check", "trainer.device=cpu", *overrides]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_command_is_valid_with_the_sampler_that_this_version_has(environment: dict[str, str]):
    overrides = ("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    done = check(environment, *overrides)
    assert done.returncode == 0, done.stderr
    assert "train_batch_size: 512" in done.stdout and "adv_estimator: grpo" in done.stdout


def test_as_it_stands_nothing_but_vllm_is_missing(environment: dict[str, str]):
    done = check(environment)
    faults = [line for line in done.stderr.splitlines() if line.lstrip()[:2] in ("1.", "2.", "3.")]
    assert done.returncode == 2 and len(faults) == 1, done.stderr
    assert "got: actor_rollout_ref.rollout.name=vllm" in done.stderr
