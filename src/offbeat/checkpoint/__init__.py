"""Checkpoints: state trees as JSON and safetensors, written atomically, verified before use."""

from offbeat.checkpoint.codec import check_data, check_state, digest, fitting, pack, unpack
from offbeat.checkpoint.manager import CheckpointManager, LoadedCheckpoint

__all__ = [
    "CheckpointManager",
    "LoadedCheckpoint",
    "check_data",
    "check_state",
    "digest",
    "fitting",
    "pack",
    "unpack",
]
