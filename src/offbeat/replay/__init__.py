"""Stores between collectors and learner."""

from offbeat.replay.prioritized import Handles, PrioritizedReplay, Sample
from offbeat.replay.shared import Replay, SharedReplayBuffer
from offbeat.replay.stream import StreamStore
from offbeat.replay.sum_tree import SumTree

__all__ = [
    "Handles",
    "PrioritizedReplay",
    "Replay",
    "Sample",
    "SharedReplayBuffer",
    "StreamStore",
    "SumTree",
]
