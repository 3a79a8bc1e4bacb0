"""`use_liger`, on CUDA with liger-kernel."""

import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from rlx.config.schema import TinyModelConfig
from rlx.models.loading import ModelError, apply_liger
from rlx.models.tiny import make_tiny

SMALL = TinyModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2)


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ModelError, match="pip install liger-kernel"):
        apply_liger(make_tiny(SMALL)[0])


def has_liger():
    try:
        return bool(version("liger-kernel"))
    except PackageNotFoundError:
        return False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.skipif(not has_liger(), reason="liger-kernel is not installed")
@pytest.mark.parametrize("save", [None, "boundary", "attention", "auto"])
def test_the_same_gradients_but_for_rounding(save):
    from rlx.offload import OffloadOptions, enable_activation_offloading

    ids = torch.randint(3, 250, (2, 256), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found = []
    for fused in (False, True):
        model = make_tiny(SMALL)[0].float().cuda().train()
        if fused:
            apply_liger(model)
            if save is not None:
                enable_activation_offloading(model, True, OffloadOptions(save=save, min_bytes=0))
        for _ in range(4 if save == "auto" else 1):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        found.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (loss, grads), (fused_loss, fused_grads) = found
    torch.testing.assert_close(fused_loss, loss, rtol=1e-4, atol=1e-4)
    for name, grad in grads.items():
        torch.testing.assert_close(fused_grads[name], grad, rtol=2e-2, atol=2e-4, msg=name)
