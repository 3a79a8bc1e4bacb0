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
    many = data / "train.jsonl"
    many.write_text(FIXTURE.read_text() * 100)  # a batch has up to 512 rows
    command = [sys.executable, "-m", "rlx.data.gsm8k", "--train", many, "--test", FIXTURE, "--out", data]
    subprocess.run(command, check=True, capture_output=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "DATA": str(data), "MODEL": "builtin:tiny", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "said"),
    [
        ("gsm8k_8gpu.sh", ["train_batch_size: 512", "adv_estimator: grpo"]),
        ("lora_1gpu.sh", ["lora_rank: 16", "use_kl_loss: true"]),
    ],
)
def test_the_command_is_valid(environment: dict[str, str], example: str, said: list[str]):
    command = [str(ROOT / "examples" / example), "--check", "--tree", "trainer.device=cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(each in done.stdout for each in said)
