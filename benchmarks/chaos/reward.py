"""A reward that untrained models get too, so that each step changes the weights."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
    """Return the share of characters with an even code."""
    return sum(ord(character) % 2 == 0 for character in solution_str) / max(1, len(solution_str))
