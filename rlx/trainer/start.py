"""Load and check the parts of a run before any model is made, and report all faults at once."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlx.cluster.runtime import check_options
from rlx.config.check.folders import is_url
from rlx.config.faults import Fault
from rlx.config.forecast.engine_count import CORES
from rlx.config.machine import processes
from rlx.config.schema import ARITHMETIC, PPOConfig, roles
from rlx.data.files import DataError, RowFault, RowFaults, Rows, form_of, parts_of, prompts_of
from rlx.data.prompts import CORRECT_ANSWER, PromptDataset, PromptSampler, load_prompts
from rlx.environments.conversation import common
from rlx.environments.role import require_usable_template
from rlx.errors import ExplainedError
from rlx.models.hf_folder import try_saving
from rlx.models.loading import ModelError, load_config, load_tokenizer
from rlx.models.preflight import faults_of
from rlx.models.tiny import make_tiny_tokenizer
from rlx.rewards.manager import Conversations, RewardManager
from rlx.rewards.rules import scored_sources
from rlx.trainer.checkpoints import Choice, checkpoint_of, is_evaluation, read_driver_state
from rlx.trainer.resume_config import ChangedKey, changes_since
from rlx.trainer.run_lock import RunLock
from rlx.trainer.saver import fetch
from rlx.trainer.try_inputs import WEIGHTS, local_roles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECKED_ROWS = 100_000  # the first of a split, by `rlx check`; the start of the run reads them all
T = TypeVar("T")


class StartError(ExplainedError, ValueError):
    """Several faults were found."""


class Prepared(NamedTuple):
    """The parts of the driver, if there are no faults."""

    checkpoint: Path | None  # the run continues from it; None: a new run
    lock: RunLock | None  # holds the folder of a resumed run
    changed: list[ChangedKey]  # other values of keys than the run had before
    tokenizer: "PreTrainedTokenizerBase"  # of the policy
    train: PromptDataset
    val: PromptDataset | None
    sampler: PromptSampler  # chooses the next prompts of `train`
    rewards: RewardManager
    passed_over: list[str]  # newer checkpoints that cannot be used, each with the reason
    held: ExitStack  # ends `lock` and `rewards`, and later the handling of signals

    def notices(self, config: PPOConfig) -> list[str]:
        """Return notices about checkpoints passed over, dropped or cut prompts, dates in them, and reward functions that none uses."""
        found = [*self.passed_over]
        found += [each.report for each in (self.train, self.val) if each is not None and each.report]
        if "strftime_now" in str(self.tokenizer.chat_template):
            found.append(
                "the chat template writes the present date into prompts (strftime_now), so they change at midnight: a run that is resumed "
                "on another day differs from an unbroken one. A template with a fixed date in the model's folder prevents this"
            )
        if _have_tools(self.train, self.val) and "tools" not in str(self.tokenizer.chat_template):
            found.append(
                "the chat template does not show the model the tools of the rows: describe them in the prompts, or take a model whose "
                "template writes their schemas"
            )
        added = added_system_prompt(self.tokenizer)
        if added and added in self.tokenizer.decode(self.train.batch(range(1))["prompt_ids"][0]):
            found.append(
                f'the chat template begins prompts with a system prompt of its own, "{shorten(added, 100)}"; a system message at the '
                "beginning of a row takes its place"
            )
        sources = _sources(self.train, self.val)
        unused = [] if sources is None else sorted(set(config.custom_reward_function.data_sources) - sources)
        if unused:
            found.append(
                f"custom_reward_function.data_sources: no prompt is of {', '.join(map(repr, unused))}; the prompts are of "
                f"{', '.join(map(repr, sorted(sources or ())))}"
            )
        return found


def added_system_prompt(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the system prompt that a chat template adds where a chat has none; empty if it adds none."""
    system, user = {"role": "system", "content": ""}, {"role": "user", "content": "?"}
    try:
        without, empty = (str(tokenizer.apply_chat_template(c, tokenize=False)) for c in ([user], [system, user]))
    except Exception:  # a template raises anything, say that it knows no system message
        return ""
    first = common(without, empty)
    last = common(without[first:][::-1], empty[first:][::-1])
    # Where the empty message is a part of its own, the template adds none.
    return without[first : len(without) - last].strip() if first + last == len(empty) else ""


class _Trials:
    """Runs the parts of the start and collects their errors."""

    def __init__(self) -> None:
        self.faults: list[ExplainedError] = []

    def __call__(self, part: Callable[..., T], *arguments: Any) -> T | None:
        """Return the part's result, or None if it fails."""
        try:
            return part(*arguments)
        except ExplainedError as fault:
            self.faults.append(fault)
            return None

    def end(self) -> None:
        """Raise the collected errors: a single one unchanged, several as a StartError with the first known cause."""
        if len(self.faults) == 1:
            raise self.faults[0]
        if self.faults:
            listed = "".join(f"\n{number:3}. {fault}" for number, fault in enumerate(self.faults, start=1))
            cause = next((fault.__cause__ for fault in self.faults if fault.__cause__ is not None), None)
            raise StartError(f"{len(self.faults)} faults:{listed}") from cause


def prepare(config: PPOConfig, yaml: str = "") -> Prepared:
    """Do all work that may fail and needs no worker, before the warm start, the run's folder and the workers' models.

    `yaml` is the configuration as text, to compare with that of a run to resume. Raises RunLocked if that run still runs; for a
    single fault ClusterError, ResumeError, ModelError, DataError, UserCodeError or RewardError; StartError for several.
    """
    trial = _Trials()
    trial(check_options, config)
    lock = changed = sampler = None
    with ExitStack() as until_it_fails:
        checkpoint, passed_over = trial(lambda: checkpoint_of(fetch(config))) or Choice(None, [])
        if checkpoint is not None:
            if not is_evaluation(config):  # it writes nothing there, so the run may go on
                lock = until_it_fails.enter_context(RunLock(checkpoint.parent.parent))
            changed = trial(changes_since, config, checkpoint, yaml)
        trial.faults += map(ModelError, _faults_of_models(config, roles.sharded_roles(config)))
        tokenizer, train, val = _prompts(trial, config)
        if train is not None:
            sampler = trial(_sampler, config, train, checkpoint)
        rewards, has_judge = None, roles.has_reward_model(config)
        if tokenizer is not None:
            rewards = _scored(trial, config, until_it_fails, tokenizer, train, val, has_judge)
        trial.end()
        assert tokenizer and train is not None and sampler and rewards, "there was no fault"
        held = until_it_fails.pop_all()
    return Prepared(checkpoint, lock, changed or [], tokenizer, train, val, sampler, rewards, passed_over, held)


def faults_at_start(config: PPOConfig, is_here: bool) -> tuple[Fault, ...]:
    """Return what the start of the run would report of model folders and of rows and their answers, for `rlx check`.

    A folder without weights is enough to plan, or for another machine (not `is_here`), so its tokenizer and the rows are not read.
    Nor is the tokenizer of a model of the hub. A reward function of the user's own is tried by `check_user_code`.
    """
    trial, policy, data = _Trials(), Path(config.actor_rollout_ref.model.path or "").expanduser(), config.data
    local = local_roles(config)
    trial.faults += map(ModelError, _faults_of_models(config, local))
    both = (data.train_max_samples, data.val_max_samples)
    most = [CHECKED_ROWS if most < 0 else min(most, CHECKED_ROWS) for most in both]
    config = replace(config, data=replace(data, train_max_samples=most[0], val_max_samples=most[1]))
    reads_rows = data.custom_cls.path is None and not any(map(is_url, (*data.train_files, *data.val_files)))
    scores_rows = scored_sources(config.custom_reward_function) is not None
    if is_here and reads_rows and (roles.is_tiny(config) or any((policy / name).exists() for name in WEIGHTS)):
        tokenizer, train, val = _prompts(trial, config)
        has_judge = any(role.name == "reward" for role in local)  # that of the hub may not be here
        if tokenizer is not None and scores_rows and (has_judge or not roles.model_scores_alone(config)):
            with ExitStack() as until_tried:
                _scored(trial, config, until_tried, tokenizer, train, val, has_judge)
    elif is_here and reads_rows and scores_rows and not policy.is_dir():
        trial(_check_rows_alone, config)
    what, expected = "the run would end at its start", "models and rows that the run can use"
    return tuple(Fault.of(error, what, expected, "correct the model's folder or the rows") for error in trial.faults)


def _check_rows_alone(config: PPOConfig) -> None:
    """Try rows and answers without the tokenizer, which is on the hub. Raises DataError, RewardError or UserCodeError."""
    data, faults = config.data, RowFaults()
    places: list[tuple[str, Rows, int]] = []
    answers: list[tuple[str, Any]] = []
    splits = [("train", data.train_files, data.train_max_samples)]
    splits += [("val", data.val_files, data.val_max_samples)] * roles.validates(config)
    for split, files, left in splits:
        for part in [part for file in files if file != ARITHMETIC for part in parts_of(file)]:
            rows = part.open()
            convert, read = form_of(part.name, rows.columns, data, split), range(min(len(rows), left))
            left -= len(read)
            for row, prompt in prompts_of(part.name, rows, convert, read, faults).items():
                places.append((part.name, rows, row))
                answers.append((prompt.data_source, prompt.ground_truth))
    faults.end()
    # Which rows a limit in tokens drops is not known without the tokenizer, and their answers need not be right.
    if not (data.filter_overlong_prompts or roles.only_environment_scores(config) or roles.model_scores_alone(config)):
        with RewardManager(config.reward, config.custom_reward_function) as rewards:
            for index, what in rewards.faults_of_answers(dict(enumerate(answers))).items():
                faults.add(*places[index], RowFault(what, CORRECT_ANSWER))
            faults.end()
            rewards.check_sources({source for source, _ in answers})


def _scored(
    trial: _Trials,
    config: PPOConfig,
    until: ExitStack,
    tokenizer: "PreTrainedTokenizerBase",
    train: PromptDataset | None,
    val: PromptDataset | None,
    has_judge: bool,
) -> RewardManager | None:
    """Return what scores responses, with the reward model's tokenizer if `has_judge`, after a look at every answer and data source."""
    rewards = trial(_rewards, config, tokenizer, has_judge)
    if rewards is not None:
        until.enter_context(rewards)
        trial(_check_answers, config, rewards, train, val)
        trial(rewards.check_sources, () if roles.only_environment_scores(config) else _sources(train, val) or ())
    return rewards


def _prompts(
    trial: _Trials, config: PPOConfig
) -> tuple["PreTrainedTokenizerBase | None", PromptDataset | None, PromptDataset | None]:
    """Load the policy's tokenizer, the training rows and the validation rows, as far as they can be."""
    tokenizer, train, val = trial(policy_tokenizer, config), None, None
    if tokenizer is not None:
        trial(try_saving, tokenizer)
        val = trial(load_prompts, config.data, tokenizer, "val") if roles.validates(config) else None
        train = val if is_evaluation(config) else trial(load_prompts, config.data, tokenizer, "train")
        if roles.has_environment(config):
            trial(require_usable_template, config, tokenizer)
            if _have_tools(train, val):
                fault = (
                    "data.train_files or data.val_files: got rows with a column 'tools' in a run with an environment, expected the "
                    "environment's tools alone; remove the column, or give the tools in environment.path"
                )
                trial.faults.append(DataError(fault))
        trial(_check_tokens, config, tokenizer, train, val)
    return tokenizer, train, val


def _have_tools(*prompts: PromptDataset | None) -> bool:
    return any(type(each) is PromptDataset and each.has_tools for each in prompts)


def policy_tokenizer(config: PPOConfig) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of the policy; `builtin:tiny` has one before its warm start too."""
    model = config.actor_rollout_ref.model
    return make_tiny_tokenizer() if roles.is_tiny(config) else load_tokenizer(model.path or "", model.trust_remote_code)


def _check_tokens(config: PPOConfig, tokenizer: "PreTrainedTokenizerBase", *prompts: PromptDataset | None) -> None:
    """Raise ModelError or DataError for tokens that the model cannot read, or not sample to end a response."""
    model = config.actor_rollout_ref.model
    if roles.is_tiny(config):
        return
    try:
        size = getattr(load_config(model).get_text_config(), "vocab_size", None)
    except ModelError:
        return  # `_faults_of_models` reports it
    if size is None:
        return
    if (end := int(tokenizer.eos_token_id)) >= size:
        raise ModelError(
            f"actor_rollout_ref.model.path={model.path}: the EOS token {tokenizer.eos_token!r} has id {end}, expected an id below "
            f"{size}, the number of rows of the embedding, or no response can end; resize the model's embeddings, or set eos_token "
            "in tokenizer_config.json to a token that the model knows"
        )
    for each in prompts:
        if type(each) is PromptDataset:
            each.require_tokens_below(size)


def _check_answers(config: PPOConfig, rewards: RewardManager, *prompts: PromptDataset | None) -> None:
    """Try the answer of every row with the built-in function that will score it. Raises DataError."""
    if roles.only_environment_scores(config):
        return
    for each in prompts:
        if type(each) is PromptDataset:
            each.require_answers(rewards.faults_of_answers(each.answers()))


def _sampler(config: PPOConfig, train: PromptDataset, checkpoint: Path | None) -> PromptSampler:
    what = (
        len(train),
        roles.prompts_at_once(config),
        config.data.shuffle,
        config.data.seed,
        getattr(train, "digest", ""),
    )
    sampler = PromptSampler(*what)
    if checkpoint is not None and not config.trainer.val_only:
        # DataError if it was made for other prompts. The trainer loads it again, or another one if this is damaged.
        PromptSampler(*what).load_state_dict(read_driver_state(checkpoint).sampler)
    return sampler


def _rewards(config: PPOConfig, policy: "PreTrainedTokenizerBase", has_judge: bool) -> RewardManager:
    model, judge = config.reward_model.model, ()
    if has_judge:
        own = load_tokenizer(model.path or "", model.trust_remote_code)
        judge = Conversations(policy, own), config.reward_model.rule_weight
    engines = config.actor_rollout_ref.rollout.engines_per_gpu
    sampler_cores = CORES * config.trainer.samplers_per_node * (1 if engines == "auto" else int(engines))
    return RewardManager(config.reward, config.custom_reward_function, sampler_cores, *judge)


def _faults_of_models(config: PPOConfig, judged: Iterable[roles.ModelRole]) -> Iterator[str]:
    """Yield faults by role. A built-in critic has the policy's shape, and the reference is the policy."""
    policy, sharded, count = config.actor_rollout_ref.model, roles.sharded_roles(config), processes(config)
    for role in judged:
        if role.name != "ref":  # which has the actor's model
            model = replace(role.model, tiny=policy.tiny) if role.model.path == roles.TINY else role.model
            sizes = {each.sequence_parallel_size for each in sharded if each.model_key == role.model_key}
            experts = role.name == "actor" and roles.asks_for_experts(config.actor_rollout_ref)
            sampler = config.actor_rollout_ref.rollout.name if role.name == "actor" else None
            faults = faults_of(model, role.head, sizes, count, experts, sampler)
            yield from (f"{role.model_key}: {fault}" for fault in faults)


def _sources(*prompts: PromptDataset | None) -> frozenset[str] | None:
    """Return the data sources of the prompts, or None if a user's dataset class makes them."""
    known = [each.data_sources for each in prompts if type(each) is PromptDataset]
    return frozenset().union(*known) if len(known) == len(prompts) - prompts.count(None) else None
