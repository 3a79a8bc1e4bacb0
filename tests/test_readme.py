"""The program of README.md; its commands are tested in test_code_blocks.py, its links in test_docs.py."""

import re
import shlex
from pathlib import Path

from transformers import AutoModelForCausalLM

from rlx.config.compose.command_line import compose

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "README.md").read_text()


def test_the_command_for_eight_gpus_is_the_experiment():
    script = (ROOT / "examples" / "gsm8k_8gpu.sh").read_text()
    script = script.replace("$MODEL", "Qwen/Qwen2.5-7B-Instruct").replace("$DATA", "data/gsm8k")
    (command,) = re.findall(r'-m rlx.main_ppo \\\n(.*?)  "\$@"', script, re.DOTALL)
    composed = compose(shlex.split(command.replace("\\\n", " ")))
    assert composed.config == compose(["experiment=gsm8k_grpo_8gpu"]).config and not composed.faults


def test_the_program_runs(untrained, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {"model": AutoModelForCausalLM.from_pretrained(untrained)})
    assert capsys.readouterr().out.startswith("offloaded ")
