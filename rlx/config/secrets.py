"""Hide values that may be secrets, in everything that is printed or written."""

import re
from difflib import get_close_matches
from typing import Any

from rlx.config.schema.tree import LEAVES

HIDDEN = "***"
SECRET_WORDS = {
    *("key", "keys", "apikey", "token", "password", "passwd", "passphrase", "secret", "secrets", "credential"),
    *("credentials", "authorization", "cookie"),
}
HARMLESS_WORDS = {"prompt", "answer", "question", "image", "reward", "pad", "bos", "eos", "unk", "sep", "cls", "mask"}
"""With one of these in a name, or one like it, as in `prompt_key`, `anser_key` and `eos_token`, the value is no secret."""
ALIKE = 0.85  # of 1: a misspelt word, not another one
ENVIRONMENT = "env_vars"
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Whether a name says that its value is a secret: `api_key`, `HF_TOKEN`, `dbPassword`; but not `prompt_key`, `max_tokens`."""
    words = {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Za-z][a-z]*", name)}
    return bool(words & SECRET_WORDS) and not any(get_close_matches(word, HARMLESS_WORDS, 1, ALIKE) for word in words)


def without_secrets(value: Any) -> Any:
    """Return a copy of a tree of mappings and lists in which texts that may be secret are HIDDEN.

    These are the texts below a name that `is_secret`, all values of environment variables (`env_vars`) unless they only name
    a variable, as `${oc.env:NAME}` does, and passwords in URLs. Numbers are kept.
    """
    if isinstance(value, dict):
        return {name: _hidden(child) if _hides(str(name)) else without_secrets(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(child) for child in value]
    return _PASSWORD_IN_URL.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value


def override_without_secrets(text: str) -> str:
    """Return an override `key=value` for a message."""
    key, equals, value = text.partition("=")
    is_known = key in LEAVES and not isinstance(
        LEAVES[key].default, dict
    )  # rlx's own keys hold no secrets, only mappings may
    secret = equals and not is_known and any(_hides(name) for name in key.split("."))
    return f"{key}={HIDDEN if secret else without_secrets(value)}" if equals else text


def _hides(name: str) -> bool:
    return name == ENVIRONMENT or is_secret(name)


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _hidden(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(child) for child in value]
    only_a_name = isinstance(value, str) and (not value or re.fullmatch(r"\$\{oc\.env:\w+\}", value))
    return HIDDEN if isinstance(value, str) and not only_a_name else value
