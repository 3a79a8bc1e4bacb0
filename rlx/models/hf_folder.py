"""Read and write a Hugging Face folder: all parts but the weights, and a whole folder from plain tensors."""

import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlx.models.loading import Head, ModelError, ensure_value_class, explained, generation_of, without_progress_bar

# transformers takes seconds to import.
if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def as_open_as_folder(file: Path) -> None:
    """Let those read a file who may read its folder, which follows the umask: safetensors writes for the owner alone."""
    file.chmod(file.parent.stat().st_mode & 0o666)


def try_saving(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Save a tokenizer to a temporary folder, as each checkpoint does. Raises ModelError if that fails."""
    with (
        tempfile.TemporaryDirectory() as folder,
        explained(f"the tokenizer of {tokenizer.name_or_path} after saving it"),
    ):
        tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class FolderParts:
    """Everything of a model folder but the weights."""

    head: Head  # the kind of output
    config: "PreTrainedConfig"  # the architecture
    generation: "GenerationConfig | None"  # sampling defaults and stop tokens, as read; None for a value model
    tokenizer: "PreTrainedTokenizerBase | None"  # None for a folder without one
    trust_remote_code: bool = False  # run code that came with the model

    @classmethod
    def of(
        cls,
        model: "PreTrainedModel",
        head: Head,
        tokenizer: "PreTrainedTokenizerBase | None",
        dtype: torch.dtype | None = None,
        trust_remote_code: bool = False,
    ) -> "FolderParts":
        """Return these parts for a loaded model; `dtype` is the type that its folder names, if that is another one."""
        config = copy.deepcopy(model.config)
        if dtype is not None:
            config.dtype = dtype
        config.use_cache = True  # training needs no key/value cache, but generation from the folder does
        generation = model.generation_config if head == "lm" else None
        return cls(head, config, generation, tokenizer, trust_remote_code)

    @classmethod
    def read(cls, folder: Path, head: Head, trust_remote_code: bool) -> "FolderParts":
        """Read what `write` wrote. Raises ModelError if it cannot be read."""
        from transformers import AutoConfig, AutoTokenizer

        generation = tokenizer = None
        with explained(f"the model's configuration in {folder}"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            if (folder / "generation_config.json").exists():
                generation, _ = generation_of(str(folder))
            if (folder / "tokenizer_config.json").exists():
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return cls(head, config, generation, tokenizer, trust_remote_code)

    def write(self, folder: Path) -> None:
        self.config.save_pretrained(folder)
        self._write_generation(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def _write_generation(self, folder: Path) -> None:
        # As read: `save_pretrained` rejects many of the hub's, such as temperature without do_sample.
        if self.generation is not None:
            self.generation.to_json_file(folder / "generation_config.json")

    def try_writing(self) -> None:
        """Write everything but weights to a temporary folder. Raises ModelError if a checkpoint or an export could not."""
        with tempfile.TemporaryDirectory() as folder, explained("it back as a checkpoint would save it"):
            self.write(Path(folder))
            self.write_with_weights(Path(folder), {})

    def narrower(self, own: torch.dtype) -> torch.dtype:
        """Return the 16-bit type that the model was read in if the weights are in fp32, else the weights' own."""
        read = self.config.dtype
        read = getattr(torch, read, None) if isinstance(read, str) else read
        return read if own == torch.float32 and read in (torch.bfloat16, torch.float16) else own

    def write_with_weights(self, folder: Path, weights: dict[str, Tensor], dtype: torch.dtype | None = None) -> None:
        """Write a folder that `from_pretrained` loads; it is made if missing.

        Weights are full tensors on CPU by the names of the model's state_dict; of tied ones the first is written. Parameters get
        `dtype`, by default that of the weights. Raises ModelError if the weights do not fit the config or the range of `dtype`.
        """
        from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, GenerationConfig

        auto_class = {"lm": AutoModelForCausalLM, "value": AutoModelForTokenClassification}[self.head]
        if self.head == "value":
            ensure_value_class(self.config)
        dtype = dtype or next((tensor.dtype for tensor in weights.values()), torch.float32)
        options = {"dtype": dtype, "trust_remote_code": self.trust_remote_code}
        with torch.device("meta"):
            model = auto_class.from_config(copy.deepcopy(self.config), **options)
        if self.generation is not None:
            model.generation_config = GenerationConfig()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        kept, ties = dict(weights), getattr(model, "all_tied_weights_keys", {})
        for name in ties.keys() & weights.keys():
            if ties[name] in weights and torch.equal(weights[name], weights[ties[name]]):
                del kept[name]
        if weights:
            _require_fitting(model, weights)
        state = {name: _in_type(name, x, dtype) if name in parameters else x for name, x in kept.items()}
        with without_progress_bar():
            model.save_pretrained(folder, state_dict=state)
        self._write_generation(folder)
        for file in folder.glob("*.safetensors"):
            as_open_as_folder(file)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def _require_fitting(model: "PreTrainedModel", weights: dict[str, Tensor]) -> None:
    """Compare names and shapes; of a tied weight one name is enough."""
    own, tied = model.state_dict(), getattr(model, "all_tied_weights_keys", {})
    linked = {*tied.keys(), *tied.values()}
    faults = [f"{name} is missing" for name in sorted(own.keys() - weights.keys() - linked)]
    faults += [f"{name} is not in the model" for name in sorted(weights.keys() - own.keys())]
    faults += [
        f"{name} has shape {tuple(weights[name].shape)}, expected {tuple(own[name].shape)}"
        for name in sorted(own.keys() & weights.keys())
        if own[name].shape != weights[name].shape
    ]
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ModelError(f"the weights are not those of this {type(model).__name__}: {'; '.join(faults[:3])}{more}")


def _in_type(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    found = tensor.to(dtype)
    if dtype == torch.float16 and not found.isfinite().all() and tensor.isfinite().all():
        raise ModelError(
            f"{name}: got values up to {tensor.abs().max():g}, fp16 holds up to 65504; export with --dtype fp32"
        )
    return found
