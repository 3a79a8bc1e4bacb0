"""The steps by TRL's GRPOTrainer, with vLLM in its process: `python -m benchmarks.race.trl FOLDER OPTIONS_AS_JSON`."""

import json
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import chosen_device
from benchmarks.offload.device import clock

DEVICE = chosen_device()


def settings(folder: Path, options: Namespace) -> GRPOConfig:
    """Return TRL's names of the settings that the other frameworks have."""
    on_gpu, responses = DEVICE.type == "cuda", options.prompts * options.samples
    kernel = "flash_attention_2" if on_gpu else "sdpa"
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=options.steps * options.updates,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=responses // options.updates // options.micro_batch,
        steps_per_generation=responses // options.micro_batch,
        num_generations=options.samples,
        max_completion_length=options.response,
        shuffle_dataset=False,
        beta=options.kl,
        epsilon=0.2,
        use_bias_correction_kl=False,
        # Without this correction TRL would leave out `old`. Its default weighs by the ratio of whole sequences.
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=1e9,
        loss_type="bnpo",
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=options.checkpointing,
        model_init_kwargs={"dtype": "float32", "attn_implementation": kernel},
        use_vllm=on_gpu,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=options.share,
        vllm_max_model_length=options.prompt + options.response,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
    )


class StepRows(TrainerCallback):  # type: ignore[misc]
    """Writes a row for each step, with the seconds of its phases.

    A step begins where the trainer begins to generate. Phases within another count in both until `end`.
    """

    def __init__(self, path: Path, trainer: GRPOTrainer):
        self._file, self._step, self._began = path.open("w"), 0, 0.0
        self._spent: dict[str, float] = {}
        self._logged: dict[str, float] = {}
        self._time(trainer, "_generate", "rollout")
        self._time(trainer.vllm_generation if trainer.use_vllm else trainer, "sync_weights", "sync")
        score, log_probs = trainer._generate_and_score_completions, trainer._get_per_token_logps_and_entropies

        def begin_and_score(inputs: Any) -> Any:
            self.end()
            self._step, self._began, self._spent = self._step + 1, clock(DEVICE), {}
            with self._phase("all but update"):
                return score(inputs)

        def timed_log_probs(model: Any, *given: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                return log_probs(model, *given, **named)
            # With adapters the reference is the same model without them.
            plain = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
            with self._phase("ref" if plain or model is trainer.ref_model else "old_log_prob"):
                return log_probs(model, *given, **named)

        trainer._generate_and_score_completions = begin_and_score
        trainer._get_per_token_logps_and_entropies = timed_log_probs

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **others: Any) -> None:
        """See TrainerCallback."""
        self._logged.update(logs or {})

    def end(self) -> None:
        """Write the row of the step that ends, if there is one."""
        if not self._step:
            return
        step = clock(DEVICE) - self._began
        self._spent["update_actor"] = step - self._spent.pop("all but update")
        self._spent["rollout"] -= self._spent.get("sync", 0.0)
        row = {f"timing_s/{name}": seconds for name, seconds in {**self._spent, "step": step}.items()}
        row["reward/mean"] = self._logged.get("reward", 0.0)
        row["response_length/mean"] = self._logged.get("completions/mean_length", 0.0)
        row["actor/grad_norm"] = self._logged.get("grad_norm", 0.0)
        self._file.write(json.dumps({"step": self._step, **row}) + "\n")
        self._file.flush()

    def _time(self, owner: Any, name: str, phase: str) -> None:
        work: Callable[..., Any] | None = getattr(owner, name, None)

        def timed(*given: Any, **named: Any) -> Any:
            assert work is not None
            with self._phase(phase):
                return work(*given, **named)

        if work is not None:
            setattr(owner, name, timed)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = clock(DEVICE)
        yield
        self._spent[name] = self._spent.get(name, 0.0) + clock(DEVICE) - began


def main(folder: Path, options: Namespace) -> None:
    """Train, and leave `rows.jsonl` in the folder."""
    (score,) = (
        each for name, each in runpy.run_path(str(folder.parent / "reward.py")).items() if name.endswith("score")
    )

    def reward(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        return [score("", text, truth) for text, truth in zip(texts, answer, strict=True)]

    def columns(row: dict[str, Any]) -> dict[str, Any]:
        """Return a row's question, without a template if there is none that marks turns."""
        prompt = row["prompt"] if row["reward_model"]["ground_truth"] else row["prompt"][0]["content"]
        return {"prompt": prompt, "answer": row["reward_model"]["ground_truth"]}

    rows = load_dataset("json", data_files=str(folder.parent / "prompts.jsonl"), cache_dir=str(folder))["train"]
    prompts = rows.map(columns, remove_columns=rows.column_names)
    lora = LoraConfig(r=options.lora, lora_alpha=options.lora, target_modules="all-linear") if options.lora else None
    trainer = GRPOTrainer(
        model=str(folder.parent / "model"),
        reward_funcs=reward,
        args=settings(folder, options),
        train_dataset=prompts,
        peft_config=lora,
    )
    written = StepRows(folder / "rows.jsonl", trainer)
    trainer.add_callback(written)
    trainer.train()
    written.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Namespace(**json.loads(sys.argv[2])))
