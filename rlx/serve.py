"""Serve a trained policy at an address that speaks OpenAI's protocol: `python -m rlx.serve RUN | CHECKPOINT | FOLDER [options] [key=value ...]`."""

import argparse
import errno
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from rlx.checkpoint.role import read_weights
from rlx.config.compose.command_line import compose
from rlx.config.forecast.decoders import positions_of
from rlx.environments.chat import Chat
from rlx.environments.service import ServedAddress, Service
from rlx.errors import ExplainedError, wrapped
from rlx.models.loading import generation_of, load_model, load_tokenizer
from rlx.program import program
from rlx.rollout.engines import EngineProcess, start_engines
from rlx.rollout.protocol import EngineError, Sampling
from rlx.rollout.sampler import build_rollout, sampler_dtype, stop_tokens
from rlx.trainer.finished import policies_at

KEY = "RLX_API_KEY"
LONGEST = 8192  # tokens of a context that no run and no option gives


class ServeError(ExplainedError, ValueError):
    """The policy cannot be served as asked."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns 0; 1 if the sampler failed; 2 for faults."""
    parser = argparse.ArgumentParser(
        prog=program("serve"),
        description="Serve a trained policy to clients of OpenAI's API.",
        epilog="key=value: of the sampler, such as actor_rollout_ref.rollout.name=vllm",
    )
    parser.add_argument("policy", help="a run, a .../global_step_N, or a Hugging Face folder")
    parser.add_argument("given", nargs="*", metavar="key=value", help="settings in place of the run's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--name", help="of the model, for clients (default: the folder's)")
    parser.add_argument("--api-key", help=f"that clients send (default: ${KEY}, or a random one, which is printed)")
    parser.add_argument(
        "--context", type=int, help="longest prompt and answer together, in tokens (default: the run's)"
    )
    chosen = parser.parse_intermixed_args(arguments)
    logging.basicConfig(format="! %(message)s", level=logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as until_the_end:
            service, url, told = _start(chosen, until_the_end)
            print(told, flush=True)
            try:
                service.run()
            except KeyboardInterrupt:
                print(f"\n{url} is closed")
    except KeyboardInterrupt:
        return 130
    except (ExplainedError, ValueError, ImportError, OSError) as error:
        print(wrapped(f"{program('serve')}: {error}"), file=sys.stderr)
        return 2
    except (EngineError, RuntimeError) as error:
        print(f"{program('serve')}: {error}", file=sys.stderr)
        return 1
    return 0


def _start(chosen: argparse.Namespace, until_the_end: ExitStack) -> tuple[Service, str, str]:
    """Return what serves, its address, and what to tell the user. Raises ServeError and the errors of what it loads."""
    key = own = chosen.api_key or os.environ.get(KEY) or None
    if own is None:
        key = f"rlx-{secrets.token_urlsafe(24)}"
    elif not own.isascii() or own != own.strip() or not own.isprintable():
        raise ServeError(
            f"--api-key or {KEY}: got blanks around it or letters that no header holds, expected plain ASCII"
        )
    _require_free(chosen.host, chosen.port)
    policy = policies_at(chosen.policy)[0]._replace(hidden=())  # of rewards and trackers, which it does without
    config = compose(policy.with_given(chosen.given)).config
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if policy.checkpoint is not None:  # its weights are those of the whole model
        model = replace(model, path=str(policy.checkpoint / "actor" / "card"), lora_rank=0, quantization=None)
    if (size := rollout.tensor_model_parallel_size) > 1:
        raise ServeError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size: got {size}, expected 1, because rlx serves on one GPU; set it to 1, or "
            f"export the policy and `vllm serve FOLDER --tensor-parallel-size {size}`"
        )
    longest, of_run = positions_of(model), config.data.max_prompt_length + config.data.max_response_length
    context = of_run if policy.checkpoint is not None else min(longest or LONGEST, LONGEST)
    context = context if chosen.context is None else chosen.context
    if not 1 < context <= (longest or context):
        raise ServeError(f"--context: got {context} tokens, expected 2 to {longest or 'the most that the model knows'}")
    tokenizer = load_tokenizer(model.path or "", model.trust_remote_code)
    found = None if config.trainer.device == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if found is None else torch.device(found.type, 0)
    print(f"loading {policy.folder} for {rollout.name} on {device.type}", flush=True)
    engines = start_engines(rollout) or ([EngineProcess("engine")] if rollout.name == "vllm" else [])
    sampler = build_rollout(rollout, model, device, context, config.trainer.seed, tokenizer, engines)
    until_the_end.callback(sampler.close)
    if policy.checkpoint is None:
        weights = load_model(model, "lm", sampler_dtype(rollout, device)).state_dict()
    else:
        weights = read_weights(policy.checkpoint / "actor")
    sampler.update_weights(weights.items(), version=policy.step)
    name = chosen.name or policy.folder.name
    settings = {"port": chosen.port, "key": key, "name": name}
    address = until_the_end.enter_context(ServedAddress(chosen.host, settings, rollout.multi_turn.format))
    stops = stop_tokens(tokenizer, generation_of(model.path)[0])
    usual = Sampling(context, rollout.temperature, rollout.top_p, rollout.top_k or -1, stops, stop=rollout.stop)
    service = Service(sampler, address, Chat(tokenizer), usual, context, takes_texts=rollout.name == "hf")
    told = f"serving {name} with {context} tokens of context; Ctrl-C ends it\n"
    shown = key if own is None else "…" if chosen.api_key else f"${KEY}"
    return service, address.url, f"{told}export OPENAI_BASE_URL={address.url} OPENAI_API_KEY={shown}"


def _require_free(host: str, port: int) -> None:
    """Raise ServeError if nothing can listen there, before a model is loaded."""
    try:
        socket.create_server((host, port)).close()
    except (OSError, OverflowError) as error:
        got = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0].rstrip(".")
        is_taken = not isinstance(error, OSError) or error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = (
            "--port to another one, or 0 for any that is free" if is_taken else "--host to an address of this machine"
        )
        raise ServeError(f"{host}:{port}: got {got}, expected a free port of this machine; set {remedy}") from None


if __name__ == "__main__":
    sys.exit(main())
