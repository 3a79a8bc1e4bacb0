"""The experts of vLLM's own layers on CPU, beside the trainer's engine. vLLM itself returns them on GPUs alone."""

from dataclasses import replace

import torch

from rlx.config.schema import EngineKwargsConfig, FSDPConfig, ModelConfig, RolloutConfig
from rlx.data.batch import Batch
from rlx.engine.engine import Engine
from rlx.engine.experts import ExpertOptions
from rlx.engine.micro_batches import MicroBatchRule
from rlx.rollout.protocol import Sampling
from rlx.rollout.sampler import generate_batch
from rlx.rollout.vllm_support import engine_options

CPU = torch.device("cpu")
PROMPT, RESPONSE, LAYERS = 20, 12, 3
ROWS = MicroBatchRule(rows=4)


class Watched:
    """A sampler on a vLLM engine with a model's own weights, which generates one request after the other.

    It hears of experts as vLLM's own recorder does: from `bind_routed_experts_capturer`, by layer and step.
    """

    version = 1

    def __init__(self, folder: str, dtype: str):
        from rlx.rollout.vllm import VLLMEngine

        kwargs = EngineKwargsConfig(vllm={"block_size": 32, "kv_cache_memory_bytes": 1 << 22})
        settings = RolloutConfig(name="vllm", dtype=dtype, engine_kwargs=kwargs, enable_rollout_routing_replay=True)
        options = engine_options(settings, ModelConfig(path=folder), CPU, PROMPT + RESPONSE, seed=0)
        assert options["enable_return_routed_experts"] is True
        options |= {"load_format": "auto", "enable_return_routed_experts": False, "enable_prefix_caching": False}
        self.engine = VLLMEngine(options, on_cpu=True, sampling=Sampling(2))
        self.steps: dict[int, list[torch.Tensor]] = {}
        self.engine._engine.collective_rpc(self._bind)

    def _bind(self, worker):
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        bind_routed_experts_capturer(worker.get_model(), self)

    def capture(self, layer_id, topk_ids):
        self.steps.setdefault(layer_id, []).append(topk_ids.clone())

    def generate(self, requests, done=None):
        return [self._one(request) for request in requests]

    def _one(self, request):
        self.steps.clear()
        # vLLM's answer has no experts here.
        plain = replace(request, sampling=replace(request.sampling, with_experts=False))
        self.engine.add(0, plain, True, self.version)
        while not (stopped := self.engine.step({0: plain})):
            pass
        ((_, found),) = stopped
        tokens = len(request.prompt_ids) + len(found.token_ids) - 1
        experts = torch.zeros(tokens, LAYERS, 2, dtype=torch.uint8)
        for layer, steps in self.steps.items():
            experts[:, layer] = torch.cat(steps)
        return found._replace(experts=experts)


def mismatch(folder, dtype):
    """Without and with replay: mean difference of log-probs from vLLM's, and shares of differing experts."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(PROMPT) >= torch.randint(0, PROMPT, (ROWS.rows, 1), generator=g)
    ids = torch.randint(3, 250, (ROWS.rows, PROMPT), generator=g).masked_fill(~mask, 0)
    prompts = Batch.of({"prompt_ids": ids, "prompt_mask": mask, "seed": torch.arange(ROWS.rows)})
    sampler = Watched(folder, dtype)
    batch = generate_batch(sampler, prompts, Sampling(RESPONSE, with_experts=True), 0, RESPONSE)
    sampler.engine.close()
    real, found = batch["response_mask"], []
    for replays in (False, True):
        options = {"strategy": "fsdp2", "device": CPU, "experts": ExpertOptions(replays)}
        figures = Engine(ModelConfig(path=folder), FSDPConfig(), **options).log_probs(batch, ROWS, 1.0)
        off = (figures["log_probs"] - batch["rollout_log_probs"]).abs()[real].mean().item()
        shares = [figures[name][real].mean().item() for name in ("differing_experts", "differing_experts_used")]
        found.append((off, *shares))
    return found
