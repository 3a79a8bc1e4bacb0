"""Read and write a Hugging Face folder: all parts but the weights, and a whole folder from plain tensors."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlx.models.loading import Head, ensure_value_class, explained, without_progress_bar

# transformers takes seconds to import.
if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def as_open_as_folder(file: Path) -> None:
    """Let those read a file who may read its folder, which follows the umask: safetensors writes for the owner alone."""
    file.chmod(file.parent.stat().st_mode & 0o666)


@dataclass(frozen=True)
class FolderParts:
    """Everything of a model folder but the weights."""

    head: Head  # the kind of output
    config: "PreTrainedConfig"  # the architecture
    generation: "GenerationConfig | None"  # sampling defaults and stop tokens; None for a value model
    tokenizer: "PreTrainedTokenizerBase | None"  # None for a folder without one

    @classmethod
    def of(cls, model: "PreTrainedModel", head: Head, tokenizer: "PreTrainedTokenizerBase | None") -> "FolderParts":
        """Return these parts for a loaded model."""
        config = copy.deepcopy(model.config)
        config.use_cache = True  # training needs no key/value cache, but generation from the folder does
        return cls(head, config, model.generation_config if head == "lm" else None, tokenizer)

    @classmethod
    def read(cls, folder: Path, head: Head, trust_remote_code: bool) -> "FolderParts":
        """Read what `write` wrote. Raises ModelError if it cannot be read."""
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        generation = tokenizer = None
        with explained(f"the model's configuration in {folder}"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            if (folder / "generation_config.json").exists():
                generation = GenerationConfig.from_pretrained(folder)
            if (folder / "tokenizer_config.json").exists():
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return cls(head, config, generation, tokenizer)

    def write(self, folder: Path) -> None:
        """Write config, generation config and tokenizer, but no weights."""
        self.config.save_pretrained(folder)
        for part in (self.generation, self.tokenizer):
            if part is not None:
                part.save_pretrained(folder)

    def write_with_weights(self, folder: Path, weights: dict[str, Tensor], trust_remote_code: bool) -> None:
        """Write a folder that `from_pretrained` loads; it is made if missing.

        Weights are full tensors on CPU by the names of the model's state_dict; of tied ones the first is enough, and it alone is
        written, as in the folders of others.
        """
        from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

        auto_class = {"lm": AutoModelForCausalLM, "value": AutoModelForTokenClassification}[self.head]
        if self.head == "value":
            ensure_value_class(self.config)
        dtype = next(iter(weights.values())).dtype
        with torch.device("meta"):
            model = auto_class.from_config(copy.deepcopy(self.config), dtype=dtype, trust_remote_code=trust_remote_code)
        if self.generation is not None:
            model.generation_config = self.generation
        copies = {
            name
            for name, source in getattr(model, "all_tied_weights_keys", {}).items()
            if name in weights and source in weights and torch.equal(weights[name], weights[source])
        }
        with without_progress_bar():
            model.save_pretrained(folder, state_dict={name: weights[name] for name in weights if name not in copies})
        for file in folder.glob("*.safetensors"):
            as_open_as_folder(file)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
