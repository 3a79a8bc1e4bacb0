"""A reward of your own: right answers earn more the shorter they are.

    rlx train custom_reward_function.path=examples/custom_reward.py

rlx calls the function once per response. It returns a number, or a dict whose `score` is the reward; the dict's other
numbers are logged, and `acc` among them becomes the accuracy in the step table.
"""

from rlx.rewards import gsm8k

FREE_CHARACTERS = 60
LARGEST_DISCOUNT = 0.5


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = gsm8k.compute_score(data_source, solution_str, ground_truth)
    excess = max(0, len(solution_str) - FREE_CHARACTERS) / FREE_CHARACTERS
    return {"score": right * (1 - min(excess, LARGEST_DISCOUNT)), "acc": right, "characters": len(solution_str)}
