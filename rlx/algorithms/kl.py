"""KL estimates from the log-probs of sampled tokens, and the controller of the penalty's coefficient."""

import math
from typing import Any

from torch import Tensor

from rlx.algorithms.losses import LOG_RATIO_LIMIT

K3_LIMIT = 10.0


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token.

    With d = log_probs - ref_log_probs:

    - `kl`, `k1`: d. Unbiased, may be negative.
    - `abs`: |d|.
    - `mse`, `k2`: d^2 / 2. Biased, low variance.
    - `low_var_kl`, `k3`: exp(-d) - 1 + d. Unbiased, never negative. As in verl, d is clamped to +-20 before exp and the result
      to at most 10; a clamped token has no gradient.

    With a trailing `+`, as in `k3+`: the value of that estimate with the gradient of k2, d grad(log_probs). In expectation over
    the policy's own tokens this is the gradient of each token's KL. The gradients of k1 (0) and k3 (that of the reverse KL) are
    not. Neither contains the effect of a token on the KL of later tokens; the KL in the reward does.

    Args:
        log_probs: (B, T) of the policy.
        ref_log_probs: (B, T) of the reference.
        kind: one of the names above.

    Returns:
        (B, T), differentiable in both inputs.

    Raises:
        ValueError: the kind is unknown.

    Source: J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html; the gradients,
    arXiv:2506.09477; their combination, verl-project/verl@018f23b.
    """
    difference = log_probs - ref_log_probs
    if kind.endswith("+"):
        right = 0.5 * difference.square()
        return kl_estimate(log_probs, ref_log_probs, kind[:-1]).detach() + (right - right.detach())
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    if kind in ("low_var_kl", "k3"):
        difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        # expm1 keeps the digits that exp(-d) - 1 loses if the two policies nearly agree.
        return ((-difference).expm1() + difference).clamp(max=K3_LIMIT)
    kinds = "kl, k1, abs, mse, k2, low_var_kl or k3"
    raise ValueError(f"KL estimator: got {kind!r}, expected {kinds}, or one with + behind")


class KLController:
    """The coefficient of the KL in the reward, fixed or following the measured KL towards a target.

    With a target each update multiplies it by 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon. Deviation from the
    source: samples count at most as many as horizon, so that a batch of over five horizons cannot turn the coefficient's sign.

    Args:
        coef: first coefficient, >= 0.
        target: KL to reach, > 0, in the unit of `update`'s; None: the coefficient is fixed.
        horizon: samples over which the coefficient adapts, >= 1.

    Raises:
        ValueError: an argument is out of its range.

    Source: Ziegler et al. 2019, arXiv:1909.08593, with samples / horizon for its K_beta as in the code published with it.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: int = 1) -> None:
        if not (math.isfinite(coef) and coef >= 0):
            raise ValueError(f"kl_coef: got {coef}, expected a finite number >= 0")
        if target is not None and not (target > 0 and horizon >= 1):
            raise ValueError(f"target_kl: got {target}, expected > 0; horizon: got {horizon}, expected >= 1")
        self.coef, self.target, self.horizon = coef, target, horizon
        self._type = "fixed" if target is None else "adaptive"

    def update(self, kl: float, samples: int) -> None:
        """Adapt the coefficient, if it has a target, to a batch's mean KL. Raises ValueError for a KL that is not finite."""
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise ValueError(
                f"adaptive KL controller: got a measured KL of {kl}, expected a finite number; check the log-probs of actor and reference"
            )
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(samples, self.horizon) / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"type": self._type, "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint of the same kind, else raise ValueError; a fixed coefficient stays the configuration's."""
        if state["type"] != self._type:
            raise ValueError(
                f"kl_ctrl.type: the checkpoint was written with {state['type']!r}, this run has {self._type!r}; "
                f"resume with algorithm.kl_ctrl.type={state['type']}"
            )
        if self.target is not None:
            self.coef = state["coef"]
