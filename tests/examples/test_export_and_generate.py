import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlx.config.schema import FSDPConfig, ModelConfig, TinyModelConfig
from rlx.engine.engine import Engine
from rlx.models.tiny import make_tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "export_and_generate.py"


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_checkpoint_becomes_a_folder_that_answers(tmp_path: Path, one_process: None):
    model, tokenizer = make_tiny(TinyModelConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2))
    model.save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    config = ModelConfig(path=str(tmp_path / "start"))
    engine = Engine(config, FSDPConfig(), strategy="fsdp2", device=torch.device("cpu"), tokenizer=tokenizer)
    checkpoint, exported = tmp_path / "global_step_1" / "actor", tmp_path / "exported"
    engine.weights.save(checkpoint, ("model",))

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
