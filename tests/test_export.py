"""The command turns a checkpoint into a folder that `from_pretrained` loads, in a process without process group."""

import json
import os
import shlex
import shutil

import pytest
import torch
import torch.distributed as dist
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from rlx.checkpoint.folders import MANIFEST
from rlx.checkpoint.manifest import seal
from rlx.checkpoint.tensors import load_all
from rlx.config.schema import FSDPConfig, ModelConfig, OptimConfig, TinyModelConfig
from rlx.engine.engine import Engine
from rlx.engine.fsdp_units import local
from rlx.export import main
from rlx.models.hf_folder import FolderParts
from rlx.models.tiny import make_tiny

IDS = torch.arange(3, 20)[None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A step's folder with the checkpoints of an actor with adapters and of a critic, and what they say of a sequence."""
    folder = tmp_path_factory.mktemp("run")
    tiny = TinyModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    model, tokenizer = make_tiny(tiny)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    said = {}
    for role, head, lora in (("actor", "lm", 2), ("critic", "value", 0)):
        config = ModelConfig(path=str(folder / "model"), lora_rank=lora)
        engine = Engine(
            config,
            FSDPConfig(),
            strategy="fsdp2",
            device=torch.device("cpu"),
            head=head,
            optim=OptimConfig(),
            tokenizer=tokenizer,
        )
        for parameter in engine.root.parameters():
            torch.nn.init.normal_(local(parameter), std=0.05)
        engine.weights.save(folder / "global_step_1" / role, ("model",))
        engine.root.eval()
        with torch.no_grad():
            said[role] = engine.root(input_ids=IDS).logits
    dist.destroy_process_group()
    return folder / "global_step_1", said


@pytest.mark.parametrize(
    ("role", "arguments", "auto_class"),
    [("actor", [], AutoModelForCausalLM), ("critic", ["--role", "critic"], AutoModelForTokenClassification)],
)
def test_the_folder_loads_and_says_the_same(role, arguments, auto_class, checkpoint, tmp_path):
    step, said = checkpoint
    for source, extra, out in ((step, arguments, tmp_path / "a"), (step / role, [], tmp_path / "b")):
        assert main([str(source), str(out), *extra]) == 0
        model, report = auto_class.from_pretrained(out, output_loading_info=True)
        assert not any(report.values())
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=IDS).logits, said[role], rtol=1e-4, atol=1e-5)
        assert AutoTokenizer.from_pretrained(out).chat_template
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def names(folder):
    with safe_open(folder / "model.safetensors", "pt") as opened:
        return sorted(opened.keys())


def test_a_tied_head_is_written_once_as_in_the_folder_that_the_model_came_from(checkpoint, tmp_path, capfd):
    step, _ = checkpoint
    assert main([str(step), str(tmp_path / "out")]) == 0
    printed = capfd.readouterr()
    wrote, to_try, command = printed.out.splitlines()
    assert (wrote, to_try, printed.err) == (f"wrote {tmp_path / 'out'}", "to try it:", ""), "no bar"
    *called, code = shlex.split(command)
    exec(code)
    assert called == ["python", "-c"] and "'role': 'assistant'" in capfd.readouterr().out
    assert names(tmp_path / "out") == names(step.parent / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tie_word_embeddings


def test_weights_that_are_no_longer_equal_are_both_written(tmp_path):
    model, tokenizer = make_tiny(TinyModelConfig(32, 48, 2, 2))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["lm_head.weight"] += 1
    FolderParts.of(model, "lm", tokenizer).write_with_weights(tmp_path, weights)
    assert "lm_head.weight" in names(tmp_path)


def test_adapters_alone_load_with_peft_and_say_the_same(checkpoint, tmp_path, capsys):
    step, said = checkpoint
    assert main([str(step), str(tmp_path / "adapters"), "--adapters"]) == 0
    tiny = TinyModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    model, _ = make_tiny(tiny)
    model.load_state_dict(base_of(step / "actor"), strict=False)  # the fixture has changed the base too
    with torch.no_grad():
        logits = PeftModel.from_pretrained(model, tmp_path / "adapters")(input_ids=IDS).logits
    torch.testing.assert_close(logits, said["actor"], rtol=1e-4, atol=1e-5)
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters")  # by the path of the base in adapter_config.json
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(step.parent / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "adapters").chat_template
    assert main([str(step / "critic"), str(tmp_path / "none"), "--adapters"]) == 2
    assert "got no adapters" in capsys.readouterr().err


def base_of(folder):
    weights = load_all(folder / "model")
    return {name.replace(".base_layer.", "."): tensor for name, tensor in weights.items() if ".lora_" not in name}


def test_a_model_read_in_bf16_is_exported_in_bf16_and_by_a_key_in_fp32(checkpoint, tmp_path, capsys):
    actor = shutil.copytree(checkpoint[0] / "actor", tmp_path / "actor")
    card = actor / "card" / "config.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "dtype": "bfloat16"}))
    (actor / MANIFEST).unlink()
    seal(actor, {})
    assert main([str(actor), str(tmp_path / "short")]) == 0
    said = f"wrote {tmp_path}/short (in bf16, the type of the model before training; --dtype fp32 keeps all digits)\n"
    assert capsys.readouterr().out.startswith(said)
    assert main([str(actor), str(tmp_path / "long"), "--dtype", "fp32"]) == 0
    short, long = (load_file(tmp_path / name / "model.safetensors") for name in ("short", "long"))
    assert all(torch.equal(short[name], long[name].bfloat16()) for name in long)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "short", dtype="auto").dtype == torch.bfloat16


def test_a_card_of_another_shape_is_refused(checkpoint, tmp_path, capsys):
    actor = shutil.copytree(checkpoint[0] / "actor", tmp_path / "actor")
    card = actor / "card" / "config.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "intermediate_size": 64}))
    (actor / MANIFEST).unlink()
    seal(actor, {})
    assert main([str(actor), str(tmp_path / "out")]) == 2
    assert "the weights are not those of this" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [[], ["--adapters"]])
def test_who_may_read_a_folder_may_read_all_files_in_it(arguments, checkpoint, tmp_path):
    before = os.umask(0o027)
    try:
        assert main([str(checkpoint[0]), str(tmp_path / "out"), *arguments]) == 0
    finally:
        os.umask(before)
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "out").iterdir()}
    assert any("safetensors" in name for name in modes) and set(modes.values()) == {"0o640"}, modes


def test_a_folder_in_use_is_not_overwritten(checkpoint, tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    assert main([str(checkpoint[0]), str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--adapters"]])
def test_a_folder_that_cannot_be_written_is_named_with_what_to_do_after(arguments, checkpoint, capsys):
    assert main([str(checkpoint[0]), "/proc/rlx", *arguments]) == 2
    assert "cannot write /proc/rlx: " in (said := capsys.readouterr().err)
    assert said.endswith("; correct that, then export again\n")


def test_what_is_no_checkpoint_is_named(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert f"{tmp_path / 'nowhere'}: does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty"), str(tmp_path / "out")]) == 2
    assert "checkpoint.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_card_that_cannot_be_read_is_named(checkpoint, tmp_path, capsys):
    shutil.copytree(checkpoint[0] / "actor", tmp_path / "actor")
    (tmp_path / "actor" / "card" / "config.json").write_text("{")
    assert main([str(tmp_path / "actor"), str(tmp_path / "out")]) == 2
    assert str(tmp_path / "actor" / "card") in capsys.readouterr().err


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_of_a_damaged_checkpoint_another_of_the_run_is_named(checkpoint, tmp_path, capsys):
    for step in (2, 10):
        shutil.copytree(checkpoint[0] / "actor", tmp_path / f"global_step_{step}" / "actor")
    [weights] = (tmp_path / "global_step_10/actor/model").iterdir()
    weights.write_bytes(flip(weights.read_bytes(), 5000))
    assert main([str(tmp_path / "global_step_10"), str(tmp_path / "out")]) == 2
    assert f"; take another one, such as {tmp_path}/global_step_2\n" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "global_step_2")
    assert main([str(tmp_path / "global_step_10"), str(tmp_path / "out")]) == 2
    assert "; take a copy of it, or another checkpoint\n" in capsys.readouterr().err


def test_a_step_that_does_not_exist_is_named_with_those_that_do(tmp_path, capsys):
    for step in (100, 20):
        (tmp_path / f"global_step_{step}").mkdir()
    assert main([str(tmp_path / "global_step_30"), str(tmp_path / "out")]) == 2
    assert f"global_step_30: does not exist; {tmp_path} has global_step_20, global_step_100" in capsys.readouterr().err


def test_a_role_that_was_not_saved_is_named_with_those_that_were(tmp_path, capsys):
    step, out = tmp_path / "global_step_12", str(tmp_path / "out")
    for role in ("actor", "reward"):
        (step / role).mkdir(parents=True)
        (step / role / MANIFEST).touch()
    for arguments in ([str(step / "critic"), out], [str(step), out, "--role", "critic"]):
        assert main(arguments) == 2
        said = f"{step}/critic: does not exist; the run saved no critic, {step} has actor, reward\n"
        assert capsys.readouterr().err == f"python -m rlx.export: {said}"


def test_where_no_run_is_none_is_described(tmp_path, capsys):
    for folder in (tmp_path / "nope", tmp_path / "nowhere" / "global_step_12" / "actor"):
        assert main([str(folder), str(tmp_path / "out")]) == 2
        assert f"{folder}: does not exist; name a global_step_N of a run\n" in capsys.readouterr().err


def test_a_runs_folder_is_answered_with_its_checkpoints(tmp_path, capsys):
    saved = tmp_path / "checkpoints"
    for step in (100, 20):
        (saved / f"global_step_{step}").mkdir(parents=True)
    for folder in (tmp_path, saved):
        assert main([str(folder), str(tmp_path / "out")]) == 2
        told = f"{folder}: holds checkpoints, expected one of them: {saved}/global_step_20, {saved}/global_step_100"
        assert told in capsys.readouterr().err
