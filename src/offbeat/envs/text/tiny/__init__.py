"""The tiny family: generated games of rooms, closed things and tools that fit, with an exact solver."""

from __future__ import annotations

from offbeat.envs.text.tiny.game import TinyGame
from offbeat.envs.text.tiny.solver import score_times, value
from offbeat.envs.text.tiny.world import Size, make_world

__all__ = ["Size", "TinyGame", "make_world", "score_times", "value"]
