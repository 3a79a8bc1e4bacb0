"""A reward of your own that sees the whole batch: right answers in the same words share one reward.

    rlx train custom_reward_function.path=examples/custom_reward_batch.py reward.reward_manager.name=batch

rlx calls the function once with all samples of a batch, as lists. It returns a list of numbers, or of dicts as in
custom_reward.py, one for each sample.
"""

from collections import Counter

from rlx.rewards import gsm8k


def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    answers = list(zip(solution_strs, map(str, ground_truths), strict=True))
    copies = Counter(answers)
    right = [gsm8k.compute_score("", solution, truth) for solution, truth in answers]
    return [
        {"score": score / copies[answer], "acc": score, "copies": copies[answer]}
        for score, answer in zip(right, answers, strict=True)
    ]
