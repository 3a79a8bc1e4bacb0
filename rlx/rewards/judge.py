"""Score a response by a judge: a language model at an address that speaks OpenAI's protocol. It lives in a scoring process."""

import importlib
import inspect
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlx.errors import did_you_mean
from rlx.processes.calls import in_short
from rlx.user_code import UserCodeError

PLACES = ("prompt", "response", "ground_truth", "data_source")
"""What a template may name in braces."""
PLACE = re.compile(r"\{(\w+)\}")
SCORE = re.compile(
    r"\bscore\b[\"*\s]*[:=][\"*\s]*(-?\d+(?:\.\d+)?)(?![\w.,]*\d|[\"* \t]*(?:[-\u2013\u2014]|to)[\"* \t]*\d)",
    re.IGNORECASE,
)
"""A range such as 0-10 is none."""
RETRIES = 5
"""Of a request that the server refuses for now, with pauses up to 8 s; `reward.timeout_s` limits them together."""


class JudgeError(Exception):
    """A judge gave no score."""


def prepare(key: str, template: str, api_key_var: str | None, request: dict[str, Any]) -> None:
    """Load what the calls of the part `key` need, once. Raises UserCodeError."""
    if find_spec("openai") is None:
        raise UserCodeError(f"{key}.model: a judge needs openai; pip install 'rlx[agents]'")
    if api_key_var is not None and not os.environ.get(api_key_var):
        named = api_key_var if re.fullmatch(r"[A-Z][A-Z0-9_]*", api_key_var) else "a text that is no such name"
        raise UserCodeError(
            f"{key}.api_key_var: got {named}, expected an environment variable that holds the API key; set it where rlx starts"
        )
    try:
        text = _text(template)
    except (OSError, UnicodeDecodeError) as fault:
        raise UserCodeError(f"{key}.template: got {template!r}, expected a UTF-8 text file ({fault})") from None
    places = PLACE.findall(text)
    for name in places:
        if name not in PLACES and (near := did_you_mean(name, PLACES, "")):
            raise UserCodeError(f"{key}.template: {template} has {{{name}}}, expected one of {PLACES}; {near}")
    if "response" not in places:
        raise UserCodeError(f"{key}.template: {template} has no {{response}}, so all responses get one score; add it")
    # Now: the import takes a second, which would count as the first call's
    chats = importlib.import_module("openai.resources.chat")
    own = {"self", "model", "messages", "stream"}
    fields = inspect.signature(chats.AsyncCompletions.create).parameters.keys() - own
    if wrong := sorted(request.keys() - fields):
        remedy = "put fields that only its server knows into extra_body"
        raise UserCodeError(
            f"{key}.request: got {', '.join(wrong)}, expected fields of OpenAI's chat completions; {remedy}"
        )


async def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any, prompt: Any, part: dict[str, Any]
) -> float:
    """Return the number behind the last `Score:` of the judge's answer, divided by `scale`. Raises JudgeError if there is none."""
    import openai

    model, scale, variable = part["model"], part["scale"], part["api_key_var"]
    values = dict(zip(PLACES, (_written(prompt), solution_str, ground_truth, data_source), strict=True))
    question = PLACE.sub(lambda place: str(values.get(place[1], place[0])), _text(part["template"]))
    api_key, messages = os.environ[variable] if variable else "none", [{"role": "user", "content": question}]
    try:
        chats = _client(part["base_url"], api_key).chat.completions
        answer = await chats.create(model=model, messages=messages, **part["request"])
    except openai.OpenAIError as fault:
        what = f"{model} gave no answer ({type(fault).__name__}: {fault})"
        raise JudgeError(what.replace(api_key, "***") if variable else what) from None
    text = (answer.choices[0].message.content if answer.choices else None) or ""
    if answer.choices and answer.choices[0].finish_reason == "length":
        expected = "expected a whole answer; raise max_tokens in request"
        raise JudgeError(f"{model} was cut after {in_short(text)}, {expected}")
    found = SCORE.findall(text)
    if not found or not 0 <= float(found[-1]) <= scale:
        expected = f"expected `Score: ` and a number from 0 to {scale:g} in it"
        raise JudgeError(f"{model} answered {in_short(text)}, {expected}")
    return float(found[-1]) / scale


@cache
def _client(base_url: str, api_key: str) -> Any:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=RETRIES)


@cache
def _text(template: str) -> str:
    return Path(template).expanduser().read_text(encoding="utf-8")


def _written(prompt: Any) -> str:
    """Return a prompt as text: that of a single message, else each message behind its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{each['role']}: {each['content']}" for each in prompt)
