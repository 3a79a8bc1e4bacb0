"""`python -m rlx.offload.plan`: what it prints, writes and refuses."""

import json
import re

import pytest
from transformers import Qwen3Config

from rlx.offload.plan.decoder import read_decoder
from rlx.offload.plan.hardware import PROFILES
from rlx.offload.plan.run_memory import PLANNED_MODES, STEP_TOKENS, ModelMemory, Scenario
from rlx.offload.plan.shapes import SHAPES
from rlx.offload.plan_command import main


@pytest.fixture
def plan(tmp_path, capsys):
    """`plan(*arguments)`: what is printed and written, and the exit status."""

    def run(*arguments):
        file = tmp_path / "plan.json"
        status = main([*arguments, "--out", str(file)])
        return capsys.readouterr().out, json.loads(file.read_text()), status

    return run


@pytest.fixture
def refusal(capsys):
    """`refusal(*arguments)`: the message with which the command ends."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        return capsys.readouterr().err.splitlines()[-1] + "\n"

    return run


def test_a_small_model_fits_as_it_is(plan):
    printed, written, status = plan("--model", "tiny", "--tokens", "512")
    assert status == 0
    assert written["modes"]["auto"]["step_s"] == written["modes"]["plain"]["step_s"]
    assert [layer["keep"] for layer in written["layers"]] == [True] * 9
    assert "nothing is left to recompute" in printed


def test_what_does_not_fit_is_said(plan):
    printed, written, status = plan(
        *("--model", "qwen2-7b", "--tokens", "100000", "--hardware", "rtx4090", "--host-gb", "8", "--states-gb", "16")
    )
    assert status == 1
    assert "DOES NOT FIT" in printed
    assert not any(mode["fits"] for mode in written["modes"].values())


def test_arguments_change_the_machine_and_the_steps(plan):
    base = ("--model", "qwen2-7b", "--layers", "6", "--tokens", "16384", "--weight-bytes", "2", "--logit-tokens", "0")
    _, usual, _ = plan(*base)
    assert len(usual["layers"]) == 6
    _, fast, _ = plan(*base, "--device-gb", "40", "--link-gb-per-s", "400", "--host-gb", "30")
    assert (fast["hardware"]["device_bytes"], fast["hardware"]["link_bytes_per_s"]) == (40e9, 400e9)
    _, shorter, _ = plan(*base, "--sequences", "8")
    assert shorter["modes"]["plain"]["step_s"] < usual["modes"]["plain"]["step_s"]
    assert shorter["modes"]["plain"]["peak_bytes"] == usual["modes"]["plain"]["peak_bytes"]
    _, with_head, _ = plan(*base[:-2])
    assert with_head["modes"]["plain"]["step_s"] > usual["modes"]["plain"]["step_s"]


def test_the_longest_context_fits_and_one_step_more_does_not(plan):
    arguments = ("--model", "qwen2-7b", "--tokens", "1024", "--hardware", "a100-40", "--gpus", "8")
    printed, written, _ = plan(*arguments, "--longest")
    setting = Scenario(ModelMemory(read_decoder(SHAPES["qwen2-7b"]), shards=8), PROFILES["a100-40"])
    longest = written["longest_tokens"]
    assert list(longest) == list(PLANNED_MODES)
    for mode, tokens in longest.items():
        assert setting.fits(setting.plan(mode, tokens))
        assert not setting.fits(setting.plan(mode, tokens + STEP_TOKENS))
        assert re.search(rf"^{mode} +{tokens} ", printed, re.MULTILINE)
    assert longest["plain"] < longest["checkpointing"] < longest["boundary"] <= longest["auto"]


def test_without_tokens_it_is_the_longest_with_the_peak_of_each_phase(plan):
    small = ("--model", "qwen2-7b", "--layers", "4", "--weight-bytes", "2", "--device-gb", "30", "--host-gb", "20")
    printed, written, status = plan(*small, "--tile", "auto", "--optimizer-on-host")
    auto = written["modes"]["auto"]
    assert status == 0
    assert written["arguments"]["tokens"] == written["longest_tokens"]["auto"]
    assert "optimizer" not in written["memory_bytes"]
    assert max(auto["peaks"].values()) <= 0.94 * 30e9
    assert re.search(r"^peak of all.*forward +head +backward +optimizer step$", printed, re.MULTILINE)
    _, shared, _ = plan(*small, "--tile", "auto", "--optimizer-on-host", "--shared-by", "2")
    assert shared["arguments"]["tokens"] > 1.5 * written["arguments"]["tokens"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--model", "qwen2-7b", "--device-gb", "65", "--weight-bytes", "2"),
            ("not even 1024 tokens", "; 1024 tokens fit with --optimizer-on-host or --lora-rank 16 or --gpus 2\n"),
        ),
        (
            ("--model", "llama3-70b", "--tokens", "1024"),
            ("no room for activations", "; 1024 tokens fit with --gpus 16\n"),
        ),
        (("--model", "llama3-70b", "--tokens", "10000000"), ("no room", "; neither ", "fewer --tokens")),
        (("--model", "/nowhere", "--tokens", "1024"), ("/nowhere, which does not exist; expected one of tiny, ",)),
        (("--model", "qwen2-7"), ("which the hub did not give", "qwen2-7b, ", "; did you mean qwen2-7b?")),
        (("--model", "tiny", "--tokens", "0"), ("got '0'", "at least 1")),
        (("--model", "tiny", "--tokens", "1", "--hardware", "1x24gb"), ("one of a100-40, ", "--device-gb 24")),
        (("--model", "tiny", "--tokens", "1", "--hardware", "8xH100"), ("--hardware h100 --gpus 8",)),
        (("--model", "tiny", "--tokens", "1", "--out", "/nowhere/plan.json"), ("cannot be written",)),
        (("--model", "tiny", "--tokens", "8", "--measure", "--shared-by", "2"), ("--shared-by", "leave")),
    ],
)
def test_bad_input_is_refused(refusal, arguments, words):
    message = refusal(*arguments)
    assert all(word in message for word in words), message


def test_what_the_refusal_names_fits(refusal, plan):
    base = ("--model", "qwen2-7b", "--tokens", "32768", "--hardware", "h100")
    remedies = refusal(*base).split("32768 tokens fit with ")[1].split(" or ")
    assert [remedy.split()[0] for remedy in remedies] == [
        "--optimizer-on-host",
        "--weight-bytes",
        "--lora-rank",
        "--gpus",
    ]
    for remedy in remedies:
        _, written, _ = plan(*base, *remedy.split())
        assert written["modes"]["boundary"]["fits"]


def test_a_disk_takes_what_the_host_has_no_room_for(plan):
    base = ("--model", "qwen2-7b", "--layers", "6", "--tokens", "16384", "--weight-bytes", "2", "--host-gb", "0.5")
    base = (*base, "--device-gb", "30")
    _, without, _ = plan(*base)
    printed, with_disk, _ = plan(*base, "--disk-gb-per-s", "20")
    assert without["modes"]["auto"]["disk_bytes"] == 0 < with_disk["modes"]["auto"]["disk_bytes"]
    assert with_disk["modes"]["auto"]["step_s"] < without["modes"]["auto"]["step_s"]
    assert ", disk " in printed


def test_layers_are_measured_on_the_machine_at_hand(plan):
    printed, written, status = plan(
        "--model", "tiny", "--tokens", "512", "--sequences", "2", "--measure", "--host-gb", "1"
    )
    assert status == 0
    measured = written["measured"]
    assert (measured["device"], measured["layers"]) == ("CPU", 3)
    (kind,) = measured["measurement"]["kinds"]
    assert kind["members"] == [0, 1, 2] and kind["cost"]["boundary_bytes"] == 512 * 64 * 2
    assert measured["plan"]["step_s"] > 0
    assert re.search(r"^measured: 3 layers in bf16 on CPU", printed, re.MULTILINE)
    assert re.search(r"^0 +measured( +[\d.]+){5}$", printed, re.MULTILINE)
    assert re.search(r"^0 +computed( +[\d.]+){5}$", printed, re.MULTILINE)
    assert "x plain" in printed.split("auto, from what was measured:")[1]


def test_each_kind_of_layer_is_measured(plan, tmp_path):
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
    Qwen3Config(
        **sizes,
        vocab_size=5000,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=4000,
        layer_types=types,
        use_sliding_window=True,
        sliding_window=32,
        max_window_layers=0,
    ).save_pretrained(tmp_path / "model")
    _, written, _ = plan("--model", str(tmp_path / "model"), "--tokens", "128", "--measure", "--tile", "64")
    assert [kind["members"] for kind in written["measured"]["measurement"]["kinds"]] == [[0, 1], [2]]
