"""The routers of many kinds of models: they are found, leave results alone, and take other experts as if chosen themselves."""

import pytest
import torch

from rlx.models.experts import ExpertRouting, Pass, RoutingError, differing_layers, expert_loads, recorded
from tests.tiny_models import config_of, tiny_model

TOKENS = 7
MAINSTREAM = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe")
OTHERS = (
    *("qwen2_moe", "qwen3_next", "qwen3_5_moe", "gpt_oss", "llama4_text", "granitemoe", "dbrx", "jamba", "nemotron_h"),
    *(
        *("ernie4_5_moe", "minimax_m2", "hunyuan_v1_moe", "deepseek_v32", "afmoe", "lfm2_moe", "flex_olmo", "dots1"),
        "zaya",
    ),
)


class Watched:
    """A tiny model in fp64, whose routers are watched, and a forward of a few tokens."""

    def __init__(self, kind: str, **changes: object):
        config = config_of(kind)
        for name, value in changes.items():
            setattr(config.get_text_config(), name, value)
        torch.manual_seed(0)
        self.model = tiny_model(config, torch.float32)
        self.ids = torch.randint(3, 60, (1, TOKENS))
        self.routing = ExpertRouting(self.model, self.run, TOKENS)
        self.layers = config.get_text_config().num_hidden_layers

    @torch.no_grad()
    def run(self) -> torch.Tensor:
        return self.model(input_ids=self.ids, use_cache=False).logits

    def replayed(self, given: torch.Tensor) -> torch.Tensor:
        self.routing.now = Pass(given, replays=True)
        logits = self.run()
        self.routing.now = None
        return logits


@pytest.mark.parametrize("kind", [*MAINSTREAM, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
def test_a_family_records_and_replays(kind):
    watched = Watched(kind)
    plain, routing = watched.run(), watched.routing
    own = recorded(routing, watched.layers, watched.run)
    assert own.shape == (TOKENS, watched.layers, routing.chosen) and own.dtype == torch.uint8
    assert torch.equal(watched.replayed(own), plain), "its own experts change nothing"
    changed = watched.replayed((own + 1) % routing.experts)
    assert (changed - plain).abs().max() > 0.1, "other experts do"
    watched.routing.now = Pass((own + 1) % routing.experts, replays=True)
    watched.run()
    assert differing_layers(watched.routing.now.used, (own + 1) % routing.experts).max() == 0
    watched.routing.now = None
    assert torch.equal(watched.run(), plain), "and are gone afterwards"


@pytest.mark.parametrize("kind", ["phimoe", "jetmoe", "qwen3"])
def test_a_model_that_chooses_in_another_way_is_refused_by_name(kind):
    with pytest.raises(RoutingError, match=r"^\w+ForCausalLM: (its experts cannot be|got a model without)"):
        Watched(kind)


def of_router(watched: Watched, given: torch.Tensor):
    """The tokens that the first router reads, and what it answers if it is given experts."""
    seen = []
    router = watched.routing.routers[0]
    handle = router.module.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    watched.replayed(given)
    handle.remove()
    (hidden, (_, weights, indices)) = seen[0]
    return router.module, hidden.flatten(0, -2), weights, indices


def random_experts(watched: Watched) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    shape = (TOKENS, watched.layers, watched.routing.experts)
    return torch.rand(shape, generator=g).argsort(dim=-1)[..., : watched.routing.chosen].to(torch.uint8)


def test_gate_weights_of_a_softmax_are_those_of_the_routers_own_scores():
    watched = Watched("qwen3_moe", norm_topk_prob=True)
    given = random_experts(watched)
    router, hidden, weights, indices = of_router(watched, given)
    layer = watched.routing.routers[0].layer
    assert torch.equal(indices, given[:, layer].long())
    scores = (hidden @ router.weight.T).softmax(-1).gather(1, indices)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_gate_weights_of_a_sigmoid_with_a_bias_for_the_choice_alone():
    watched = Watched("deepseek_v3")
    given = random_experts(watched)
    router, hidden, weights, indices = of_router(watched, given)
    scores = (hidden @ router.weight.T).sigmoid().gather(1, indices)
    if router.norm_topk_prob:
        scores = scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, scores * router.routed_scaling_factor)


def test_experts_of_other_groups_keep_their_weights():
    """A router of groups gives the experts of groups that it does not choose the score 0."""
    watched = Watched("deepseek_v2", topk_method="group_limited_greedy", n_group=2, topk_group=1, num_experts_per_tok=2)
    given = torch.tensor([0, 1, 2, 3]).view(2, 1, 1, 2).expand(2, 4, watched.layers, 2).flatten(0, 1)[:TOKENS]
    router, hidden, weights, indices = of_router(watched, given)
    scores = (hidden @ router.weight.T).softmax(-1)
    best = scores.view(TOKENS, 2, -1).amax(dim=-1).argmax(dim=-1)
    assert (best != indices[:, 0] // 2).any(), "some are not in the group that the router would choose"
    torch.testing.assert_close(weights, scores.gather(1, indices) * router.routed_scaling_factor)


def test_experts_of_another_number_of_tokens_are_refused():
    watched = Watched("qwen3_moe")
    with pytest.raises(RoutingError, match=r"got experts of 3 tokens to replay, expected those of its 7 tokens"):
        watched.replayed(random_experts(watched)[:3])
    watched.routing.now = now = Pass()
    watched.run()
    assert len(now.used) == len(watched.routing.routers), "a router that raised works again"


def test_loads_and_differences_by_hand():
    used = {0: torch.tensor([[0, 1], [2, 1]]), 1: torch.tensor([[3, 0], [3, 0]])}
    assert expert_loads(used, torch.tensor([1, 3]), 4).tolist() == [5, 4, 3, 4]
    given = torch.tensor([[[1, 0], [3, 0]], [[1, 2], [0, 2]]], dtype=torch.uint8)
    assert differing_layers(used, given).tolist() == [0, 0.5]
