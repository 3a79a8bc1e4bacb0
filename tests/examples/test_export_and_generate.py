import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx.config.schema import FSDPConfig, ModelConfig
from rlx.engine.engine import Engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "export_and_generate.py"


@pytest.mark.slow
def test_a_checkpoint_becomes_a_folder_that_answers(tmp_path: Path, untrained: str):
    model, tokenizer = (kind.from_pretrained(untrained) for kind in (AutoModelForCausalLM, AutoTokenizer))
    checkpoint, exported = tmp_path / "global_step_1" / "actor", tmp_path / "exported"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device, config = torch.device("cpu"), ModelConfig(path=untrained)
    Engine(config, FSDPConfig(), strategy="fsdp2", device=device, tokenizer=tokenizer).weights.save(
        checkpoint, ("model",)
    )
    dist.destroy_process_group()

    question = "Tom has 3 apples. He buys 4 more. How many apples does Tom have?"
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt, max_new_tokens=64, do_sample=False)
    expected = tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)

    command = [sys.executable, str(EXAMPLE), str(checkpoint), str(exported), question]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == expected + "\n"
    assert (exported / "config.json").exists() and list(exported.glob("*.safetensors"))
