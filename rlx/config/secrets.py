"""Hide values that may be secrets, in everything that is printed or written."""

import re
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any

from rlx.config.schema.tree import LEAVES, section_in

HIDDEN = "***"
PASSWORD_WORDS = {
    *("apikey", "password", "passwd", "passphrase", "passcode", "pwd", "secret", "secrets", "credential"),
    *("credentials", "authorization", "auth", "bearer", "cookie"),
}
SECRET_WORDS = PASSWORD_WORDS | {"key", "keys", "token"}
HARMLESS_WORDS = {"prompt", "answer", "question", "image", "reward", "pad", "bos", "eos", "unk", "sep", "cls", "mask"}
"""With one of these in a name, or one like it, as in `prompt_key`, `anser_key` and `eos_token`, the value is no secret."""
ALIKE = 0.85  # of 1: a misspelt word, not another one
ENVIRONMENT = "env_vars"
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_NAMED = re.compile(r"""([A-Za-z_][\w.-]*)["']?\s*[:=]""")
_QUERY = re.compile(r"(?<=[?&])([\w-]+)=[^&\s'\"]+")
# Keys of services by their first letters
_TOKEN = re.compile(r"\b(?:sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abp]-|AKIA|Bearer\s+)[\w.-]{8,}")


def _words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Za-z][a-z]*", name)}


def is_secret(name: str) -> bool:
    """Whether a name says that its value is a secret: `api_key`, `HF_TOKEN`, `dbPassword`; but not `prompt_key`, `max_tokens`.

    Nor is `api_key_var`, the name of an environment variable.
    """
    words = _words(name.removesuffix("api_key_var"))
    return bool(words & SECRET_WORDS) and not any(get_close_matches(word, HARMLESS_WORDS, 1, ALIKE) for word in words)


def without_secrets(value: Any, name: str = "", is_hidden: bool = False) -> Any:
    """Return a copy of a tree of mappings and lists in which values that may be secret are HIDDEN.

    These are texts below a name that `is_secret`, numbers below one like `password`, all values of environment variables
    (`env_vars`) unless they only name a variable, as `${oc.env:NAME}` does, passwords in URLs, and keys of known services.
    `name` is the value's own, and `is_hidden` says that it is below one that hides it.
    """
    if is_dataclass(value) and not isinstance(value, type):  # of a list of them: what differs from its defaults
        usual = type(value)()
        value = {name: found for name, found in vars(value).items() if found != getattr(usual, name)}
    if isinstance(value, dict):
        return {key: without_secrets(child, str(key), is_hidden or _hides(str(key))) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(child, name, is_hidden) for child in value]
    if not isinstance(value, str):
        is_number = is_hidden and isinstance(value, int | float) and not isinstance(value, bool)
        return HIDDEN if is_number and (name == ENVIRONMENT or _words(name) & PASSWORD_WORDS) else value
    if is_hidden:
        return value if not value or re.fullmatch(r"\$\{oc\.env:\w+\}", value) else HIDDEN
    text = _TOKEN.sub(HIDDEN, _PASSWORD_IN_URL.sub(f"{HIDDEN}@", value))
    return _QUERY.sub(lambda found: f"{found[1]}={HIDDEN}" if _hides(found[1]) else found[0], text)


def override_without_secrets(text: str) -> str:
    """Return an override `key=value` for a message, also one that cannot be read: its end is hidden from a secret's name on."""
    key, equals, value = text.partition("=")
    if not equals:
        return _cut(text)
    # rlx's own keys hold no secrets, only mappings may
    leaf = LEAVES.get(key.lstrip("+"))
    if leaf is not None and not isinstance(leaf.default, dict) and section_in(leaf.hint) is None:
        return f"{key}={without_secrets(value)}"
    if any(_hides(name) for name in key.split(".")):
        return f"{key}={HIDDEN}"
    return f"{key}={_cut(value)}"


def _cut(text: str) -> str:
    for found in _NAMED.finditer(text):
        if any(_hides(name) for name in found[1].split(".")):
            return f"{without_secrets(text[: found.end()])} {HIDDEN}"
    return str(without_secrets(text))


def _hides(name: str) -> bool:
    return name == ENVIRONMENT or is_secret(name)
