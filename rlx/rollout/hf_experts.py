"""The experts of rows that were decoded together."""

from collections.abc import Sequence

from torch import Tensor


def experts_by_row(
    steps: list[tuple[Tensor, Tensor | None]], prompts: list[int], lengths: list[int]
) -> Sequence[Tensor | None]:
    """Return each row's experts from its first prompt token to the last token that was read, (tokens, L, K) on CPU.

    Args:
        steps: numbers of rows and their experts (rows, tokens, L, K), first of the left-padded prompts, then of each new token.
        prompts, lengths: tokens of each row's prompt and completion.
    """
    (_, first), *later = steps
    if first is None:
        return [None] * len(prompts)
    width = first.shape[1]
    every = first.new_zeros(len(prompts), width + len(later), *first.shape[2:])
    every[:, :width] = first
    for step, (rows, experts) in enumerate(later):
        assert experts is not None
        every[rows, width + step] = experts[:, 0]
    every = every.cpu()
    return [own[width - p : width + n - 1].clone() for own, p, n in zip(every, prompts, lengths, strict=True)]
