"""The tables of cases beside this file, and command lines that several tests read."""

from functools import cache
from pathlib import Path
from string import Template
from typing import Any

import yaml

from rlx.config.compose.command_line import Composed, compose

ACTOR, ROLLOUT, REF, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref", "model"))
CORRECTION = "algorithm.rollout_correction"
GAE = "algorithm.adv_estimator=gae"
FORK = f"environment.name=guessing {ROLLOUT}.multi_turn.on_rewritten_history=fork"
ON_GPU = "trainer.n_gpus_per_node=1 trainer.device=cuda"
JUDGE = "reward_model.enable=True reward_model.model.path=org/judge"
PLACES = {
    **{"ACTOR": ACTOR, "ROLLOUT": ROLLOUT, "REF": REF, "MODEL": MODEL, "CORRECTION": CORRECTION, "GAE": GAE},
    **{"FORK": FORK, "ON_GPU": ON_GPU, "JUDGE": JUDGE, "FILE": __file__, "LONG": "r" * 125},
}


def cases(name: str) -> list[tuple[Any, ...]]:
    """Return the rows of `name`.yaml in the order of their columns."""
    text = Template(Path(__file__).with_name(f"{name}.yaml").read_text()).substitute(PLACES)
    return [tuple(row.values()) for row in yaml.safe_load(text)]


@cache
def composed(*overrides: str) -> Composed:
    return compose(overrides)
