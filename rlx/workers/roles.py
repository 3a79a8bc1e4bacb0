"""The roles of a worker: thin adapters from the configuration to engine and rollout.

All ranks call each method together. A method with a batch gets the rank's share of the rows.
"""

import logging
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from rlx.config.schema import ActorConfig, CriticConfig, PPOConfig
from rlx.config.schema.roles import (
    ModelRole,
    actor_role,
    asks_for_experts,
    critic_role,
    has_environment,
    log_prob_size,
    reference_role,
    reward_role,
)
from rlx.data.batch import Batch
from rlx.engine.engine import Engine
from rlx.engine.experts import ExpertOptions
from rlx.engine.fsdp_units import gathered
from rlx.engine.micro_batches import MicroBatchRule
from rlx.engine.objectives import Objective, PolicyObjective, ValueObjective
from rlx.environments.role import ConversationSampler
from rlx.errors import storing
from rlx.identity import machine_identity
from rlx.models.exact import require_equal
from rlx.models.loading import generation_of, load_config
from rlx.models.lora import adapters_off
from rlx.rollout.engines import EngineProcess
from rlx.rollout.protocol import EngineError, Sampling, joined_loads
from rlx.rollout.sampler import (
    ChangeCheck,
    build_rollout,
    continue_batch,
    generate_batch,
    kernels_of_sampler,
    sampler_dtype,
    stop_tokens,
)
from rlx.scratch import scratch_folder
from rlx.workers.weight_link import WeightLink

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

ENGINE_SILENCE_SHARE = 0.8  # of `trainer.hang_timeout_s`: then a hung engine is restarted before the run counts as hung
logger = logging.getLogger(__name__)

Purpose = Literal["train", "val", "greedy"]
"""Training, validation, or the greedy responses that ReMax compares training responses with."""


class EngineRole:
    """A role with a model of its own; further options are the engine's."""

    def __init__(self, role: ModelRole, device: torch.device, **options: Any):
        own = {"name": role.name, "head": role.head, "sequence_parallel": role.sequence_parallel_size, **options}
        self.engine = Engine(role.model, role.fsdp, strategy=role.strategy, device=device, **own)
        self._rule = MicroBatchRule(*role.micro)

    def rest(self, parameters: bool = True) -> None:
        """Free device memory as far as the configuration asks for it; the next method takes it again.

        Without `parameters` these stay on the device.
        """
        self.engine.memory.to_host(parameters)


class TrainedRole(EngineRole):
    """A role that is trained: actor and critic share the optimizer's and the checkpoints' handling."""

    def __init__(
        self,
        config: PPOConfig,
        role: ModelRole,
        own: ActorConfig | CriticConfig,
        objective: Objective,
        device: torch.device,
        tokenizer: "PreTrainedTokenizerBase",
        **options: Any,
    ):
        schedule = {"optim": own.optim, "total_steps": optimizer_steps(config, role.name), "grad_clip": own.grad_clip}
        super().__init__(role, device, tokenizer=tokenizer, seed=config.trainer.seed, **schedule, **options)
        self._name, self._settings, self._objective = role.name, own.checkpoint, objective

    def update(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on a mini-batch and return its metrics as `actor/...` or `critic/...`."""
        metrics = self.engine.update(batch, self._rule, self._objective)
        return {f"{self._name}/{key}": value for key, value in metrics.items()}

    def works_beside(self, method: str) -> bool:
        """Whether a method needs no device memory, so that the role that worked before need not rest."""
        if method == "begin_save":
            return self.engine.weights.saves_in_place(self._settings.save_contents)
        return method in ("is_written", "finish_save")

    def begin_save(self, folder: str, in_background: bool | None = None, without: str | None = None) -> None:
        """Start to write a checkpoint with the configured contents, in the background if that is configured or asked for."""
        background = self._settings.async_save if in_background is None else in_background
        contents = tuple(part for part in self._settings.save_contents if part != without)
        self.engine.weights.begin_save(folder, contents, background)

    def is_written(self) -> bool:
        """Whether `finish_save` would not wait for this process's disk."""
        return self.engine.weights.is_written

    def finish_save(self) -> None:
        self.engine.weights.finish_save()

    def load(self, folder: str, to_train: bool = True) -> None:
        self.engine.weights.load(folder, to_train)


class ActorRole(TrainedRole):
    """The policy that is trained."""

    def __init__(
        self,
        config: PPOConfig,
        device: torch.device,
        tokenizer: "PreTrainedTokenizerBase",
        link: WeightLink | None = None,  # to samplers in other processes
    ):
        policy, actor = config.actor_rollout_ref, config.actor_rollout_ref.actor
        self._link, self._sends_adapters = link, policy.model.sends_adapters
        self._temperature = policy.rollout.temperature
        self._log_prob_rule = MicroBatchRule(*log_prob_size(policy.rollout, actor))
        self._ref_rule = MicroBatchRule(*log_prob_size(policy.ref, actor))
        longest, correction = config.data.max_response_length, config.algorithm.rollout_correction
        if policy.rollout.exact:  # the sampler's log-probs are the old ones
            correction = replace(correction, bypass_mode=True)
        objective = PolicyObjective(actor, self._temperature, longest, correction)
        self._of_first_update = objective.of_first_update()
        experts = ExpertOptions(actor.router_replay.mode == "R3", actor.router_aux_loss_coef)
        options = {
            "compile_layers": actor.use_torch_compile,
            "experts": experts if asks_for_experts(policy) else None,
            "kernels": kernels_of_sampler(device) if policy.rollout.exact else None,
        }
        super().__init__(config, actor_role(config), actor, objective, device, tokenizer, **options)

    @property
    def generation(self) -> "GenerationConfig | None":
        """The model's sampling defaults."""
        return self.engine.weights.folder_parts.generation

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return what the sampler takes: all weights, or the adapters."""
        if not self._sends_adapters:
            return self.engine.weights.full()
        adapters = list(self.engine.weights.adapters())
        self.rest()  # the device need not hold both bases
        return adapters

    def send(self) -> None:
        """Send the weights to the samplers in other processes, which `sync` meanwhile."""
        assert self._link is not None
        if dist.get_rank() == 0:
            self._link.send(self.weights())
        else:
            for _ in self.weights():  # it takes part in gathering them
                pass

    def log_probs(self, batch: Batch) -> Batch:
        """Return old_log_probs and entropy of the rows, and differing_experts* if the rows have routed_experts."""
        figures = self.engine.log_probs(batch, self._log_prob_rule, self._temperature)
        return Batch.of({"old_log_probs": figures.pop("log_probs"), **figures})

    def first_update(self, batch: Batch) -> tuple[dict[str, float], Batch]:
        """Do what `update` does, with the weights that sampled the rows; return also what `log_probs` would have returned before."""
        metrics, figures = self.engine.update_and_read(batch, self._rule, self._of_first_update)
        columns = Batch.of({"old_log_probs": figures.pop("log_probs"), **figures})
        return {f"actor/{key}": value for key, value in metrics.items()}, columns

    def update_equal(self, batch: Batch) -> dict[str, float]:
        """Do what `update` does, with the weights that sampled the rows. Raises UnequalLogProbs if the sampler's log-probs differ."""
        metrics, figures = self.engine.update_and_read(batch, self._rule, self._objective)
        compared = figures["log_probs"], batch["old_log_probs"], batch["response_mask"]
        require_equal(*compared, batch.responses())
        return {f"actor/{key}": value for key, value in metrics.items()}

    def differs_in_training(self) -> bool:
        """Return whether updates compute other log-probs than `log_probs`, so that `first_update` must not be called."""
        return self.engine.differs_in_training()

    def ref_log_probs(self, batch: Batch) -> Batch:
        """Return ref_log_probs of the rows; the reference is this model with its adapters off."""
        with adapters_off(self.engine.root):
            figures = self.engine.log_probs(batch, self._ref_rule, self._temperature, with_entropy=False)
        return Batch.of({"ref_log_probs": figures["log_probs"]})


class RefRole(EngineRole):
    """The policy before training."""

    def __init__(self, config: PPOConfig, device: torch.device):
        super().__init__(reference_role(config), device)
        self._temperature = config.actor_rollout_ref.rollout.temperature

    def log_probs(self, batch: Batch) -> Batch:
        figures = self.engine.log_probs(batch, self._rule, self._temperature, with_entropy=False)
        return Batch.of({"ref_log_probs": figures["log_probs"]})


class RewardRole(EngineRole):
    """The model that scores responses."""

    def __init__(self, config: PPOConfig, device: torch.device):
        super().__init__(reward_role(config), device)

    def scores(self, batch: Batch) -> Batch:
        """Return model_scores of the rows, whose sequences are in the reward model's own tokens."""
        return Batch.of({"model_scores": self.engine.scores(batch, self._rule)})


class CriticRole(TrainedRole):
    """The value model."""

    def __init__(self, config: PPOConfig, device: torch.device, tokenizer: "PreTrainedTokenizerBase"):
        objective = ValueObjective(config.critic, config.data.max_response_length)
        super().__init__(config, critic_role(config), config.critic, objective, device, tokenizer)

    def values(self, batch: Batch) -> Batch:
        return Batch.of({"values": self.engine.values(batch, self._rule)})


class LinkedWeights:
    """The weights of an actor in other processes, for a sampler that has this process to itself."""

    def __init__(self, config: PPOConfig, link: WeightLink):
        from transformers import GenerationConfig

        model = config.actor_rollout_ref.model
        found, _ = generation_of(model.path)
        self.generation, self._link = found or GenerationConfig.from_model_config(load_config(model)), link

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._link.received()

    def rest(self) -> None:
        pass


class RolloutRole:
    """The sampler, and where its weights come from: the actor of the same process, or one in others."""

    def __init__(
        self,
        config: PPOConfig,
        device: torch.device,
        tokenizer: "PreTrainedTokenizerBase",
        source: ActorRole | LinkedWeights,
        engines: Sequence[EngineProcess] = (),  # that wait for it, see `build_rollout`
    ):
        settings = config.actor_rollout_ref.rollout
        if config.trainer.n_rollout_gpus:
            settings = replace(settings, free_cache_engine=False)
        self._length = config.data.max_response_length
        model = config.actor_rollout_ref.model
        if model.quantization is not None and model.sends_adapters and isinstance(source, ActorRole):
            self._base = DequantizedBase(source.engine)
            source.rest()
            model = replace(model, path=self._base.path)
        longest = config.data.max_prompt_length + self._length
        arguments = settings, model, device, longest, config.trainer.seed, tokenizer
        silence_s = ENGINE_SILENCE_SHARE * config.trainer.hang_timeout_s
        self._build = partial(build_rollout, *arguments, silence_s=silence_s)
        self.sampler = self._build(engines=engines)
        self._sleeps, self._is_alone = settings.free_cache_engine, settings.tensor_model_parallel_size == 1
        self._changes = ChangeCheck(sampler_dtype(settings, device))
        self._loads: list[dict[str, float]] = []  # of calls for training since `take_load`
        self._generate_s, self._failures = 0.0, 0  # of the same calls; in a row
        self._sync_s: dict[str, float] = {}  # of the last sync
        self._synced: int | None = None  # version of the actor's weights at the last sync
        self._source, self._is_linked = source, isinstance(source, LinkedWeights)
        self._pad_token_id = int(tokenizer.pad_token_id)
        stops = stop_tokens(tokenizer, source.generation)
        self._conversations = ConversationSampler(config, tokenizer) if has_environment(config) else None
        self.sampling: dict[Purpose, Sampling] = {p: sampling_for(config, p, stops) for p in get_args(Purpose)}

    def rest(self) -> None:
        if self._sleeps:
            self.sampler.sleep()

    def generate(self, batch: Batch, purpose: Purpose) -> Batch | None:
        """Generate one response, or one conversation, per row, sampled as configured for `purpose`.

        If the sampler fails, all ranks start theirs again and generate the rows once more; those that draw by position and were
        complete are kept. With an actor elsewhere, which may train now, the rank returns None and waits for the next `sync`.

        Raises:
            EngineError: the sampler failed a second time.
            EnvironmentFailed: an environment failed, and the run is to end then.
        """
        started = time.monotonic()
        done: dict[int, Any] = {}
        while True:
            if self.sampler.version is None and self._synced is not None:
                self.sync(self._synced)  # the sampler slept and lost its weights, or is new
            samples, error = self._attempt(batch, purpose, done)
            if not self._fails(error):
                break
            # Without it draws depend on the other rows; and the ranks of a group must ask for the same ones.
            if not (self.sampling[purpose].by_position and self._is_alone):
                done.clear()
            if self._is_linked:
                return None
        assert samples is not None
        self._failures = 0
        load = self.sampler.take_load()
        if purpose == "train":
            self._loads.append(load)
            self._generate_s += time.monotonic() - started
        if self._conversations is None or "kept" in batch.info:
            return samples
        return samples.with_prompts(_largest(samples.prompt_length))

    def _fails(self, error: EngineError | None) -> bool:
        """Return whether this sampler has failed, or one that it works with; then it is started again and needs weights.

        With an actor elsewhere only ranks of a tensor-parallel group work together. Raises EngineError: it failed twice in a row.
        """
        if not _largest(error is not None) or (self._is_linked and self._is_alone and error is None):
            return False
        self._failures += 1
        if self._failures == 1:
            logger.warning("the sampler failed and is started again: %s", error or "on another rank")
        self.sampler.close()
        if self._failures > 1:
            raise EngineError(f"the sampler failed again after a restart: {error or 'in another process'}") from error
        self.sampler = self._build()
        return True

    def finished(self) -> list[tuple[int, list[int]]]:
        """Return seed and tokens of finished rows, see `Rollout.finished`; a sampler that is started again repeats them."""
        return self.sampler.finished()

    def take_load(self) -> dict[str, float]:
        """Return how busy the sampler was with samples for training since the last call, see `rlx.rollout.protocol.SamplerLoad`.

        Beside it the seconds of the last sync by part, and with an actor elsewhere those of all calls, generate_s.
        """
        load, spent = joined_loads(self._loads), self._generate_s
        self._loads, self._generate_s = [], 0.0
        return load | self._sync_s | ({"generate_s": spent} if self._is_linked else {}) if load else {}

    def sync(self, version: int) -> bool:
        """Copy the actor's weights, or its adapters, to the sampler; `version` counts the updates. An actor elsewhere must `send` them.

        If the sampler fails, it is started again and takes them once more; with an actor elsewhere the rank returns False, and
        both sides must begin anew.

        Raises:
            EngineError: the sampler failed a second time.
            StaleSamplerError: the actor's weights changed since the last sync and the sampler's did not.
        """
        while self._fails(self._take_weights(version)):
            if self._is_linked:
                return False
        self._synced = version
        self._source.rest()
        return True

    def _take_weights(self, version: int) -> EngineError | None:
        started = time.monotonic()
        weights = self._source.weights()
        gathered = time.monotonic()
        watched = self._changes.watched(weights)
        try:
            self.sampler.wake()
            awake = time.monotonic()
            self.sampler.update_weights(chain(watched), version)  # which nobody can close
            for _ in watched:  # to the end, whatever the sampler takes
                pass
            self._changes.require_change(self.sampler.probe(), version)
        except EngineError as error:
            for _ in watched:  # other processes gather or receive them at the same time
                pass
            _clear_frames(error)
            return error
        self._sync_s = {
            "sync_gather_s": gathered - started,
            "sync_wake_s": awake - gathered,
            "sync_send_s": time.monotonic() - awake,
        }
        return None

    def _attempt(self, batch: Batch, purpose: Purpose, done: dict[int, Any]) -> tuple[Batch | None, EngineError | None]:
        sampling = self.sampling[purpose]
        try:
            if self._conversations is not None:
                return self._conversations.generate(self.sampler, batch, sampling, done), None
            if "kept" in batch.info:
                return continue_batch(self.sampler, batch, sampling, done), None
            return generate_batch(self.sampler, batch, sampling, self._pad_token_id, self._length, done), None
        except EngineError as error:
            _clear_frames(error)
            return None, error


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error, which hold the engine and its device memory; their line numbers stay."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _largest(number: int) -> int:
    numbers = torch.tensor([number], dtype=torch.int32)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return int(numbers.item())


def optimizer_steps(config: PPOConfig, role: str) -> int:
    """Return the optimizer steps of the whole run, for the actor without those of the critic's warm-up.

    `trainer.total_training_steps` must be set.
    """
    settings = config.actor_rollout_ref.actor if role == "actor" else config.critic
    steps = config.trainer.total_training_steps
    assert steps is not None and settings.ppo_mini_batch_size is not None and settings.ppo_epochs is not None
    if role == "actor":
        steps = max(0, steps - config.trainer.critic_warmup)
    return steps * (config.data.train_batch_size // settings.ppo_mini_batch_size) * settings.ppo_epochs


def sampling_for(config: PPOConfig, purpose: Purpose, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Return how responses are sampled for `purpose`."""
    rollout = config.actor_rollout_ref.rollout
    length, val = config.data.max_response_length, rollout.val_kwargs
    ends: dict[str, Any] = {
        "stop_token_ids": () if rollout.ignore_eos else stop_token_ids,
        "stop": rollout.stop,
        "include_stop_str_in_output": rollout.include_stop_str_in_output,
    }
    if purpose == "train":
        cut = rollout.temperature, rollout.top_p, rollout.top_k or -1
        logs, experts = rollout.calculate_log_probs, rollout.enable_rollout_routing_replay
        goes_on = rollout.partial.max_staleness > 0
        return Sampling(length, *cut, with_log_probs=logs, with_experts=experts, by_position=goes_on, **ends)
    silent: dict[str, Any] = {"with_log_probs": False, **ends}
    if purpose == "greedy":
        return Sampling(length, temperature=0.0, **silent)
    silent |= {
        "repetition_penalty": val.repetition_penalty,
        "presence_penalty": val.presence_penalty,
        "frequency_penalty": val.frequency_penalty,
        "bad_words": val.bad_words,
        "logit_bias": tuple((int(token), float(bias)) for token, bias in val.logit_bias.items()),
    }
    if not val.do_sample:
        return Sampling(length, temperature=0.0, **silent)
    return Sampling(length, val.temperature, val.top_p, val.top_k or -1, min_p=val.min_p, **silent)


class DequantizedBase:
    """The base of a quantised actor in full, in a temporary folder of each machine; all processes make it together.

    A sampler with the original weights would give other log-probs than the trainer. The folder stays as long as this process,
    because a sampler that failed reads it again. `path` is for `from_pretrained`. Raises StorageError if there is no room.
    """

    def __init__(self, engine: Engine) -> None:
        machine = machine_identity()
        machines = gathered(machine)
        is_writer = machines.index(machine) == dist.get_rank()
        self._folder = scratch_folder("dequantized") if is_writer else None
        weights = {name: tensor.cpu() for name, tensor in engine.weights.base() if is_writer}
        if self._folder is not None:
            with storing(Path(self._folder.name)):
                engine.weights.folder_parts.write_with_weights(Path(self._folder.name), weights)
        paths = gathered(self._folder.name if self._folder is not None else "")
        self.path = paths[machines.index(machine)]
