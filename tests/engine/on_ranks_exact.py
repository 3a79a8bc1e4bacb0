"""What test_exact.py runs: updates with operations that sampler and trainer share, here torch's."""

from pathlib import Path

from on_ranks_one_pass import ACTOR, Workers, configured, samples
from rank_tools import ROWS, Gradients, R, build, make_batch, norms_in_fp64, own_share, policy, weights_of

from rlx.config.schema import ActivationOffloadConfig, RolloutCorrectionConfig
from rlx.data.batch import SEQUENCE
from rlx.engine.objectives import PolicyObjective
from rlx.models.exact import TORCH, UnequalLogProbs
from rlx.trainer.learning import Learner
from rlx.trainer.progress import Progress
from rlx.trainer.run_state import Run


def updates(folder: str, save: str | None, sizes: list[int]) -> list:
    """Return log-probs, metrics, gradients and weights with transformers' operations and with shared ones."""
    found, options = [], {"enable_gradient_checkpointing": save == "attention", "use_shared_prefix": False}
    if save is not None:
        options |= {"enable_activation_offload": True, "activation_offload": ActivationOffloadConfig(save, min_bytes=0)}
    objective = PolicyObjective(policy().actor, 0.7, R, RolloutCorrectionConfig(bypass_mode=True))
    with norms_in_fp64():
        for kernels in (None, TORCH):
            engine = build(folder, model=options, kernels=kernels)
            gradients, batch = Gradients(engine), own_share(make_batch(), sizes)
            sampled = engine.log_probs(batch, ROWS, 0.7)["log_probs"]
            metrics = engine.update(batch.with_(old_log_probs=sampled), ROWS, objective)
            found.append((sampled, metrics, gradients.seen[0], weights_of(engine)))
    return found


def step(folder: str, changed: float) -> tuple[list[str], dict, str]:
    """Return the calls and metrics of a step whose samples have the trainer's own log-probs, one of them changed; and the error."""
    options = {f"{ACTOR}.ppo_mini_batch_size": 2, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}
    options |= {"actor_rollout_ref.rollout.exact": True, "trainer.balance_batch": False}
    config = configured(folder, options | {"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1})
    workers, progress = Workers(config, 1), Progress(2, console=False)
    learner = Learner(Run(config, workers, None, None, None, None, None, Path(), progress, None))
    batch = samples(forks=False)
    sampled = workers.split("actor", "log_probs", batch.select(*SEQUENCE))["old_log_probs"]
    sampled[1, 1] += changed
    workers.calls.clear()
    batch, metrics, error = batch.with_(rollout_log_probs=sampled, old_log_probs=sampled), {}, ""
    with progress.step(1):
        batch, _ = learner.advantages(learner.log_probs(batch, 1))
        try:
            metrics = learner.update(batch, 1)[1]
        except UnequalLogProbs as unequal:
            error = str(unequal)
    return [name for name, _ in workers.calls], metrics, error
