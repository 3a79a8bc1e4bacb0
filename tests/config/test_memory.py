import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlx.config.compose import compose
from rlx.config.machine import Machine
from rlx.config.memory import GIB, TINY_VOCABULARY, Memory, estimate, shape_of, table, tiny_shape
from rlx.config.schema import ModelConfig, TinyModelConfig
from rlx.models.tiny import make_tiny

GPU = Machine(gpus=8, cpus=8, packages=frozenset())
ARCHITECTURES = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 1, "tie_word_embeddings": False, "head_dim": 48},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 4},
}


# Sizes of the test's own, whatever the experiment of the default run says.
SIZES = [
    *(f"actor_rollout_ref.model.tiny.{name}={size}" for name, size in vars(TinyModelConfig()).items()),
    "data.train_batch_size=32",
    "data.max_prompt_length=128",
    "data.max_response_length=48",
    "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=128",
    "actor_rollout_ref.rollout.n=8",
]


def memory_of(overrides: list[str], machine: Machine) -> dict[str, Memory]:
    return {memory.role: memory for memory in estimate(compose([*SIZES, *overrides]).partial, machine)}


@pytest.mark.parametrize("tiny", [TinyModelConfig(), TinyModelConfig(96, 160, 2, 8, 4)])
def test_the_tiny_shape_counts_the_parameters_of_the_tiny_model(tiny: TinyModelConfig):
    model, tokenizer = make_tiny(tiny)
    assert len(tokenizer) == TINY_VOCABULARY
    assert tiny_shape(tiny).language_model == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_config_file_gives_the_parameters_of_its_model(kind: str, tmp_path: Path):
    config = AutoConfig.for_model(
        kind,
        vocab_size=300,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=4,
        **ARCHITECTURES[kind],
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(ModelConfig(path=str(tmp_path)))
    assert shape is not None
    assert shape.language_model == sum(p.numel() for p in model.parameters())
    assert shape.backbone == sum(p.numel() for p in model.model.parameters())


def test_the_published_size_of_a_known_model(tmp_path: Path):
    published = {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    shape = shape_of(ModelConfig(path=str(tmp_path)))
    assert shape is not None
    assert shape.language_model == 494_032_768


def test_override_config_counts(tmp_path: Path):
    AutoConfig.for_model("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    plain = shape_of(ModelConfig(path=str(tmp_path)))
    deeper = shape_of(ModelConfig(path=str(tmp_path), override_config={"num_hidden_layers": 3}))
    assert plain is not None and deeper is not None
    assert (plain.layers, deeper.layers) == (2, 3)


@pytest.mark.parametrize("content", [None, '{"model_type": "gpt2", "n_embd": 8}', "{", "[]"])
def test_an_unknown_model_is_a_question_mark(tmp_path: Path, content: str | None):
    if content:
        (tmp_path / "config.json").write_text(content)
    assert shape_of(ModelConfig(path=str(tmp_path))) is None
    command = ["experiment=arithmetic", f"actor_rollout_ref.model.path={tmp_path}"]
    assert "?" in table(compose(command).config, GPU).splitlines()[1]


def test_roles_follow_estimator_and_reference(cpu_machine: Machine):
    assert list(memory_of([], cpu_machine)) == ["actor", "rollout"]
    everything = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True"]
    assert list(memory_of(everything, cpu_machine)) == ["actor", "critic", "ref", "rollout"]


def test_the_formulas(cpu_machine: Machine):
    actor = memory_of([], cpu_machine)["actor"]
    n = tiny_shape(TinyModelConfig()).language_model
    assert actor[1:4] == (4 * n, 4 * n, 8 * n)
    tokens = 128 * (128 + 48)
    assert actor.layer_activations == tokens * 4 * (4 * 128 + 2 * 128 + 2 * 64 + 4 * 384)
    assert actor.kept_for_backward == tokens * 4 * 128 * 4
    rollout = memory_of([], cpu_machine)["rollout"]
    assert rollout.parameters == 4 * n
    assert rollout.cache == 32 * 8 * (128 + 48) * 2 * 4 * 2 * 32 * 4


def test_sharding_precision_lora_and_recomputation():
    fsdp = "actor_rollout_ref.actor.fsdp_config"
    n = tiny_shape(TinyModelConfig()).language_model
    whole = memory_of(["trainer.n_gpus_per_node=8"], GPU)["actor"]
    assert whole.parameters == 4 * n / 8
    groups = memory_of(["trainer.n_gpus_per_node=8", f"{fsdp}.fsdp_size=2", f"{fsdp}.model_dtype=bf16"], GPU)["actor"]
    assert groups.parameters == 2 * n / 2
    lora = memory_of(["actor_rollout_ref.model.lora_rank=4"], GPU)["actor"]
    adapters = 4 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384))
    assert lora[1:4] == (4 * (n + adapters), 4 * adapters, 8 * adapters)
    kept = memory_of(["actor_rollout_ref.model.enable_gradient_checkpointing=False"], GPU)["actor"]
    assert kept.kept_for_backward == 4 * (kept.layer_activations or 0)


def test_tiles_of_the_mlp():
    model, tokens = "actor_rollout_ref.model", 128 * (128 + 48)
    attention = 4 * 128 + 2 * 128 + 2 * 64
    for tiled, at_once in (("auto", 8192), (100, 100), (10**9, tokens)):
        actor = memory_of([f"{model}.tiled_mlp={tiled}"], GPU)["actor"]
        assert actor.layer_activations == 2 * (tokens * attention + at_once * 4 * 384)
    kept = memory_of([f"{model}.tiled_mlp=auto", f"{model}.enable_gradient_checkpointing=False"], GPU)["actor"]
    assert kept.kept_for_backward == 2 * 4 * tokens * attention


def test_the_table_marks_what_waits_in_host_memory(cpu_machine: Machine):
    command = [*SIZES, "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True", "trainer.n_gpus_per_node=1"]
    actor = table(compose(command).config, GPU).splitlines()[1].split()
    assert [cell.endswith("*") for cell in actor[1:]] == [False, False, True, False, True, False, False]
    on_cpu = table(compose(command).config, cpu_machine)
    assert "*" not in "".join(on_cpu.splitlines()[:-1])
    n = tiny_shape(TinyModelConfig()).language_model
    assert actor[1] == f"{4 * n / GIB:.3f}"


def on_host(*overrides: str, machine: Machine = GPU) -> float | None:
    model = "actor_rollout_ref.model"
    return memory_of([f"{model}.{o}" if o[0] != "+" else o[1:] for o in overrides], machine)["actor"].on_host


def test_host_memory_is_what_offloading_keeps_up_to_its_cap(cpu_machine: Machine):
    n = tiny_shape(TinyModelConfig()).language_model
    boundary = 2 * 128 * (128 + 48) * 128 * 4
    assert on_host() == boundary
    assert on_host("activation_offload.save=attention") == boundary / 128 * (2 * 128 + 2 * 128 + 2 * 64)
    assert on_host("enable_gradient_checkpointing=False") == boundary / 128 * (4 * 128 + 2 * 128 + 2 * 64 + 4 * 384)
    assert on_host("activation_offload.max_host_bytes=1000") == 1000
    assert on_host("activation_offload.max_host_bytes=1000000000") == boundary
    assert on_host("activation_offload.tier=disk") == 0
    assert on_host("enable_activation_offload=False") == 0
    assert on_host("+actor_rollout_ref.actor.fsdp_config.optimizer_offload=True") == boundary + 8 * n
    assert on_host(machine=cpu_machine) == 0


def test_the_table_marks_what_is_on_disk():
    command = [*SIZES, "trainer.n_gpus_per_node=1", "actor_rollout_ref.model.activation_offload.tier=disk"]
    actor, last = (table(compose(command).partial, GPU).splitlines()[place] for place in (1, -1))
    assert [cell[-1] for cell in actor.split()[1:]].count("+") == 1 and actor.split()[5].endswith("+")
    assert "+ = on disk" in last
