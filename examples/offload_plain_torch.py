"""Activation offloading in a training loop of your own, with torch and rlx.offload only: one line, marked with (*).

    python examples/offload_plain_torch.py

Trains the same small model with and without it: the weights are equal bit for bit.
"""

import torch
from torch import Tensor, nn

from rlx.offload import OffloadOptions, enable_activation_offloading

WIDTH, LAYERS, STEPS = 256, 6, 5
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(offload: bool) -> Model:
    torch.manual_seed(0)
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if offload:  # a small min_bytes, because this model is small; usually the default is right
        handle = enable_activation_offloading(model, enable_ckpt=True, options=OffloadOptions(min_bytes=1024))  # (*)
    for _ in range(STEPS):
        x = torch.randn(16, 64, WIDTH).to(DEVICE)
        loss = (model(x) - x.roll(1, dims=-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    if offload:
        print(handle.stats())
    return model


if __name__ == "__main__":
    plain, offloaded = (train(offload).state_dict() for offload in (False, True))
    print("weights equal to those without offloading:", all(torch.equal(plain[key], offloaded[key]) for key in plain))
