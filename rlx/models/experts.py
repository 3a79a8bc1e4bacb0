"""The routers of a mixture of experts: record the experts that they choose, replace the choice, and sum their probabilities.

Shape letters: N tokens of a forward, L decoder layers, E experts of a layer, K experts of a token.

A router maps each token to E logits, and takes the K best by `torch.topk` of some score of them. `ExpertRouting` watches this call
in each router's forward, and may return other experts with the scores that the router gives them. All else is the router's own
computation, gate weights and their gradients included. Replaying the sampler's choice in training is "Rollout Routing Replay"
(R3), Ma et al. 2025, arXiv 2510.11370.

Note [a router runs again in backward]: where a layer is recomputed, so is its router, and must choose and compute as before. A
`Pass` therefore stays in place until backward has ended. It keeps what the first run of each router records.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_LAYER = re.compile(r"\.(\d+)\.")
_TOPK = (torch.topk, Tensor.topk)
LEAVE_EXPERTS_ALONE = "set rollout.enable_rollout_routing_replay=False and actor.router_aux_loss_coef=0"


class RoutingError(ValueError):
    """The experts of a model cannot be recorded or replaced."""


class Router(NamedTuple):
    """The innermost module around the choice of a layer's experts: of E = `experts`, K = `chosen`."""

    name: str
    module: nn.Module
    layer: int  # number of the decoder layer
    experts: int
    chosen: int
    dims: int  # of the scores that it takes the best of
    linear_maps: int  # number of its linear maps to E numbers; the logits are unambiguous if it has one


@dataclass
class Pass:
    """One forward and its backward: the experts given to routers, and what they record by layer."""

    given_NLK: Tensor | None = None  # experts of each token and layer
    replays: bool = False  # whether routers take them instead of their own choice
    weights_N: Tensor | None = None  # of the tokens in the sums of probabilities; None: there are no such sums
    records: bool = True  # whether routers record the next two
    own: dict[int, Tensor] = field(default_factory=dict)  # experts (N, K) that each chooses
    used: dict[int, Tensor] = field(default_factory=dict)  # and that its layer uses
    # Softmax of the logits summed over tokens, (E,), with graph
    probabilities: dict[int, Tensor] = field(default_factory=dict)
    is_open: bool = True  # whether routers still record


class ExpertRouting:
    """The routers of one model, by layer. Hooks on them stay as long as the model lives.

    `run` is a forward of `tokens` tokens, at least 2, without gradients. `now` is the pass that runs; None: routers are left
    alone. Raises RoutingError if the model has no experts, or a layer chooses them in another way than by one `torch.topk`.
    """

    def __init__(self, model: nn.Module, run: Callable[[], object], tokens: int):
        self.routers = find_routers(model, run, tokens)
        self.experts, self.chosen = self.routers[0].experts, self.routers[0].chosen
        self.now: Pass | None = None
        self._open: list[_Choice] = []
        for router in self.routers:
            router.module.register_forward_pre_hook(self._enter(router))
            router.module.register_forward_hook(self._leave, always_call=True)

    @contextmanager
    def left_alone(self) -> Iterator[None]:  # in forwards that belong to no pass
        now, self.now = self.now, None
        try:
            yield
        finally:
            self.now = now

    def require_logits(self) -> None:
        """Raise RoutingError if a router's logits cannot be told apart from its other results."""
        for router in self.routers:
            if router.linear_maps != 1:
                raise RoutingError(
                    f"{router.name} ({type(router.module).__name__}): got {router.linear_maps} linear maps to {router.experts} "
                    "numbers, expected one, whose results are the router's logits; set actor.router_aux_loss_coef=0"
                )

    def _enter(self, router: Router) -> Callable[[nn.Module, Any], None]:
        def enter(module: nn.Module, args: Any) -> None:
            if self.now is not None:
                choice = _Choice(router, self.now)
                choice.__enter__()
                self._open.append(choice)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open and self._open[-1].router.module is module:
            self._open.pop().__exit__(None, None, None)


class _Choice(TorchFunctionMode):
    """In a router's forward: watches its linear map, and records or replaces its choice of experts."""

    def __init__(self, router: Router, now: Pass):
        super().__init__()
        self.router, self._pass = router, now
        self._logits: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is F.linear and result.shape[-1] == self.router.experts:
            self._logits = result
        if function not in _TOPK:
            return result
        scores, count = _scores_and_count(args, kwargs)
        router, width = self.router, scores.shape[-1]
        if (scores.dim(), width, count) == (router.dims, router.experts, router.chosen):
            return self._choose(scores, result)
        is_of_groups = scores.dim() == router.dims == 2 and 1 < width < router.experts and router.experts % width == 0
        if self._given is not None and is_of_groups:
            return self._groups_of_given(scores, count, result)
        return result

    @property
    def _given(self) -> Tensor | None:
        now = self._pass
        return None if now.given_NLK is None or not now.replays else now.given_NLK[:, self.router.layer].long()

    def _choose(self, scores: Tensor, own: Any) -> Any:
        now, layer, given = self._pass, self.router.layer, self._given
        flat = own.indices.reshape(-1, self.router.chosen)
        if given is not None and len(given) != len(flat):
            raise RoutingError(
                f"{self.router.name}: got experts of {len(given)} tokens to replay, expected those of its {len(flat)} tokens"
            )
        used = flat if given is None else given
        if now.weights_N is not None and torch.is_grad_enabled():  # Note [a router runs again in backward]
            assert self._logits is not None
            logits = self._logits.reshape(-1, self.router.experts)
            wide = torch.promote_types(logits.dtype, torch.float32)
            total = (logits.softmax(dim=-1, dtype=wide) * now.weights_N[:, None].to(wide)).sum(dim=0)
            if now.is_open:
                now.probabilities.setdefault(layer, total)
        if now.is_open and now.records:
            now.own.setdefault(layer, small_integers(flat, self.router.experts))
            now.used.setdefault(layer, small_integers(used, self.router.experts))
        if given is None:
            return own
        indices = given.view(own.indices.shape)
        return type(own)((scores.gather(-1, indices), indices))

    def _groups_of_given(self, scores: Tensor, count: int, own: Any) -> Any:
        """Choose the groups that have given experts, then the best of the others: a router of groups masks the rest."""
        groups = scores.shape[-1]
        group_NK = self._given // (self.router.experts // groups)
        has_given = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, group_NK, True)
        indices = scores.masked_fill(has_given, torch.inf).topk(count, dim=-1).indices
        return type(own)((scores.gather(-1, indices), indices))


def _scores_and_count(args: Any, kwargs: Any) -> tuple[Tensor, int]:
    given = dict(zip(("input", "k"), args, strict=False)) | kwargs
    return given["input"], given["k"]


class _Watch(TorchFunctionMode):
    """Notes the calls of `torch.topk` that choose something for each token, and the module that each is in."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self.inside: list[nn.Module] = []
        self.choices: dict[nn.Module, list[tuple[int, int, int]]] = {}  # dims, experts, chosen
        self.maps: dict[nn.Module, list[int]] = {}  # widths of the results of linear maps, in all modules around

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is F.linear:
            for module in self.inside:
                self.maps.setdefault(module, []).append(result.shape[-1])
        if function in _TOPK and self.inside:
            scores, count = _scores_and_count(args, kwargs)
            if scores.shape[:-1].numel() == self._tokens:
                self.choices.setdefault(self.inside[-1], []).append((scores.dim(), scores.shape[-1], count))
        return result


def find_routers(model: nn.Module, run: Callable[[], object], tokens: int) -> list[Router]:
    """Return the routers that choose experts in a forward, by layer; arguments and errors as for `ExpertRouting`."""
    watch, handles = _Watch(tokens), []

    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, args: watch.inside.append(module)))
        # pop() would replace the output
        handles.append(module.register_forward_hook(lambda *_: watch.inside.__delitem__(-1), always_call=True))
    try:
        with watch, torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    names = {module: name for name, module in model.named_modules()}
    blocks = {name.removesuffix(".experts") for name in names.values() if name.endswith(".experts")}
    found = []
    for module, choices in watch.choices.items():
        name, (dims, experts, chosen) = names[module], choices[-1]
        # Other modules choose too: an indexer of sparse attention takes the best tokens.
        if not blocks.isdisjoint((name, name.rpartition(".")[0])) and (layer := _LAYER.search(name)):
            maps = watch.maps.get(module, []).count(experts)
            found.append(Router(name, module, int(layer[1]), experts, chosen, dims, maps))
    found.sort(key=lambda router: router.layer)
    _check(type(model).__name__.removeprefix("FSDP"), found, blocks)
    return found


def _check(model: str, found: list[Router], blocks: Iterable[str]) -> None:
    """Raise RoutingError unless each layer with a block of experts has one router, and all routers choose alike."""
    with_experts = {int(layer[1]) for name in blocks if (layer := _LAYER.search(f"{name}."))}
    layers = [router.layer for router in found]
    if not with_experts and not found:
        raise RoutingError(
            f"{model}: got a model without experts, expected a mixture of experts; {LEAVE_EXPERTS_ALONE}"
        )
    if sorted(with_experts) != layers or len({(router.experts, router.chosen) for router in found}) != 1:
        each = ", ".join(
            f"{router.name} ({type(router.module).__name__}, {router.chosen} of {router.experts})" for router in found
        )
        raise RoutingError(
            f"{model}: its experts cannot be recorded: got experts in the layers {sorted(with_experts)} and these choices by "
            f"torch.topk: {each or 'none'}; expected one choice in each of these layers, of equally many experts; {LEAVE_EXPERTS_ALONE}"
        )


def differing_layers(one: dict[int, Tensor], given_NLK: Tensor) -> Tensor:
    """Return for each token the share of the layers in which `one` has another set of experts than given_NLK, (N,) fp32."""
    differs = [
        (experts.long().sort(dim=-1).values != given_NLK[:, layer].long().sort(dim=-1).values).any(dim=-1)
        for layer, experts in one.items()
    ]
    return torch.stack(differs).float().mean(dim=0)


def expert_loads(used: dict[int, Tensor], weights_N: Tensor, experts: int) -> Tensor:
    """Return how many tokens each expert has, summed over the layers, (E,) fp64; a token counts as often as its weight says."""
    loads = torch.zeros(experts, dtype=torch.float64, device=weights_N.device)
    for chosen in used.values():
        loads.index_add_(0, chosen.flatten().long(), weights_N.double().repeat_interleave(chosen.shape[1]))
    return loads


def recorded(routing: ExpertRouting, layers: int, forward: Callable[[], object]) -> Tensor:
    """Return the experts that a forward without gradients uses, (N, L, K) as `small_integers`; 0 in layers without experts."""
    routing.now = now = Pass()
    forward()
    routing.now = None
    first = now.used[routing.routers[0].layer]
    experts_NLK = first.new_zeros(len(first), layers, routing.chosen)
    for layer, used in now.used.items():
        experts_NLK[:, layer] = used
    return experts_NLK


def small_integers(numbers: Tensor, experts: int) -> Tensor:
    return numbers.to(torch.uint8 if experts <= 256 else torch.int16)
