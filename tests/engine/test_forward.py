"""What a model says of packed sequences is what it says of padded ones, with its head's log-probs or through logits."""

import logging

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.overrides import TorchFunctionMode

from rlx.config.schema import ModelConfig
from rlx.data.batch import Batch
from rlx.engine.build import build_model
from rlx.engine.forward import Distribution, Forward
from rlx.engine.micro_batches import SequenceGroup, pack, row_lengths, take
from rlx.models.loading import ModelError
from rlx.models.packed_attention import PACKED, packed_attention
from rlx.models.prefix_tree import NEVER
from rlx.offload import OffloadOptions, enable_activation_offloading, register_attention
from tests.tiny_models import config_of, tiny_model

P, R, VOCAB = 5, 8, 61
SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SHAPE = {**SMALL, **HEADS}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LAYERS = ["sliding_attention", "full_attention"]

LANGUAGE_MODELS = {
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, sliding_window=3)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SHAPE, sliding_window=4, layer_types=LAYERS)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SHAPE, **EXPERTS)),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(_deepseek()),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4)),
}
VALUE_MODELS = {
    "qwen2": lambda: hf.Qwen2ForTokenClassification(hf.Qwen2Config(**SHAPE, num_labels=1, classifier_dropout=0.0)),
    "mistral": lambda: hf.MistralForTokenClassification(
        hf.MistralConfig(**SHAPE, sliding_window=3, num_labels=1, classifier_dropout=0.0)
    ),
    "gpt2": lambda: hf.GPT2ForTokenClassification(
        hf.GPT2Config(
            vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, num_labels=1, classifier_dropout=0.0
        )
    ),
}


def _deepseek():
    """Queries and keys of another width than values."""
    width = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return hf.DeepseekV3Config(**SMALL, **heads, **width, **experts, first_k_dense_replace=1)


def made(make, dtype=torch.float32, attention="sdpa"):
    """The model with weights far from 0, so that attention looks at single tokens."""
    torch.manual_seed(0)
    model = make().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3).add_(0.02 * torch.randn_like(parameter))
    model.set_attn_implementation(attention)
    return model


@pytest.fixture(scope="module")
def batch():
    """Ragged rows, among them a full one, one with a response of one token and one without."""
    g = torch.Generator().manual_seed(0)
    prompts, responses = torch.tensor([[P], [2], [1], [3]]), torch.tensor([[R], [1], [7], [0]])
    mask = torch.cat([torch.arange(P) >= P - prompts, torch.arange(R) < responses], dim=1)
    ids = torch.randint(3, VOCAB, (4, P + R), generator=g).masked_fill(~mask, 0)
    return Batch.of({"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, P:]})


@pytest.fixture(scope="module")
def groups():
    """A group of three rows, two of whose responses begin alike and one is empty, and a group of two that has a longer prompt."""
    g = torch.Generator().manual_seed(0)
    prompts, responses = torch.tensor([[3], [3], [3], [P], [P]]), torch.tensor([[R], [0], [5], [1], [6]])
    mask = torch.cat([torch.arange(P) >= P - prompts, torch.arange(R) < responses], dim=1)
    ids = torch.randint(3, VOCAB, (5, P + R), generator=g)
    ids[:3, :P], ids[3:, :P], ids[2, P : P + 2] = ids[0, :P], ids[3, :P], ids[0, P : P + 2]
    return Batch.of({"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask, "response_mask": mask[:, P:]})


class KeepsFp64(TorchFunctionMode):
    """Ignores casts from fp64 to fp32, which models make in norms and routers.

    A token's gradients reach a norm as one sum if rows share the token. So rounding would not be that of separate rows.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if isinstance(args[0] if args else None, torch.Tensor) and args[0].dtype == torch.float64:
            if function is torch.Tensor.float or (
                function in (torch.Tensor.to, torch.Tensor.type) and args[1:] == (torch.float32,)
            ):
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def said(forward, batch, distribution, least_gain=NEVER):
    """For each row the figures of its response, and their gradient by way of the parameters."""
    lengths = row_lengths(batch)
    rows = [2, 0, 3, 1, *range(4, len(batch))]
    part = pack(batch, rows, lengths, least_gain) if forward.packs else take(batch, rows, lengths)
    figures = forward(part, distribution)
    of_row = {
        name: [x[i, part.lead[i] :][: lengths[row].response] for i, row in enumerate(part.rows)]
        for name, x in figures.items()
    }
    weights = torch.arange(1.0, R + 1)
    loss = sum((x * weights[: len(x)]).sum() for rows in of_row.values() for x in rows)
    model = forward._plain
    model.zero_grad()
    loss.backward()
    gradient = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()])
    return {name: torch.cat(rows).detach() for name, rows in of_row.items()}, gradient


def agree(model, batch, distribution):
    padded = said(Forward(model, model, torch.device("cpu"), None), batch, distribution)
    packs = Forward(model, model, torch.device("cpu"), "sdpa")
    packed = said(packs, batch, distribution)
    assert packs.packs and model.config._attn_implementation == PACKED
    assert padded[0].keys() == packed[0].keys()
    for name, figures in padded[0].items():
        assert len(figures) == 16
        torch.testing.assert_close(packed[0][name], figures, rtol=0, atol=1e-5)
    assert (packed[1] - padded[1]).norm() <= 1e-5 * padded[1].norm()
    return padded[0]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_packed_language_models_say_what_padded_ones_say(name, batch):
    figures = agree(made(LANGUAGE_MODELS[name]), batch, Distribution(0.7, with_entropy=True))
    assert figures.keys() == {"log_probs", "entropy"} and figures["log_probs"].std() > 0.5


@pytest.mark.parametrize("name", VALUE_MODELS)
def test_packed_value_models_say_what_padded_ones_say(name, batch):
    assert agree(made(VALUE_MODELS[name]), batch, None).keys() == {"values"}


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *(f"value {name}" for name in VALUE_MODELS)])
def test_prompts_that_are_computed_once_say_what_rows_say(name, groups):
    is_value = name.startswith("value ")
    model = made(VALUE_MODELS[name.removeprefix("value ")] if is_value else LANGUAGE_MODELS[name], torch.float64)
    model.set_experts_implementation("eager")  # torch's grouped products know no fp64
    forward = Forward(model, model, torch.device("cpu"), "sdpa")
    distribution = None if is_value else Distribution(0.7, with_entropy=True)
    with KeepsFp64():
        rows, tree = (said(forward, groups, distribution, least_gain) for least_gain in (NEVER, 0.0))
    assert forward.shares_prefixes
    for figure, of_rows in rows[0].items():
        assert len(of_rows) == 20
        torch.testing.assert_close(tree[0][figure], of_rows, rtol=0, atol=1e-10)
    assert (tree[1] - rows[1]).norm() <= 1e-10 * rows[1].norm()


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


OTHER_MODELS = {
    "gemma2": (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SHAPE, layer_types=LAYERS)), "sdpa", "caps its scores"),
    "lfm2": (
        lambda: hf.Lfm2ForCausalLM(hf.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])),
        "sdpa",
        "layers of type conv",
    ),
    "falcon": (
        lambda: hf.FalconForCausalLM(hf.FalconConfig(**SMALL, num_attention_heads=4, alibi=True)),
        "sdpa",
        "not open",
    ),
    "qwen2_moe": (
        lambda: hf.Qwen2MoeForCausalLM(
            hf.Qwen2MoeConfig(**SHAPE, use_sliding_window=True, sliding_window=64, layer_types=LAYERS, num_experts=4)
        ),
        "sdpa",
        "window in its masks alone",
    ),
    "bidirectional": (
        lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**SHAPE, layer_types=LAYERS, use_bidirectional_attention=True, sliding_window=8)
        ),
        "sdpa",
        "its attention ",
    ),
    "roberta": (lambda: hf.RobertaForCausalLM(_bert(hf.RobertaConfig)), "sdpa", "positions do not begin at 0"),
    "eager": (LANGUAGE_MODELS["qwen2"], "eager", "no kernel"),
}


def _bert(config, is_decoder=True, padding=1):
    return config(**SMALL, num_attention_heads=4, is_decoder=is_decoder, pad_token_id=padding)


@pytest.mark.usefixtures("one_process")
def test_a_group_that_divides_not_all_names_the_sizes_that_do():
    with pytest.raises(ValueError, match=r"got 2 with 1 processes and 4 attention heads, .* set it to 1$"):
        SequenceGroup(2, hf.Qwen2Config(**SHAPE))


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
BY_LENGTH = {
    "longrope": lambda: hf.Phi3Config(
        **SHAPE,
        pad_token_id=0,
        max_position_embeddings=64,
        original_max_position_embeddings=P,
        rope_parameters={**LONGROPE, "original_max_position_embeddings": P},
    ),
    "dynamic": lambda: hf.LlamaConfig(
        **SHAPE, max_position_embeddings=P, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "dynamic, of one type of layer": lambda: hf.Gemma3TextConfig(
        **SHAPE,
        layer_types=LAYERS,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
        },
    ),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", BY_LENGTH)
def test_frequencies_that_follow_the_longest_sequence_are_told_and_not_shared(name, tmp_path, caplog):
    config, kind = BY_LENGTH[name](), name.split(",")[0]
    with pytest.raises(ValueError, match=rf"rope_type {kind}, .* Set ulysses_sequence_parallel_size=1$"):
        SequenceGroup(1, config)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    build_model(ModelConfig(path=str(tmp_path)), "lm", torch.float32, seed=0, trains=False, device=torch.device("cpu"))
    (message,) = [record.getMessage() for record in caplog.records if record.name == "rlx.engine.build"]
    assert f"rope_type {kind}" in message and "ppo_micro_batch_size_per_gpu=1" in message


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", OTHER_MODELS)
def test_what_cannot_be_packed_is_padded_and_told(name, caplog):
    make, attention, reason = OTHER_MODELS[name]
    model = make()
    before = model.config._attn_implementation
    with caplog.at_level(logging.WARNING):
        forward = Forward(model, model, torch.device("cpu"), attention)
        assert not forward.packs and not forward.packs
    assert model.config._attn_implementation == before
    (message,) = [record.getMessage() for record in caplog.records if record.name == "rlx.engine.forward"]
    assert "rows are padded because" in message and reason in message


@pytest.mark.usefixtures("one_process")
def test_positions_of_little_influence_are_noticed():
    model = OTHER_MODELS["roberta"][0]()
    model.roberta.embeddings.position_embeddings.weight.data.mul_(1e-6)
    forward = Forward(model, model, torch.device("cpu"), "sdpa")
    assert not forward.packs and forward.why_padded == "its positions do not begin at 0"


LOOKS_AHEAD = {
    "bert": lambda: hf.BertLMHeadModel(_bert(hf.BertConfig, is_decoder=False)),
    "gemma3": OTHER_MODELS["bidirectional"][0],
    "value": lambda: hf.BertForTokenClassification(hf.BertConfig(**SMALL, num_attention_heads=4, num_labels=1)),
    # Its outputs depend on the number of later tokens.
    "prophetnet": lambda: tiny_model(config_of("prophetnet"), torch.float32),
}


@pytest.mark.parametrize("name", LOOKS_AHEAD)
def test_a_model_that_looks_ahead_is_refused(name):
    model = made(LOOKS_AHEAD[name])
    with pytest.raises(ModelError, match=r"depends on later tokens, .* is_decoder=true"):
        Forward(model, model, torch.device("cpu"), "sdpa").require_causal()


def test_a_model_whose_forward_fails_is_refused():
    model = made(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SHAPE))).double()
    model.lm_head.float()
    with pytest.raises(ModelError, match=r"Qwen2ForCausalLM: its forward fails on four tokens \(RuntimeError: .*dtype"):
        Forward(model, model, torch.device("cpu"), None).require_causal()


@pytest.mark.usefixtures("one_process")
def test_a_configuration_without_padding_is_read(batch):
    config = hf.CodeGenConfig(vocab_size=VOCAB, n_positions=32, n_ctx=32, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    assert not hasattr(config, "pad_token_id")
    model = made(lambda: hf.CodeGenForCausalLM(config), attention="eager")
    forward = Forward(model, model, torch.device("cpu"), None)
    assert said(forward, batch, Distribution(1.0, with_entropy=False))[1].norm() > 0


def test_randomness_in_training_is_not_taken_for_looking_ahead(batch):
    model = made(
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4))
    )
    assert model.config.resid_pdrop > 0
    forward = Forward(model.train(), model, torch.device("cpu"), "sdpa")
    forward.require_causal()
    assert said(forward, batch, Distribution(1.0, with_entropy=False))[1].norm() > 0
    assert forward.packs and model.training and model.transformer.h[0].mlp.dropout.training


class Halving(hf.Qwen2ForCausalLM):
    """Changes its logits in place after the head."""

    def forward(self, logits_to_keep=0, **kwargs):
        output = super().forward(logits_to_keep=logits_to_keep, **kwargs)
        output.logits.mul_(0.5)
        return output


READS_LOGITS = {
    "in_place": lambda: Halving(hf.Qwen2Config(**SHAPE)),
    "roberta": OTHER_MODELS["roberta"][0],
    "trocr": lambda: hf.TrOCRForCausalLM(  # gives the logits of all tokens, whichever it is asked for
        hf.TrOCRConfig(vocab_size=VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48)
    ),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SHAPE, final_logit_softcapping=2.0)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**SMALL, num_attention_heads=4, logit_scale=0.5)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**SMALL, num_attention_heads=4)),
}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", READS_LOGITS)
def test_a_model_whose_head_cannot_be_replaced_is_read_by_its_logits(name, batch, caplog):
    model = made(READS_LOGITS[name], attention="eager" if name == "trocr" else "sdpa")
    with caplog.at_level(logging.WARNING):
        forward = Forward(model, model, torch.device("cpu"), "sdpa")
        figures, gradient = said(forward, batch, Distribution(0.7, with_entropy=True))
    assert "log-probs are computed from logits" in caplog.text
    lengths = row_lengths(batch)
    expected = []
    for row in [2, 0, 3, 1]:
        ids = batch["input_ids"][row][batch["attention_mask"][row]]
        logits = model(input_ids=ids[None]).logits[0, lengths[row].prompt - 1 : -1]
        every = (logits.float() / 0.7).log_softmax(-1)
        expected.append(every.gather(-1, ids[lengths[row].prompt :, None])[:, 0])
    torch.testing.assert_close(figures["log_probs"], torch.cat(expected).detach(), rtol=0, atol=1e-5)
    assert gradient.norm() > 0


class Upcasting(hf.Qwen2ForCausalLM):
    """Returns its logits in fp32, as Mamba does."""

    def forward(self, logits_to_keep=0, **kwargs):
        output = super().forward(logits_to_keep=logits_to_keep, **kwargs)
        output.logits = output.logits.float()
        return output


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_that_returns_its_logits_in_fp32_ends_with_its_head(dtype):
    model = made(lambda: Upcasting(hf.Qwen2Config(**SHAPE))).to(dtype)
    assert Forward(model, model, torch.device("cpu"), "sdpa")._head_ends_it


KEPT = [
    ("mistral", "boundary", "cpu"),
    ("mistral", "attention", "cpu"),
    ("qwen2", "all", "cpu"),
    ("mistral", "auto", "cpu"),
    ("qwen2", "attention", "disk"),
]


@pytest.mark.parametrize(("name", "save", "tier"), KEPT)
def test_offloading_changes_no_bit_of_prompts_that_are_computed_once(name, save, tier, groups, tmp_path):
    """Nor is attention over a tree, with a window or not, computed again where its results are kept."""
    register_attention(packed_attention)
    model, steps, calls = made(LANGUAGE_MODELS[name]), [], []
    options = OffloadOptions(save=save, tier=tier, min_bytes=0, directory=str(tmp_path) if tier == "disk" else None)
    for offloads in (False, True):
        handle = enable_activation_offloading(model, save != "all", options) if offloads else None
        forward = Forward(model, model, torch.device("cpu"), "sdpa")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(1 + (save == "auto") * 2):  # which measures first
                steps.append(said(forward, groups, Distribution(0.7, with_entropy=True), 0.0))
        names = [event.name for event in profile.events()]
        calls.append(names.count("aten::_scaled_dot_product_flash_attention_for_cpu"))
    (plain, gradient), (kept, gradient_kept) = steps[0], steps[-1]
    assert all(torch.equal(plain[figure], kept[figure]) for figure in plain) and torch.equal(gradient, gradient_kept)
    assert calls[0] > 0 and (save == "auto" or (calls[0] == calls[1]) == (save in ("attention", "all")))
    assert handle.stats().offloaded_bytes > 0
    handle.disable()
