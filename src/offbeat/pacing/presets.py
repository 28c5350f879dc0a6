"""Presets: admission rules of other projects, which count segments where ours looks at their deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.pacing.deadlines import Feasible


@dataclass(frozen=True, slots=True)
class Preset:
    """A rule of admission that counts, whatever the age of what is outstanding.

    A ticket is issued while fewer than ``rounds_ahead`` rounds of segments are outstanding; what was trained
    since the newest weights were published makes no room. ``batches`` rounds begin together, once all their
    segments are there. ``by_arrival``: rounds train what arrived first, not what was issued first.
    ``in_step``: the segments of a round are collected with one version, so weights are published between two
    rounds' segments, and those of one round only are under way.
    """

    name: str
    rounds_ahead: float
    batches: int = 1
    by_arrival: bool = False
    in_step: bool = False

    def is_bounded(self, publish_interval: int) -> bool:
        """Return True if no segment can become older than k: none is left when weights are published."""
        return self.in_step or self.rounds_ahead <= publish_interval

    def most_ahead(self, segments_per_round: int) -> int:
        """Return the segments that may be outstanding when weights are published."""
        return int(self.rounds_ahead * segments_per_round + 1e-9)

    def rule(self, degree: int) -> Feasible:
        """Return the rule for issuing a ticket: the newest deadline is its own, ``degree`` after its version.

        Example: AReaL's with a lead of 2 rounds is ``Preset("areal", 3).rule(2)``, and
        ``rule({2: 3}, 0, 1)`` is true, ``rule({2: 4}, 0, 1)`` is not.
        """

        def has_room(deadlines: Mapping[int, int], next_round: int, segments_per_round: int) -> bool:
            begun = 0 if self.in_step else next_round - (max(deadlines) - degree)  # since its version
            most = self.most_ahead(segments_per_round) - begun * segments_per_round
            return sum(deadlines.values()) <= most

        return has_room
