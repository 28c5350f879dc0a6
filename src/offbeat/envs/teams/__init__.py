"""Environments in which several agents act together, behind one interface. No torch."""

from __future__ import annotations

from offbeat.envs.teams.make import make_shown_team, make_team
from offbeat.envs.teams.team import Team, TeamStep, View, random_actions

__all__ = ["Team", "TeamStep", "View", "make_shown_team", "make_team", "random_actions"]
