"""Stores between collectors and learner."""

from offbeat.replay.stream import StreamStore

__all__ = ["StreamStore"]
