"""Drops: segments that were collected and not worth training, and when there are too many of them."""

from __future__ import annotations

from collections import Counter


class Drops:
    """Drops by reason, counted anew for each ``segments_per_round`` segments that are kept."""

    def __init__(self, segments_per_round: int, most: int) -> None:
        self._size, self._most = segments_per_round, most
        self._by_reason: Counter[str] = Counter()
        self._round = 0  # of so many segments that were kept

    def add(self, reason: str, kept: int) -> None:
        """Count a drop; ``kept`` segments were kept since the start of the run."""
        if kept // self._size != self._round:
            self._round = kept // self._size
            self._by_reason.clear()
        self._by_reason[reason or "no reason given"] += 1

    @property
    def are_too_many(self) -> bool:
        """True when more were dropped than is allowed for a round."""
        return self._by_reason.total() > self._most

    def __str__(self) -> str:
        """Say what was dropped and where to look."""
        reasons = ", ".join(f"{count} for {reason!r}" for reason, count in self._by_reason.most_common())
        most_frequent, _ = self._by_reason.most_common(1)[0]
        return (
            f"{self._by_reason.total()} segments were dropped for a round of {self._size} and at most "
            f"{self._most} may be (async_training.max_drops_per_round): {reasons}. Look at "
            f"pace/dropped_samples, and why collectors drop segments for {most_frequent!r}; or allow more"
        )
