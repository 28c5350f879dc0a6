"""Environments: making them, stepping many at once, and taking and putting back their state. No torch."""

from __future__ import annotations

from offbeat.envs.colorlines import register_color_lines
from offbeat.envs.connect4 import register_connect4
from offbeat.envs.make import make_world
from offbeat.envs.memory import register_memory
from offbeat.envs.teams.alice_and_bob import register_alice_and_bob
from offbeat.envs.world import Step, World

register_memory()
register_color_lines()
register_connect4()
register_alice_and_bob()

__all__ = ["Step", "World", "make_world"]
