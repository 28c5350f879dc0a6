"""Sequences as micro-batches: by token budget, without padding."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Divide sequences into micro-batches of at most ``most_tokens`` tokens, or of one sequence.

    The longest come first, equal ones in their order: so it depends on the lengths alone.
    Example: ``micro_batches([3, 9, 4], 8)`` is ``[[1], [2, 0]]``.
    """
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        if lengths[index] > room:
            batches.append([])
            room = max(most_tokens, lengths[index])
        batches[-1].append(index)
        room -= lengths[index]
    return batches
