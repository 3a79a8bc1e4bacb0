"""Find the shapes of a run's models before they are loaded, from each model's config.json."""

import json
import os
from pathlib import Path
from typing import Any

from rlx.config.faults import Fault
from rlx.config.schema import ModelConfig, PPOConfig, TinyModelConfig
from rlx.config.schema.roles import TINY, sharded_roles
from rlx.offload.plan.decoder import Decoder, read_decoder
from rlx.offload.plan.shapes import SHAPES, shape_named

ANSWER_S = 5.0  # for the hub to answer
TINY_VOCABULARY = 262  # bytes, ByT5's three special tokens, one token per chat role

Known = Decoder | str
"""A model's shape, or the reason why it is not known."""


def decoders(config: PPOConfig) -> dict[str, Known]:
    # The built-in critic has the policy's shape, whatever its own subtree says.
    policy = config.actor_rollout_ref.model
    models = {role.name: policy if role.model.path == TINY else role.model for role in sharded_roles(config)}
    return {name: decoder_of(model, has_head=name in ("actor", "ref")) for name, model in models.items()}


def decoder_of(model: ModelConfig, has_head: bool = True) -> Known:
    """Return the shape of the built-in model, of a model whose config.json is on this machine, or of a well-known one.

    Without `has_head` it ends in one number instead of a head over the vocabulary, and its few weights are not counted.
    """
    path = model.path or ""
    if path == TINY:
        return read_decoder(tiny_shape(model.tiny))
    file, known = config_file(path), shape_named(path)
    if file is None and known is None:
        return f"the config.json of {path} is not on this machine"
    try:
        keys = {**SHAPES[known or ""], **model.override_config} if file is None else _keys_of_text(file, model)
        found = read_decoder(keys)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # Loading the model reports the fault later; here only the forecast is missing.
        return f"{path}: {' '.join(str(error).split()) or type(error).__name__}"
    return found if has_head else found.without_head


def positions_of(model: ModelConfig) -> int | None:
    """Return the most positions of a model by its config.json, including stretched rotary embeddings; None if not known."""
    try:
        keys = keys_of(model)
        own = next((int(keys[name]) for name in ("max_position_embeddings", "n_positions") if keys.get(name)), None)
        rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
        if own is None or not rope.get("factor"):
            return own
        return max(own, int(rope["factor"] * (rope.get("original_max_position_embeddings") or own)))
    except (AttributeError, TypeError, ValueError):
        return None  # loading the model reports it


def fewest_positions(config: PPOConfig) -> int | None:
    """Return the most positions that all models of a run have; None if none is known."""
    models = {role.model.path: role.model for role in sharded_roles(config)}
    return min((known for model in models.values() if (known := positions_of(model)) is not None), default=None)


def keys_of(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of a model's config.json with the overrides, those of a text model inside beside them; empty if it is not here."""
    try:
        file = config_file(model.path or "")
        return {} if file is None else _keys_of_text(file, model)
    except (AttributeError, OSError, TypeError, ValueError):
        return {}  # loading the model reports it


def _keys_of_text(file: Path, model: ModelConfig) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(file.read_text())
    return {**whole, **whole.get("text_config", {}), **model.override_config}


def tiny_shape(tiny: TinyModelConfig) -> dict[str, Any]:
    own = {"head_dim": tiny.head_dim, "vocab_size": TINY_VOCABULARY, "tie_word_embeddings": True}
    return {**vars(tiny), "model_type": "qwen3", **own}


def fetch_configs(config: PPOConfig) -> list[Fault]:
    """Download the config.json of each hub model that is not on this machine, and return a fault for each that cannot be had.

    The run needs it anyway, but transformers would try for 80 s until it said so.
    """
    keys = {role.model.path or "": f"{role.model_key}.path" for role in reversed(sharded_roles(config))}
    patience_s, faults = max(ANSWER_S, float(os.environ.get("HF_HUB_ETAG_TIMEOUT", 0))), []
    for path, key in keys.items():  # the first key of a path
        if path == TINY or config_file(path) is not None or Path(path).expanduser().exists():
            continue
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import HFValidationError

        try:
            # The download alone would try for 20 s.
            get_hf_file_metadata(hf_hub_url(path, "config.json"), timeout=patience_s)
            hf_hub_download(path, "config.json")
        except HFValidationError:
            continue  # not a valid hub name; a rule rejects it
        except Exception as error:  # of the client's HTTP library, which is another in each version
            known, reason = shape_named(path), " ".join(str(error).split()) or type(error).__name__
            what = f"{key} is neither a folder nor a cached model, and the hub did not return its config.json"
            remedy = (
                "check the name, the network and, for a private model, `hf auth login`; or download it elsewhere "
                f"(`hf download {path} --local-dir DIR`) and set {key}=DIR. HF_HUB_ETAG_TIMEOUT=60 waits longer"
            ) + (f". The forecast takes the shape of {known}" if known else "")
            expected, got = "a folder with config.json, or a name of the hub", f"{key}={path} ({reason})"
            faults.append(Fault(f"{what} within {patience_s:g} s", got, expected, remedy, (key,)))
    return faults


def config_file(path: str) -> Path | None:
    """Return the path of a folder's or hub name's config.json on this machine; None if it is not here. Uses no network."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / "config.json" if (folder / "config.json").is_file() else None
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json")
    except ValueError:  # not the form of a hub name
        return None
    return Path(found) if isinstance(found, str) else None
