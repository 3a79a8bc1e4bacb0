import copy
import pickle
import re
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlx.offload import OffloadOptions, OffloadStats, enable_activation_offloading, offload_activations


def anatomy(model):
    modules = {name: (type(module), sorted(vars(module))) for name, module in model.named_modules()}
    return modules, list(model.state_dict())


@pytest.mark.parametrize("enable_ckpt", [True, False])
def test_disable_leaves_the_model_as_it_was(toys, enable_ckpt):
    model = toys.stack()
    own = model.layers[1].forward = model.layers[1].forward
    before = anatomy(model)
    handle = enable_activation_offloading(model, enable_ckpt, OffloadOptions(min_bytes=0))
    assert list(model.state_dict()) == before[1]
    assert [n for n, _ in model.named_modules()] == list(before[0])
    toys.step(model).backward()
    handle.disable()
    handle.disable()
    assert anatomy(model) == before
    assert model.layers[1].forward is own
    offloaded = handle.stats().offloaded_bytes
    toys.step(model).backward()
    assert handle.stats().offloaded_bytes == offloaded > 0


def test_a_wrapper_put_around_an_enabled_forward_outlives_it(toys):
    model = toys.stack()
    expected = toys.grade(copy.deepcopy(model), toys.step)
    handle = enable_activation_offloading(model, True, OffloadOptions(min_bytes=0))
    enabled = model.layers[0].forward
    model.layers[0].forward = lambda x: enabled(x)
    expected.assert_equal(toys.grade(model, toys.step))
    handle.disable()
    offloaded = handle.stats().offloaded_bytes
    expected.assert_equal(toys.grade(model, toys.step))
    assert handle.stats().offloaded_bytes == offloaded


def test_twice_with_equal_options_is_one_handle_and_with_others_an_error(toys, enable):
    model = toys.stack()
    handle = enable(model, True)
    assert enable_activation_offloading(model, True, OffloadOptions(min_bytes=0)) is handle
    for enable_ckpt, options, layers, difference in [
        (True, OffloadOptions(min_bytes=1), None, "min_bytes: 0, now 1"),
        (False, OffloadOptions(min_bytes=0), None, "save: 'boundary', now 'all'"),
        (True, OffloadOptions(min_bytes=0), ["layers.0"], "layers: 3, now 1, of which 1 are enabled"),
    ]:
        with pytest.raises(ValueError, match=r"disable\(\)") as refused:
            enable_activation_offloading(model, enable_ckpt, options, layers)
        assert re.search(r"options \((.*?)\);", str(refused.value))[1] == difference
    handle.disable()
    other = enable(model, False)
    assert other is not handle


def test_a_trainer_in_place_of_its_model_is_refused_with_the_remedy(toys):
    class Trainer:
        model = toys.stack()

    with pytest.raises(TypeError, match=r"got Trainer, expected a torch\.nn\.Module; pass its attribute model$"):
        enable_activation_offloading(Trainer())
    with pytest.raises(TypeError, match=r"got list, expected .*; pass the model$"):
        enable_activation_offloading([])


@pytest.mark.parametrize(
    "arguments",
    [
        {"options": "attention"},
        {"options": {"save": "all"}},
        {"enable_ckpt": "auto"},
        {"enable_ckpt": OffloadOptions()},
    ],
    ids=str,
)
def test_options_in_the_wrong_form_are_refused_with_what_to_write(toys, arguments):
    name = next(iter(arguments))
    with pytest.raises(TypeError, match=rf"{name}: got .*, expected .* options=OffloadOptions\("):
        enable_activation_offloading(toys.stack(), **arguments)
    if name == "options":
        with pytest.raises(TypeError, match="options: got"), offload_activations(**arguments):
            pass


def test_an_enabled_model_is_not_pickled(toys, enable):
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    handle = enable(model, True, layers=["0", "1", "2"])
    with pytest.raises(TypeError, match=r"disable\(\)"):
        pickle.dumps(model)
    handle.disable()
    pickle.dumps(model)


def test_stats_per_layer_and_per_step(toys, enable):
    model = toys.stack()
    handle = enable(model, True)
    toys.step(model).backward()
    first = handle.stats(per_layer=True)
    assert list(first.layers) == ["layers.0", "layers.1", "layers.2"]
    assert sum(layer.offloaded_bytes for layer in first.layers.values()) == first.offloaded_bytes
    assert sum(layer.recomputed_ms for layer in first.layers.values()) == pytest.approx(first.recomputed_ms)
    assert first.copy_gb_per_s > 0
    assert first.overlap == 0.0  # synchronous copies
    toys.step(model).backward()
    step = handle.stats(per_layer=True).since(first)
    assert step.offloaded_bytes == first.offloaded_bytes
    assert step.layers["layers.1"].offloaded_bytes == first.layers["layers.1"].offloaded_bytes
    assert step.reserved_bytes == handle.stats().reserved_bytes
    assert OffloadStats().overlap == 0.0  # nothing moved, nothing hidden
    layer = first.layers["layers.0"]
    offloaded, kept = f"offloaded {layer.offloaded_bytes} bytes", f"kept {layer.kept_bytes} bytes"
    assert f"layers.0: {offloaded}, {kept}, recomputed {layer.recomputed_ms:.1f} ms" in str(first).splitlines()


def test_a_dropped_model_is_freed_without_the_garbage_collector(toys):
    import gc
    import weakref

    model = toys.stack()
    model.layers[0].gradient_checkpointing = True
    enable_activation_offloading(model, True, OffloadOptions(min_bytes=0))
    reference = weakref.ref(model.layers[0])
    gc.disable()
    try:
        del model
        assert reference() is None
    finally:
        gc.enable()


def checkpoint(model, use_reentrant=False):
    """transformers' own recomputation, whose method has two names."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def qwen(layers=3):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=32, num_hidden_layers=layers, **sizes)).train()
    calls = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    return model, calls


def causal_step(model):
    ids = torch.arange(16).reshape(2, 8)
    return model(ids, labels=ids, use_cache=False).loss


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("enable_ckpt", [True, False])
def test_checkpointing_that_a_trainer_switches_on_later_gives_way(toys, enable, caplog, enable_ckpt, use_reentrant):
    model, calls = qwen()
    expected = toys.grade(copy.deepcopy(model), causal_step)
    handle = enable(model, enable_ckpt)
    for _ in range(2):  # TRL's GRPO switches it on again after each rollout
        checkpoint(model, use_reentrant)
        expected.assert_equal(toys.grade(model, causal_step))
    (record,) = caplog.records
    assert "gradient checkpointing of transformers is switched off" in record.getMessage()
    assert ("enable_ckpt=False" in record.getMessage()) is not enable_ckpt
    # Not before now: older transformers checkpoint `__call__`, around the engine, which learns of it in the first layer.
    calls.clear()
    expected.assert_equal(toys.grade(model, causal_step))
    assert len(calls) == 3 * (2 if enable_ckpt else 1)
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    handle.disable()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_checkpointing_switched_on_between_forward_and_backward_does_not_nest(toys, enable):
    model, calls = qwen()
    expected = toys.grade(copy.deepcopy(model), causal_step)
    enable(model, True)
    calls.clear()

    def step(model):
        loss = causal_step(model)
        checkpoint(model)
        return loss

    expected.assert_equal(toys.grade(model, step))
    assert len(calls) == 6


def test_checkpointing_of_modules_that_are_no_layers_of_the_engine_stays(enable):
    model, _ = qwen(layers=4)
    checkpoint(model)
    enable(model, True, layers=["model.layers.0", "model.layers.1", "model.layers.2"])
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [False, False, False, True]
    causal_step(model).backward()
    assert model.model.layers[3].gradient_checkpointing


@pytest.mark.parametrize("enable_ckpt", [True, False])
@pytest.mark.parametrize("what", ["model", "layers"])
def test_a_compiled_model_runs_its_enabled_layers_uncompiled_and_says_so_once(toys, enable, what, enable_ckpt, caplog):
    model = toys.stack()
    expected = toys.grade(copy.deepcopy(model), toys.step)
    handle = enable(model, enable_ckpt)
    toys.grade(model, toys.step)
    assert not caplog.records
    for module in [model] if what == "model" else model.layers:
        module.compile(backend="aot_eager")
    toys.grade(model, toys.step)
    graded = toys.grade(model, toys.step)
    (record,) = (record for record in caplog.records if record.name == "rlx.offload")
    assert "run uncompiled" in record.getMessage()
    for name, grad in expected.grads.items():
        torch.testing.assert_close(graded.grads[name], grad)
    assert handle.stats().offloaded_bytes > 0
    torch.compiler.reset()


def test_a_line_says_once_why_nothing_left_the_device(toys, caplog):
    model = toys.stack()
    handle = enable_activation_offloading(model, enable_ckpt=True)  # default options: these tensors are small
    with caplog.at_level("WARNING", logger="rlx.offload"):
        for _ in range(3):
            toys.grade(model, toys.step)
    assert handle.stats().offloaded_bytes == 0
    (line,) = [record.getMessage() for record in caplog.records if "nothing left" in record.getMessage()]
    assert re.search(r"in the first pass: .* has [\d,]+ bytes, below options\.min_bytes of 1,048,576", line)
    assert "OffloadOptions(min_bytes=0)" in line


def test_attention_that_is_not_known_is_named_once(enable, caplog):
    eager, _ = qwen()
    eager.set_attn_implementation("eager")
    enable(eager, True, save="attention")
    causal_step(eager).backward()
    (record,) = caplog.records
    assert re.search("layer 'model.layers.0', which .*attn_implementation='sdpa'", record.getMessage())


def test_what_may_wait_in_host_memory_beside_buffers_for_the_disk():
    assert OffloadOptions().host_bytes is None
    assert OffloadOptions(max_host_bytes=5).host_bytes == 5
    assert OffloadOptions(tier="disk", directory="/tmp").host_bytes == 0
    both = OffloadOptions(max_host_bytes=1 << 30, directory="/tmp")
    assert both.host_bytes == (1 << 30) - 24 * both.staging_chunk_bytes


def test_the_disk_tier_needs_a_folder_which_a_driver_may_lack():
    with pytest.raises(ValueError, match="no usable folder: got directory=None"):
        OffloadOptions(tier="disk")
    options = OffloadOptions(tier="disk", directory="/no/such/folder")
    assert options.uses_disk
    assert options == pickle.loads(pickle.dumps(options))


def test_planning_and_options_do_not_load_torch():
    code = "import sys, rlx.offload.plan.run_memory, rlx.offload.plan.explain; rlx.offload.OffloadOptions(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
