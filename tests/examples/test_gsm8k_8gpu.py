import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "gsm8k_tiny.jsonl"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    data = tmp_path_factory.mktemp("gsm8k")
    (data / "train.jsonl").write_text(FIXTURE.read_text() * 100)  # a batch has up to 512 rows
    shutil.copy(FIXTURE, data / "test.jsonl")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "DATA": str(data), "MODEL": "builtin:tiny", "CUDA_VISIBLE_DEVICES": ""}


def check(
    environment: dict[str, str], *overrides: str, example: str = "gsm8k_8gpu.sh"
) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "examples" / example), "--check", "--tree", "trainer.device=cpu", *overrides]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_is_valid(environment: dict[str, str]):
    done = check(environment)
    assert done.returncode == 0, done.stderr
    assert "train_batch_size: 512" in done.stdout and "adv_estimator: grpo" in done.stdout


@pytest.mark.slow
def test_the_command_for_one_gpu_trains_adapters_without_a_second_model(environment: dict[str, str]):
    done = check(environment, example="lora_1gpu.sh")
    assert done.returncode == 0, done.stderr
    assert "lora_rank: 16" in done.stdout and "use_kl_loss: true" in done.stdout
