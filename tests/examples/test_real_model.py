"""docs/real_model.md: its rows and reward in any run of the tests, all its commands with the real model at night."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "real_model"
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "real_model.md").read_text(), re.DOTALL)
SMALL = "trainer.device=cpu actor_rollout_ref.rollout.name=hf data.train_batch_size=4 actor_rollout_ref.rollout.n=2"
SMALL += " trainer.total_training_steps=1 trainer.test_freq=-1 data.val_max_samples=4"


def test_rows_are_right_and_none_is_held_out_and_trained_on(tmp_path: Path):
    command = [sys.executable, str(EXAMPLE / "sums.py"), str(tmp_path), "--largest", "20"]
    subprocess.run(command, check=True)
    parts = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "held_out")}
    assert [len(parts["train"]), len(parts["held_out"])] == [441 + 231 - 500, 500]
    rows = [json.loads(line) for part in parts.values() for line in part]
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert all(eval(row["prompt"].split("?")[0].removeprefix("What is ")) == int(row["answer"]) >= 0 for row in rows)
    command[-1] = "19"
    assert "expected at least 20" in subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    ("text", "score"),
    [("82", 1), ("37 + 45 = 82.", 1), ("82 is the sum of 37 and 45", 0), ("", 0), ("-82", 0), ("1,082", 0), ("082", 0)],
)
def test_the_last_number_counts(text, score):
    assert runpy.run_path(str(EXAMPLE / "reward.py"))["compute_score"]("answer", text, "82") == score


def test_gsm8k_reports_the_number_after_its_mark():
    reward = runpy.run_path(str(EXAMPLE / "reward.py"))["gsm8k"]
    assert reward("", "So 1,082.", "1082") == {"score": 1.0, "strict": 0.0}
    assert reward("", "#### 7 #### 1,082", "1082") == {"score": 1.0, "strict": 1.0}


def test_a_list_counts_up_to_its_first_wrong_number():
    counted = runpy.run_path(str(EXAMPLE / "reward.py"))["counted"]
    texts = ("7, 9, 11", "7, 9, 12", "8, 9, 11", "7", "", "7, 9, 11, 13")
    assert [counted("", text, "7 9 11") for text in texts] == [1, 2 / 3, 0, 1 / 3, 0, 3 / 4]


@pytest.mark.e2e
@pytest.mark.nightly
def test_the_commands_of_the_page_run(tmp_path: Path):
    """RLX_REAL_MODEL names a folder that keeps the weights from night to night."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if kept := os.environ.get("RLX_REAL_MODEL"):
        (tmp_path / "smollm2").symlink_to(Path(kept).absolute())
    script = "\n".join(block for block in BLOCKS if "benchmarks" not in block)
    script = re.sub("^rlx train .*$", rf"\g<0> {SMALL}", script, flags=re.MULTILINE)
    script = script.replace("RUN=outputs/rlx/small/YOUR_RUN", "RUN=$(echo outputs/rlx/small/*)")
    script = script.replace("global_step_24", "global_step_1")
    program = (
        f'set -e\nrlx() {{ "{sys.executable}" -m rlx.cli "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n{script}'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "fits 1 GPU(s)" in done.stdout and done.stdout.count("1/1") >= 2
    assert re.search(r"held-out accuracy [\d.]+%", done.stdout)
    assert len([*tmp_path.glob("outputs/rlx/small/*/view.html")]) == 1
    assert re.search(r"\d", done.stdout.splitlines()[-1]), "the model answers with a number"
