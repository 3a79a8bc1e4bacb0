"""Load tokenizers and models from Hugging Face folders or hub names."""

import copy
import importlib
import inspect
import json
import logging
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rlx.config.schema import MODEL_JSON_FILES, TOKENIZER_FILES, ModelConfig
from rlx.errors import ExplainedError, did_you_mean

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


# transformers takes seconds to import. The driver only needs a tokenizer, and planning tools need nothing of it.

logger = logging.getLogger(__name__)

NOT_OVERRIDABLE = {
    "dtype": "set fsdp_config.model_dtype instead",
    "torch_dtype": "set fsdp_config.model_dtype instead",
    "attn_implementation": "set model.attn_implementation instead",
    "num_labels": "a value or reward model has one output",
    "use_cache": "training keeps no key/value cache",
}
RANDOMNESS = re.compile("drop|noise")
FRESH_HEAD_SCALE = 0.01
ROWS_AT_ONCE = 8192  # of weights that are compared
Head = Literal["lm", "value", "score"]
"""The output of a model: next-token logits, one number per token, or one number per sequence."""


class ModelError(ExplainedError, ValueError):
    """A model, its tokenizer or its adapters cannot be loaded as configured."""


NO_CRITIC = "an algorithm.adv_estimator without critic, such as grpo or reinforce_plus_plus"
OTHER_CRITIC = f"set critic.model.path to a model of another type with the same tokenizer, or {NO_CRITIC}"


def ensure_value_class(config: "PreTrainedConfig") -> None:
    """Register a class for an architecture with `AutoModelForTokenClassification`, in this process.

    Most decoders of transformers have none. The new class is the base model with a linear layer, made from transformers' own mixin
    with the same names of weights. Raises ModelError if the model is an encoder with a decoder, or its type has no base model.
    """
    from transformers import (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        MODEL_MAPPING,
        AutoModelForCausalLM,
        AutoModelForTokenClassification,
        PreTrainedModel,
    )
    from transformers.modeling_layers import GenericForTokenClassification

    kind = type(config)
    auto_map = getattr(config, "auto_map", None) or {}
    if kind in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING or "AutoModelForTokenClassification" in auto_map:
        return
    # The layer's width is read from hidden_size, which BLT's config lacks.
    if config.is_encoder_decoder or kind not in MODEL_MAPPING or not hasattr(config.get_text_config(), "hidden_size"):
        raise ModelError(
            f"critic: got a model of type {config.model_type}, expected a decoder with a base model in transformers and a "
            f"hidden_size in its config; {OTHER_CRITIC}"
        )
    base = MODEL_MAPPING[kind]
    base = base[0] if isinstance(base, tuple | list) else base
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    # The language model's base model, whose weights the critic loads; BART, for example, has none.
    backbone = next((name for name, child in model.named_children() if isinstance(child, base)), None)
    if backbone is None:
        raise ModelError(
            f"critic: got a {type(model).__name__}, which has no {base.__name__} inside, expected a language model on a base "
            f"model with the same weights; {OTHER_CRITIC}"
        )
    # The base class of all heads of the architecture: names of weights, attention kernels, the classes that FSDP shards.
    parent = next(ancestor for ancestor in base.__mro__[1:] if issubclass(ancestor, PreTrainedModel))
    name = f"{base.__name__.removesuffix('Model')}ForTokenClassification"
    # From another module transformers would not set buffers of layers that the base model sets, such as Falcon-H1's mup_vector.
    own = {"config_class": kind, "base_model_prefix": backbone, "__module__": base.__module__}
    made = type(name, (GenericForTokenClassification, parent), own)
    # exist_ok: without it transformers silently ignores a class for one of its own architectures.
    AutoModelForTokenClassification.register(kind, made, exist_ok=True)
    if kind not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"critic: this version of transformers has no class with a number per token for {config.model_type}, and takes "
            f"none for its own types; install a newer one (5.19 does), or set {NO_CRITIC}"
        )


def load_tokenizer(path: str, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a folder or hub name, with a pad token: its own, else its EOS token.

    Raises ModelError if there is no tokenizer, or it has no EOS token.
    """
    from transformers import AutoTokenizer

    source = _source(path)
    folder = Path(source)
    # From a folder without a tokenizer transformers would make one with a single word.
    if folder.is_dir() and not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"tokenizer: {source} has none of {', '.join(TOKENIZER_FILES)}; save the tokenizer in the model's folder"
        )
    with explained(f"the tokenizer of {path}"):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"tokenizer of {path}: it has no EOS token, so no response could end; set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(config: ModelConfig) -> "PreTrainedConfig":
    """Return the model's config.json with `override_config` applied, without dropout, noise and key/value cache.

    Every rate whose name contains `drop` or `noise`, such as `router_jitter_noise`, becomes 0 unless overridden: with them PPO's ratio
    would be noise. Raises ModelError if nothing can be loaded, or the config lacks or rejects an override.
    """
    from transformers import AutoConfig

    source = _source(config.path)
    with explained(f"the config of {config.path}"):
        loaded = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    _drop_nothing(loaded)
    loaded.use_cache = False
    for name, value in config.override_config.items():
        _override(loaded, name, value, f"model.override_config.{name}")
    return loaded


def generation_of(path: str | None) -> "tuple[GenerationConfig | None, str]":
    """Return a model's generation_config.json unchanged, None without one, and why transformers rejects it, if it does.

    Raises ModelError if it cannot be read.
    """
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    source = _source(path)
    try:
        return GenerationConfig.from_pretrained(source), ""
    except OSError:
        return None, ""
    except Exception as error:
        found = cached_file(source, "generation_config.json")
        assert found is not None, "it was read before"
        kept = GenerationConfig()
        with explained(f"the generation_config.json of {path}"):
            # Unlike its constructor, without a look at the values
            vars(kept).update(json.loads(Path(found).read_bytes()))
        return kept, " ".join(str(error).split())


def _drop_nothing(loaded: "PreTrainedConfig") -> None:
    """Set the rates of dropout and noise to 0, also in the parts of a configuration, such as `attn_config`."""
    for name, value in list(vars(loaded).items()):
        if hasattr(value, "to_dict"):
            _drop_nothing(value)
        elif RANDOMNESS.search(name) and isinstance(value, float):
            setattr(loaded, name, 0.0)


def load_model(config: ModelConfig, head: Head, dtype: torch.dtype, seed: int = 0) -> "PreTrainedModel":
    """Load a model on CPU in eval mode. All weights come from the checkpoint, except a value head that it lacks.

    Args:
        config: reads path, trust_remote_code, override_config, attn_implementation, experts_implementation.
        head: `lm`: logits (B, T, V). `value`: (B, T, 1). `score`: (B, 1).
        dtype: of all parameters.
        seed: of a fresh value head, whose weights are then the same on every machine. The caller's random state is unchanged.

    Raises ModelError if the model or its kernel does not exist, or the checkpoint lacks weights or has other shapes.
    """
    from transformers import GenerationConfig

    auto_class, loaded_config = class_and_config(config, head)
    generation, why_rejected = generation_of(config.path) if head == "lm" else (None, "")
    if why_rejected:
        logger.warning(
            "generation_config.json of %s: transformers rejects it (%s). Checkpoints and exports keep it unchanged; correct it "
            "before you load them with transformers",
            config.path,
            why_rejected,
        )
    with (
        explained(f"{config.path} as {head} model"),
        torch.random.fork_rng(devices=[]),
        _load_report(show=head != "value"),
    ):
        model, report = auto_class.from_pretrained(
            _source(config.path),
            config=loaded_config,
            generation_config=GenerationConfig() if why_rejected else None,
            ignore_mismatched_sizes=True,  # reported below, with the shapes
            output_loading_info=True,
            **_options(config, dtype),
        )
    if why_rejected:
        model.generation_config = generation
    _check_report(config.path, model, report, head)
    if head == "value" and report["missing_keys"]:
        _init_head(model, report["missing_keys"], seed)
    skeleton = load_skeleton(config, head, dtype)
    # transformers gives up ties of weights that differ in the checkpoint
    if untied := sorted(skeleton.all_tied_weights_keys.keys() - model.all_tied_weights_keys.keys()):
        raise ModelError(f"{config.path}: {_unlike(untied[0], skeleton.all_tied_weights_keys[untied[0]])}")
    # Loading forgets which parameters the class does not train, such as AFMoE's expert biases.
    flags = {name: parameter.requires_grad for name, parameter in skeleton.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(flags.get(name, True))
    return model.eval()


def load_skeleton(config: ModelConfig, head: Head, dtype: torch.dtype) -> "PreTrainedModel":
    """Return the model of `load_model` on the meta device: shapes without weights, for processes that receive them later."""
    generation = generation_of(config.path)[0] if head == "lm" else None
    auto_class, loaded_config = class_and_config(config, head)
    with explained(f"{config.path} as {head} model"), torch.device("meta"):
        model = auto_class.from_config(loaded_config, **_options(config, dtype))
    if generation is not None:  # else transformers has made one from config.json
        model.generation_config = generation
    return model.eval()


def _options(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    # Without a kernel transformers chooses one for experts.
    eager = "eager" if config.experts_implementation is None and dtype == torch.float64 else None
    return {
        "dtype": dtype,
        "attn_implementation": config.attn_implementation,
        "experts_implementation": config.experts_implementation or eager,
        "trust_remote_code": config.trust_remote_code,
    }


def fault_of_ties(config: ModelConfig, skeleton: "PreTrainedModel") -> str | None:
    """Return the fault of a folder whose config ties weights that differ in its safetensors files, or None.

    `load_model` rejects such a model too, wherever its weights are. This only reads weights that the config ties.
    """
    from safetensors import safe_open

    folder = Path(_source(config.path))
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_bytes())["weight_map"].values() if index.exists() else ["model.safetensors"]
    files = [folder / name for name in sorted(set(names)) if (folder / name).exists()]
    ties = skeleton.all_tied_weights_keys
    with ExitStack() as opened, explained(f"the weights of {config.path}"):
        tensors: dict[str, Any] = {}
        for file in files if ties else ():
            found = opened.enter_context(safe_open(file, "pt"))
            tensors |= {name: found.get_slice(name) for name in {*ties, *ties.values()}.intersection(found.keys())}
        for target, source in ties.items():
            if target in tensors and source in tensors:
                one, other = tensors[target], tensors[source]
                parts = (slice(start, start + ROWS_AT_ONCE) for start in range(0, one.get_shape()[0], ROWS_AT_ONCE))
                same_shape = one.get_shape() == other.get_shape()
                if not same_shape or not all(torch.equal(one[part], other[part]) for part in parts):
                    return _unlike(target, source)
    return None


def _unlike(target: str, source: str) -> str:
    return (
        f"override_config.tie_word_embeddings: the config ties {target} to {source}, but they differ in the checkpoint, expected a "
        "config without the tie; set override_config.tie_word_embeddings=False to use both as they are"
    )


def class_and_config(config: ModelConfig, head: Head) -> tuple[Any, "PreTrainedConfig"]:
    """Return the auto class that makes the model, and its config; reads no weights. Raises ModelError if the model has no such head."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

    loaded = load_config(config)
    if head == "value":
        loaded.num_labels = 1
        loaded.classifier_dropout = 0.0
        try:
            ensure_value_class(loaded)
        except ModelError as error:
            raise ModelError(f"{config.path}: {error}") from None
    if head == "score":
        if loaded.num_labels != 1:
            raise ModelError(
                f"{config.path}: got a model of {loaded.architectures} with {loaded.num_labels} labels, expected one for sequence "
                "classification with one label; a reward model gives one score"
            )
        if loaded.get_text_config().pad_token_id is None:
            raise ModelError(
                f"{config.path}: its config has no pad_token_id, so it would not find the end of a padded sequence; set it in "
                "override_config to the id of its training"
            )
    classes = {
        "lm": AutoModelForCausalLM,
        "value": AutoModelForTokenClassification,
        "score": AutoModelForSequenceClassification,
    }
    return classes[head], loaded


def rope_by_length(config: "PreTrainedConfig") -> str | None:
    """Return the rope_type of a text model if its frequencies depend on the longest sequence of a batch, else None."""
    given = getattr(config, "rope_parameters", None) or {}
    # Models with layers of several types have rope parameters per type.
    kinds = (str(each.get("rope_type")) for each in (given, *given.values()) if isinstance(each, dict))
    return next((kind for kind in kinds if "dynamic" in kind or kind == "longrope"), None)


def why_not_shared(size: int, processes: int, config: "PreTrainedConfig") -> str | None:
    """Return why `size` of all processes cannot share each sequence (Ulysses) of a text model, or None if they can."""
    if kind := rope_by_length(config):
        return (
            f"ulysses_sequence_parallel_size: got {size} for a model with rope_type {kind}, expected 1: its frequencies depend "
            "on the longest sequence, of which each process has only a part. Set ulysses_sequence_parallel_size=1"
        )
    if (heads := getattr(config, "num_attention_heads", None)) is None:
        return (
            f"ulysses_sequence_parallel_size: got {size} for a {config.model_type} model, whose config has no "
            "num_attention_heads, expected 1: processes share the heads of attention. Set ulysses_sequence_parallel_size=1"
        )
    common = math.gcd(processes, heads)
    if common % size == 0:
        return None
    allowed = " or ".join(str(number) for number in range(1, common + 1) if common % number == 0)
    return (
        f"ulysses_sequence_parallel_size: got {size} with {processes} processes and {heads} attention heads, expected a "
        f"divisor of both numbers: set it to {allowed}"
    )


def _source(path: str | None) -> str:
    """Return a path or hub name as transformers takes it; raise ModelError for anything else."""
    if path is None or path.startswith("builtin:"):
        raise ModelError(
            f"model.path: got {path}, expected a Hugging Face folder or hub name; make and save `builtin:tiny` first "
            "(rlx.models.tiny)"
        )
    folder = Path(path).expanduser()
    looks_local = path.startswith(("/", "~", ".")) or path.count("/") > 1
    if looks_local and not folder.is_dir():
        raise ModelError(
            f"model.path: got {folder}, which is not a folder; expected a folder with config.json and weights, or a hub name"
        )
    if not folder.is_dir():
        return path
    for file in (folder / name for name in MODEL_JSON_FILES):  # of which transformers would name no file, or no line
        try:
            found = json.loads(file.read_bytes()) if file.exists() else {}
        except (OSError, ValueError, RecursionError) as fault:
            raise ModelError(f"{file}: cannot be read as JSON ({fault}); restore the file") from None
        if not isinstance(found, dict):
            raise ModelError(f"{file}: got a JSON {type(found).__name__}, expected an object; restore the file")
    return str(folder)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn any error of transformers into a ModelError that names `what` is being loaded."""
    try:
        yield
    except Exception as error:
        # These errors explain themselves without a traceback.
        cause = None if isinstance(error, ImportError | OSError | ValueError) else error
        reason = " ".join(str(error).split())
        raise ModelError(f"could not load {what}: {type(error).__name__}: {reason}") from cause


def _override(loaded: "PreTrainedConfig", name: str, value: Any, key: str) -> None:
    from transformers import PreTrainedConfig

    if name in NOT_OVERRIDABLE:
        raise ModelError(f"{key}: cannot be overridden; {NOT_OVERRIDABLE[name]}")
    known = {**loaded.to_dict(), **loaded.attribute_map}
    if name not in known:
        hint = did_you_mean(name, known, f"known: {', '.join(sorted(known))}", most=3)
        raise ModelError(f"{key}: {type(loaded).__name__} has no such key; {hint}")
    part = getattr(loaded, name)
    if isinstance(part, PreTrainedConfig) and isinstance(value, dict):
        for inner, inner_value in value.items():
            _override(part, inner, inner_value, f"{key}.{inner}")
        return
    try:
        setattr(loaded, name, value)
    except Exception as error:
        raise ModelError(f"{key}: got {value!r}: {error}") from error


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bars over weights and files."""
    from transformers.utils import logging as hf_logging

    had_bar = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bar:
            hf_logging.enable_progress_bar()


@contextmanager
def _load_report(show: bool) -> Iterator[None]:
    """Hide transformers' progress bar and, unless `show`, its table of missing and unexpected weights.

    For a value model the table only shows an unused language-model head and a fresh value head, both intended.
    """

    def is_other(record: logging.LogRecord) -> bool:
        return show or "LOAD REPORT" not in record.getMessage()

    hf_logger = logging.getLogger("transformers.modeling_utils")
    hf_logger.addFilter(is_other)
    try:
        with without_progress_bar():
            yield
    finally:
        hf_logger.removeFilter(is_other)


def _check_report(path: str | None, model: "PreTrainedModel", report: dict[str, Any], head: str) -> None:
    """Reject a model with weights that are not from the checkpoint; warn of weights that it does not use."""
    backbone = f"{model.base_model_prefix}."
    if report["mismatched_keys"]:
        wrong = [f"{n}: {tuple(got)} instead of {tuple(want)}" for n, got, want in sorted(report["mismatched_keys"])]
        raise ModelError(
            f"{path}: got weights of other shapes than the config has: {_some(wrong)}; check model.override_config"
        )
    if missing := sorted(k for k in report["missing_keys"] if head != "value" or k.startswith(backbone)):
        raise ModelError(
            f"{path}: the checkpoint lacks {_some(missing)} of {type(model).__name__}; is it a {head} model, and does "
            "model.override_config agree with it?"
        )
    if head == "value" and (unused := sorted(k for k in report["unexpected_keys"] if k.startswith(backbone))):
        logger.warning("%s: %s does not use the weights %s", path, type(model).__name__, _some(unused))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _init_head(model: nn.Module, names: set[str], seed: int) -> None:
    """Draw weights with deviation FRESH_HEAD_SCALE / sqrt(width); biases are 0.

    So first values are near 0, but not 0: the backbone learns from the first step.
    """
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(names):
        parameter = model.get_parameter(name)
        fresh = torch.zeros(parameter.shape)
        if parameter.dim() > 1:
            fresh.normal_(std=FRESH_HEAD_SCALE / parameter.shape[-1] ** 0.5, generator=generator)
        parameter.data.copy_(fresh)


# Not needed here, because log-probs are computed from hidden states in chunks.
LIGER_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


def apply_liger(model: "PreTrainedModel") -> None:
    """Replace modules of a model by liger-kernel's fused kernels, in the whole process; weights and names stay.

    Raises ModelError if liger-kernel is missing or does not know the architecture.
    """
    try:
        found, package = version("liger-kernel"), importlib.import_module("liger_kernel.transformers")
    except (ImportError, PackageNotFoundError) as error:
        raise ModelError(
            f"use_liger: liger-kernel cannot be imported ({error}); `pip install liger-kernel`, or set model.use_liger=False"
        ) from error
    kind = model.config.model_type
    apply = getattr(package, f"apply_liger_kernel_to_{kind}", None)
    if apply is None:
        raise ModelError(
            f"use_liger: liger-kernel {found} has no kernels for models of type {kind}; set model.use_liger=False"
        )
    known = inspect.signature(apply).parameters
    apply(model=model, **{name: False for name in LIGER_LOSSES if name in known})
