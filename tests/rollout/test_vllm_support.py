"""What surrounds vLLM: options by type of model, memory, random states, outputs; no engine is started."""

import itertools
from types import SimpleNamespace

import numpy
import pytest
import torch

from rlx.rollout.protocol import EngineError, Request, Sampling
from rlx.rollout.vllm_support import (
    DeviceMemory,
    OwnRandomState,
    experts_of,
    graph_sizes,
    named_among,
    with_needs,
)

LFM2 = SimpleNamespace(model_type="lfm2", hidden_size=64, conv_dim=64)


@pytest.mark.parametrize("places", [1, 100, 1024])
def test_graphs_hold_all_places_and_some_of_a_prompt(places):
    sizes = graph_sizes(places)
    assert places in sizes and places + 450 <= sizes[-1] <= places + 512
    assert all(larger - size <= max(8, size / 8) for size, larger in itertools.pairwise(sizes))


def test_options_of_the_user_stay_beside_the_operators_of_lfm2():
    given = {"mode": 0, "custom_ops": ["none", "+rms_norm"]}
    options = {"compilation_config": given, "hf_overrides": {"a": 1}, "seed": 3}
    wanted = {"mode": 0, "custom_ops": ["none", "+rms_norm", "-rotary_embedding"]}
    found = with_needs(options, LFM2, torch.device("cpu"))
    overrides = {"a": 1, "block_dim": 64, "head_dtype": "float32"}
    assert found == {"compilation_config": wanted, "hf_overrides": overrides, "seed": 3}
    assert given["custom_ops"] == ["none", "+rms_norm"]
    assert with_needs(found, LFM2, torch.device("cpu")) == found  # no operator twice
    assert with_needs(options, LFM2, torch.device("cuda"))["compilation_config"] == given
    alone = with_needs({"hf_overrides": {}}, LFM2, torch.device("cpu"))
    assert alone["compilation_config"] == {"custom_ops": ["-rotary_embedding"]}
    mode = with_needs({"compilation_config": 0, "hf_overrides": {}}, LFM2, torch.device("cpu"))
    assert mode["compilation_config"] == {"mode": 0, "custom_ops": ["-rotary_embedding"]}, "a number is the mode"


def test_a_head_that_vllm_may_quantise_keeps_its_type():
    plain, quantised = (
        SimpleNamespace(model_type="llama"),
        SimpleNamespace(model_type="llama", quantization_config={"bits": 4}),
    )
    empty = {"hf_overrides": {}}
    assert with_needs(empty, plain, torch.device("cuda"))["hf_overrides"] == {"head_dtype": "float32"}
    for options, config in ((empty, quantised), ({**empty, "quantization": "fp8"}, plain)):
        assert with_needs(options, config, torch.device("cuda")) == options


def test_memory_is_counted_before_it_is_taken():
    memory = DeviceMemory(total=140_000_000_000, free=60_000_000_000, held=70_000_000_000)
    memory.require(0.42)
    with pytest.raises(
        ValueError,
        match=r"=0\.5 asks for 70\.0 GB .* 60\.0 of 140\.0 GB are free, .* hold 70\.0, and other processes and CUDA itself 10\.0\. "
        r"Set it to at most 0\.42, .*param_offload",
    ):
        memory.require(0.5)


def test_a_weight_that_a_module_names_as_its_own_has_arrived():
    expert, other = "layers.0.mlp.experts.routed_experts.w2_weight", "layers.1.mlp.experts.routed_experts.w2_weight"
    parameters = [expert, other, "layers.0.mlp.gate.weight", "norm.weight"]
    arrived = ["layers.0.mlp.experts.w2_weight", "norm.weight", "lm_head.weight"]
    assert named_among(parameters, arrived) == {expert, "norm.weight"}


def drawn():
    return torch.rand(3).tolist(), numpy.random.randint(0, 2**62, 3).tolist()


def test_own_random_state_goes_on_where_it_ended_and_leaves_the_process_as_it_was():
    def in_uses(state, *pauses):
        state.seed(7)
        found = []
        for pause in pauses:
            with state.in_use():
                found.append(drawn())
            for _ in range(pause):
                drawn()
        return found

    torch.manual_seed(1)
    numpy.random.seed(1)
    first = in_uses(OwnRandomState(), 0, 0, 0)
    after = drawn()
    torch.manual_seed(1)
    numpy.random.seed(1)
    assert drawn() == after, "nothing was drawn from the process"
    assert in_uses(OwnRandomState(), 3, 1, 2) == first and first[0] != first[1]


def test_numpys_generator_can_stay_the_processs_own():
    state = OwnRandomState()
    numpy.random.seed(1)
    expected = numpy.random.randint(0, 2**62, 6).tolist()
    numpy.random.seed(1)
    with state.in_use(with_numpy=False):
        first, of_process = drawn()
    assert of_process == expected[:3]
    with state.in_use():
        second, own = drawn()
    assert second != first and own != expected[3:], "torch's stream goes on, numpy's own begins"
    assert drawn()[1] == expected[3:]


@pytest.mark.parametrize(("given", "kept"), [("uint8", torch.uint8), ("uint16", torch.int16)])
def test_experts_of_prompt_and_response_without_the_last_token(given, kept):
    request, experts = Request((1, 2), 0, Sampling(3)), numpy.arange(24).reshape(4, 3, 2).astype(given)

    def output(routed):
        return SimpleNamespace(token_ids=[7, 8, 9], routed_experts=routed)

    found = experts_of(request, output(experts))
    assert found.dtype == kept and found.tolist() == experts.tolist()
    for routed, said in (
        (None, "got none, expected those of 4 tokens"),
        (experts * 0, "recorded no experts, because its kernel does not report them"),
        (experts[1:], "got those of 3 tokens, expected those of 4 tokens"),
    ):
        with pytest.raises(EngineError, match=said):
            experts_of(request, output(routed))
