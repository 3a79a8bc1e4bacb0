"""The public functions: enable activation offloading for a model's layers or for a region of code, and disable it."""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from rlx.offload.autotune.decide import PlanController
from rlx.offload.autotune.measure import LayerProfile, PassProfile, ProfilingPolicy
from rlx.offload.plan.planner import Plan
from rlx.offload.recompute.checkpoint import BOUNDARY, RecomputedCall, RecomputePolicy, Repeatable
from rlx.offload.recompute.saved_slots import RecomputedLayer
from rlx.offload.replay.policy import AttentionPolicy, PlannedPolicy
from rlx.offload.replay.recorder import LayerInstructions
from rlx.offload.replay.replay_mode import OpMode
from rlx.offload.runtime.forward_override import ForwardOverride
from rlx.offload.runtime.layers import CheckpointingFlags, LayerName, find_layers, is_cache, is_checkpointed, is_filled
from rlx.offload.runtime.options import SAVE_MODES, OffloadOptions, options_of
from rlx.offload.runtime.pytree import map_leaves, sort_leaves, tensors_in
from rlx.offload.runtime.session import Layer, LayerCall, OffloadSession
from rlx.offload.save_all import RegionHooks, run_save_all
from rlx.offload.storage.stats import OffloadStats
from rlx.offload.storage.tensor_bytes import restore, weights_are_refetched

logger = logging.getLogger("rlx.offload")

_REQUIRES_GRAD = operator.attrgetter("requires_grad")
# Decides for a layer call: a plan's instructions, a profile that measures it, or None for boundary mode.
Decide = Callable[[Layer, nn.Module, Sequence[Tensor]], LayerInstructions | LayerProfile | None]


class LayerRunner:
    """Runs the layers of one model. `decide` is the controller's, with `save="auto"`."""

    def __init__(self, session: OffloadSession, decide: Decide | None) -> None:
        self._session, self.decide = session, decide
        self._attention_counts: dict[int, int] = {}  # by layer: attention calls of its latest forward

    def run(
        self,
        layer: RecomputedLayer,
        repeatable: Repeatable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
    ) -> Any:
        """Run a layer's forward under the policy of this call; return its outputs. Arguments as for `RecomputedCall`."""
        if not any(map(_REQUIRES_GRAD, tensors)) and not any(map(_REQUIRES_GRAD, repeatable.module.parameters())):
            return repeatable.forward(*args, **kwargs)
        policy = self._policy(layer, repeatable.module, tensors)
        if isinstance(policy, LayerInstructions):
            return self._run_without_recompute(layer, policy, partial(repeatable.forward, *args, **kwargs))
        outputs = RecomputedCall(self._session, layer, repeatable, args, kwargs, tensors, policy).run(args, kwargs)
        if policy is BOUNDARY:
            return outputs
        if isinstance(policy, AttentionPolicy):
            self._attention_counts[layer.index] = policy.attention_count
            if not policy.has_cached_ops and self._session.is_first("save=attention has no effect"):
                logger.warning(
                    f"activation offloading: save='attention' has no effect in layer {layer.name!r}, which "
                    f"{policy.refusal or 'calls no known fused attention'}: it runs as with save='boundary'. "
                    "If it has attention, call torch's scaled_dot_product_attention in it (attn_implementation='sdpa' in "
                    "transformers), or register_attention. Logged once",
                )
        elif isinstance(policy, PlannedPolicy) and policy.is_off_plan and self._session.is_first("off plan"):
            logger.info(
                f"activation offloading: layer {layer.name} calls other attention or linear maps than when it was measured, "
                "so from there on it is recomputed. Logged once",
            )
        return outputs

    def _run_without_recompute(
        self, layer: RecomputedLayer, instructions: LayerInstructions, forward: Callable[[], Any]
    ) -> Any:
        call = NoRecomputeCall(self._session, layer, instructions)
        before = call.previous()
        hooks_late = not call.prefetches_early and before is not None and before.offloaded
        late = _LateHook(call, instructions.prefetch_call) if hooks_late else contextlib.nullcontext()
        with weights_are_refetched(), late:
            outputs = forward()
        _hook(outputs, call.enter)
        return outputs

    def _policy(
        self, layer: RecomputedLayer, module: nn.Module, tensors: list[Tensor]
    ) -> RecomputePolicy | LayerInstructions:
        if self._session.save == "attention":
            return AttentionPolicy(self._attention_counts.get(layer.index, 0))
        decided = None if self.decide is None else self.decide(layer, module, tensors)
        if decided is None:
            return BOUNDARY
        if isinstance(decided, LayerProfile):
            return ProfilingPolicy(decided)
        return decided if decided.keep else PlannedPolicy(decided)


class NoRecomputeCall(LayerCall):
    """One forward call of a layer that keeps all the tensors that autograd saves."""

    def __init__(self, session: OffloadSession, layer: Layer, instructions: LayerInstructions) -> None:
        super().__init__(session, layer)
        layer.counters.kept_bytes += instructions.saved_bytes
        self.prefetches_early = session.options.prefetch_layers is not None or instructions.prefetch_early

    def enter(self, gradient: Tensor) -> None:
        self.begin_backward()
        if self.prefetches_early:
            self.prefetch()

    def pass_op(self, gradient: Tensor) -> None:
        self.begin_backward()
        self.prefetch()


class _LateHook(OpMode):
    """Hooks the results of call `op`, so that backward prefetches there; None: of the linear map after each attention."""

    def __init__(self, call: NoRecomputeCall, op: int | None) -> None:
        super().__init__()
        self._call = call
        self._op = op
        self._count = 0
        self._wants_next = False

    def _run(self, function: Any, args: Any, kwargs: Any, is_attention: bool) -> Any:
        result = function(*args, **kwargs)
        if self._wants_next if self._op is None else self._op == self._count:
            _hook(result, self._call.pass_op)
        self._wants_next = is_attention
        self._count += 1
        return result


def _hook(value: Any, hook: Callable[[Tensor], None]) -> None:
    for tensor in tensors_in(value):
        if tensor.grad_fn is not None:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


_is_grad_enabled = torch.is_grad_enabled  # a global, since it is called for each layer of each generated token


class LayerForward(ForwardOverride):
    """Replaces a layer's forward. Recomputation calls the original forward, so it gathers no parameters a second time."""

    def __init__(self, handle: ActivationOffloading, layer: RecomputedLayer, module: nn.Module) -> None:
        super().__init__(module)
        self.handle = handle
        self._layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_grad_enabled() and self.handle.is_enabled:
            # A compiler that traces the hooks recurses without end. One that traces this line puts True for the call.
            return self._run_uncompiled(args, kwargs, torch.compiler.is_compiling())
        # Gradient mode is off, or the handle is disabled and a wrapper around this object still calls it.
        module: Any = self.module()
        return self.original(module)(*args, **kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_in_compiled: bool) -> Any:
        if is_in_compiled:
            self.handle._say_uncompiled()
        module = self.module()
        assert module is not None
        forward = self.original(module)
        if module.training and is_checkpointed(module):
            self.handle._take_over_checkpointing()
        session = self.handle.session
        if self._layer is session.layers[0]:
            self.handle._count_pass()
        if session.save == "all":
            return run_save_all(session, self._layer, module, forward, args, kwargs)
        tensors: list[torch.Tensor] = []
        others: list[Any] = []
        sort_leaves(args, tensors, others)
        sort_leaves(kwargs.values(), tensors, others)
        if others and (caches := [leaf for leaf in others if is_cache(leaf)]):
            if not module.training:
                return forward(*args, **kwargs)
            self._check_empty(caches, module)
            args = tuple(_without_caches(value) for value in args)
            kwargs = {name: _without_caches(value) for name, value in kwargs.items()}
            others = [leaf for leaf in others if not is_cache(leaf)]
        repeatable = Repeatable(module, forward, others)
        return self.handle.runner.run(self._layer, repeatable, args, kwargs, tensors)

    def _check_empty(self, caches: Sequence[Any], module: nn.Module) -> None:
        if any(is_filled(cache, module) for cache in caches):
            raise ValueError(
                f"layer {self._layer.name} got a key/value cache that is filled, which recomputation would fill a second "
                "time; train without past_key_values and with use_cache=False, or use enable_ckpt=False"
            )
        if self.handle.session.is_first("caches stay empty"):
            text = "activation offloading: recomputed layers leave the key/value cache empty; pass use_cache=False"
            logger.info(text)


def _without_caches(value: Any) -> Any:
    """Return an argument with None for each cache; without caches the same object, in which layers may pass values on."""
    others: list[Any] = []
    sort_leaves((value,), [], others)
    return map_leaves(lambda leaf: None if is_cache(leaf) else leaf, value) if any(map(is_cache, others)) else value


class ActivationOffloading:
    """Activation offloading of a model or a region: made by `enable_activation_offloading` or `offload_activations`."""

    def __init__(self, options: OffloadOptions, save: str) -> None:
        self.options = options
        self.session = OffloadSession(options, save)
        self._model: Callable[[], nn.Module | None] = lambda: None  # a weak reference
        self._controller: PlanController | None = None
        if save == "auto":
            self._controller = PlanController(self.session, self._parameters)
        self.runner = LayerRunner(self.session, None if self._controller is None else self._controller.decide)
        self.is_enabled = True
        self._layers: list[weakref.ref[LayerForward]] = []
        self._flags = CheckpointingFlags(())
        self._passes = 0

    def stats(self, per_layer: bool = False) -> OffloadStats:
        """Return the statistics since offloading was enabled, also after `disable`. Does not wait for a device."""
        return self.session.stats(per_layer)

    def plan(self) -> Plan | None:
        """Return the plan that the latest forward followed; None before the first plan, and unless `save="auto"`."""
        return self._controller.plan if self._controller is not None else None

    def agree(self, reserve_bytes: int = 0) -> None:
        """Tell `save="auto"` how much device memory the next step will allocate and keep besides gradients: optimizer states, say."""
        if self._controller is not None:
            self._controller.limits.reserve(reserve_bytes)

    def measurement(self) -> PassProfile | None:
        """Return the profile of the latest forward's length; None before it exists, and unless `save="auto"`."""
        return self._controller.measurement() if self._controller is not None else None

    def disable(self) -> None:
        """Restore the model. Graphs that are alive stay valid; a second call does nothing."""
        self.is_enabled, self.session.is_disabled = False, True
        for forward in self._forwards():
            forward.remove()
        self._layers.clear()
        self._flags.restore()

    def _wrap(self, model: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
        self._model = weakref.ref(model)
        self._flags = CheckpointingFlags.of(model, layers)
        self._take_over_checkpointing()
        for index, (name, module) in enumerate(layers):
            layer = RecomputedLayer(index, name)
            self.session.layers.append(layer)
            self._layers.append(weakref.ref(LayerForward(self, layer, module)))

    def _count_pass(self) -> None:
        self._passes += 1
        if self._passes == 2 and self.session.save != "auto" and (why := self.session.why_idle()):
            logger.warning(f"activation offloading: nothing left the device in the first pass: {why}")

    def _say_uncompiled(self) -> None:
        if self.session.is_first("layers run uncompiled"):
            logger.warning(
                "activation offloading: the model is compiled, but the engine's layers run uncompiled, at the speed and with "
                "the rounding of the uncompiled model"
            )

    def _take_over_checkpointing(self) -> None:
        """Switch off transformers' gradient checkpointing of the layers, even if it was switched on after `_wrap`."""
        if self.is_enabled and self._flags.switch_off() and self.session.is_first("checkpointing is switched off"):
            recomputes = SAVE_MODES[self.session.save].recomputes
            why = "rlx recomputes the layers instead" if recomputes else "enable_ckpt=False turns recomputation off"
            logger.warning(
                f"activation offloading: gradient checkpointing of transformers is switched off; {why}. "
                "disable() switches it on again"
            )

    def _forwards(self) -> Iterator[LayerForward]:
        return filter(None, (reference() for reference in self._layers))

    def _layer_ids(self) -> set[int]:
        modules = (forward.module() for forward in self._forwards())
        return {id(module) for module in modules if module is not None}

    def _parameters(self) -> Iterator[nn.Parameter]:
        model = self._model()
        return iter(()) if model is None else model.parameters()


def enable_activation_offloading(
    model: nn.Module,
    enable_ckpt: bool = True,
    options: OffloadOptions | None = None,
    layers: Sequence[LayerName] | None = None,
) -> ActivationOffloading:
    """Offload the tensors that a model's layers save for backward, until backward needs them.

    Call it before or after FSDP or DDP wraps the model. Module tree, state-dict keys and outputs stay as they are.

    Args:
        model: any module; of a trainer `trainer.model`.
        enable_ckpt: offload the inputs of each layer and recompute the rest, in place of transformers' gradient checkpointing;
            else offload every saved tensor. `OffloadOptions.save` has more modes.
        layers: modules, module names, classes or class names; None: see `find_layers`.

    Returns:
        The handle; the existing one if the model is already enabled with equal options.

    Raises:
        ValueError: if no layer is found or one cannot be offloaded, if the options contradict `enable_ckpt`, or if the model is
            already enabled with other options or layers; TypeError for arguments of another type.
        DiskError: if the directory of the disk tier cannot be used.
    """
    if not isinstance(model, nn.Module):
        remedy = (
            "pass its attribute model" if isinstance(getattr(model, "model", None), nn.Module) else "pass the model"
        )
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module; {remedy}")
    if not isinstance(enable_ckpt, bool):
        raise TypeError(
            f"enable_ckpt: got {enable_ckpt!r}, expected True or False; options go into options=OffloadOptions(...)"
        )
    options = options_of(options)
    save = options.resolve_save(enable_ckpt)
    found = find_layers(model, layers)
    wrappers = [forward for _, m in found if isinstance(forward := vars(m).get("forward"), LayerForward)]
    if wrappers:
        handle = wrappers[0].handle
        same_layers = handle._layer_ids() == {id(module) for _, module in found}
        if same_layers and (handle.options, handle.session.save) == (options, save):
            return handle
        before, now = vars(handle.options) | {"save": handle.session.save}, vars(options) | {"save": save}
        differences = [f"{name}: {value!r}, now {now[name]!r}" for name, value in before.items() if value != now[name]]
        if not same_layers:
            differences.insert(
                0, f"layers: {len(handle._layers)}, now {len(found)}, of which {len(wrappers)} are enabled"
            )
        raise ValueError(
            f"activation offloading is enabled already with other options ({'; '.join(differences)}); call disable() on the "
            "first handle, or use the same options and layers"
        )
    on_accelerator = any(p.device.type != "cpu" for p in model.parameters()) or torch.accelerator.is_available()
    options.log_without_effect(on_accelerator)
    for name, module in found:
        _check_layer(name, module, SAVE_MODES[save].recomputes)
    if len(found) < 3:
        text = "activation offloading: %s has only %d layers, so offloading saves little"
        logger.warning(text, type(model).__name__, len(found))
    handle = ActivationOffloading(options, save)
    handle._wrap(model, found)
    return handle


def _check_layer(name: str, module: nn.Module, recomputes: bool) -> None:
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        raise ValueError(
            f"layer {name} has parameters or buffers that get their shapes in its first forward (lazy modules); run one batch "
            "through the model, then enable activation offloading"
        )
    if any(isinstance(part, nn.RReLU) for part in module.modules()):
        raise ValueError(
            f"layer {name} has an RReLU, whose noise torch saves for backward before it is drawn, so that its gradients would be "
            "wrong; use another activation, or leave the layer out of layers="
        )
    if recomputes and isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"layer {name} is compiled by torch.jit, which saves other tensors from run to run, so that it cannot be "
            "recomputed; enable the model before it is compiled, leave the layer out of layers=, or use enable_ckpt=False"
        )


@contextlib.contextmanager
def offload_activations(options: OffloadOptions | None = None) -> Iterator[ActivationOffloading]:
    """Offload every tensor that autograd saves inside a block of code, until backward needs it, inside or after the block.

    Parameters are not offloaded; buffers are. `save` may only be `"all"` or None, since recomputation needs layers.
    """
    options = options_of(options)
    save = options.resolve_save(enable_ckpt=False)
    options.log_without_effect(torch.accelerator.is_available())
    handle = ActivationOffloading(options, save)
    region = RegionHooks(handle.session)
    with saved_tensors_hooks(region.pack, restore):
        yield handle
