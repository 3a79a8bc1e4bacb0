"""Score a response by its last number: 1 if it is the answer, else 0."""

import re
from itertools import takewhile


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    numbers = re.findall(r"-?\d+", solution_str.replace(",", ""))
    return float(numbers[-1:] == [str(ground_truth)])


def gsm8k(data_source, solution_str, ground_truth, extra_info=None):
    """Also report whether the number stands after ####, where GSM8K's own answers have it."""
    marked = re.findall(r"####\s*(-?[\d,]+)", solution_str)
    strict = [number.replace(",", "") for number in marked[-1:]] == [str(ground_truth)]
    return {"score": compute_score(data_source, solution_str, ground_truth), "strict": float(strict)}


def counted(data_source, solution_str, ground_truth, extra_info=None):
    """Score a list by the share of numbers that are right up to the first wrong one, of those wanted or written, whichever are more."""
    numbers, wanted = re.findall(r"-?\d+", solution_str), ground_truth.split()
    right = [*takewhile(lambda pair: pair[0] == pair[1], zip(numbers, wanted, strict=False))]
    return len(right) / max(len(numbers), len(wanted))
