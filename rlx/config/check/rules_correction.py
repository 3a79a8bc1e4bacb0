"""Faults in the correction of the sampler's mismatch, and its bounds in the trainer's form."""

from typing import NamedTuple

from rlx.config.check.context import CheckContext, Faults
from rlx.config.faults import Fault
from rlx.config.schema import RolloutCorrectionConfig
from rlx.config.schema.keys import Bounds, read_bounds

GROUP = "algorithm.rollout_correction"
IS, CAP = f"{GROUP}.rollout_is", f"{GROUP}.rollout_is_threshold"
RS, RS_BOUNDS = f"{GROUP}.rollout_rs", f"{GROUP}.rollout_rs_threshold"
VETO, BYPASS = f"{GROUP}.rollout_token_veto_threshold", f"{GROUP}.bypass_mode"
LOG_PROBS = "actor_rollout_ref.rollout.calculate_log_probs"


class Rejection(NamedTuple):
    """One test of rollout_rs and its bounds."""

    criterion: str
    bounds: Bounds


def rejections(correction: RolloutCorrectionConfig) -> list[Rejection]:
    """Return the tests that a token or its sequence must pass. Raises ValueError if the numbers of bounds and tests differ."""
    criteria, texts = correction.rollout_rs or (), correction.rollout_rs_threshold or ()
    shared = texts * len(criteria) if len(texts) == 1 else texts
    return [Rejection(*pair) for pair in zip(criteria, map(read_bounds, shared), strict=True)]


def each_test_has_bounds(s: CheckContext) -> Faults:
    """Rejection needs one pair of bounds for all tests or one for each."""
    correction = s.config.algorithm.rollout_correction
    criteria, texts = correction.rollout_rs or (), correction.rollout_rs_threshold or ()
    if criteria and len(texts) not in (1, len(criteria)):
        typical = {"seq_mean_k1": "0.999_1.001", "seq_mean_k3": "0.001", "seq_max_k2": "0.05"}
        remedy = f"set {RS_BOUNDS}=[{','.join(typical.get(name, '0.5_2.0') for name in criteria)}], say"
        yield s.fault("rejection needs thresholds", "one for all or one each", remedy, RS, RS_BOUNDS)


def bounds_suit_the_test(s: CheckContext) -> Faults:
    """Bounds of a ratio enclose 1; a divergence has an upper bound only."""
    correction = s.config.algorithm.rollout_correction
    try:
        tests = rejections(correction)
    except ValueError:
        return  # `each_test_has_bounds` reports it
    for name, (low, high) in tests:
        if not name.endswith("k1") and low is not None:
            remedy = f"give {name} one number in {RS_BOUNDS}, such as {high}"
            got = f"{low}_{high} for {name}"
            yield s.fault("a divergence has no lower bound", "one number", remedy, RS, RS_BOUNDS, got=got)
        elif name.endswith("k1") and not (low or 1 / high) <= 1 <= high:
            yield _without_one(s, RS, RS_BOUNDS)
    low, high = read_bounds(correction.rollout_is_threshold)
    if correction.rollout_is is not None and not (low or 0) <= 1 <= high:
        yield _without_one(s, IS, CAP)


def _without_one(s: CheckContext, test: str, bounds: str) -> Fault:
    what = "bounds of a ratio exclude 1, where sampler and trainer agree"
    return s.fault(what, "bounds around 1", f"set {bounds}=0.5_2.0, say", test, bounds)


CORRECTION_RULES = (each_test_has_bounds, bounds_suit_the_test)
