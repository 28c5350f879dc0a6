"""Metrics as TensorBoard event files.

Written here rather than by TensorBoard's own writer, for speed: its checksum is a Python loop over every byte
(about 0.25 ms per round), and torch's writer takes a second to import. Both use the same format: records of
``length, crc(length), data, crc(data)``, little-endian, with masked CRC-32C checksums.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.observe.text import number

_SYNCHRONOUS = {
    "Sync/PolicyVersion": "weights/current_param_version",
    "Sync/CollectionTime": "time/collect_s",
    "Sync/UpdateTime": "time/train_s",
    "Sync/FirstRatioMaxDev": "learn/first_ratio_max_dev",
}
"""Additional tags of synchronous runs, and the metrics that they show."""

_FLUSH_INTERVAL_S = 1.0


class TensorBoardSink:
    """Writes scalars into ``directory``, one event file per start of the run.

    ``resumed_from`` makes TensorBoard drop what an interrupted attempt wrote beyond that version.
    """

    def __init__(
        self, directory: str | Path, resumed_from: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._event = Event
        self._clock = clock
        self._crc = _Crc32c()
        Path(directory).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{clock():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (Path(directory) / name).open("ab")
        self._flushed_at_s = -math.inf
        self._append(Event(file_version="brain.Event:2"))
        if resumed_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._append(Event(step=resumed_from + 1, session_log=start))

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """Write every finite number, with ``version`` as the step."""
        if metrics.get("pace/off_policy_degree") == 0:
            aliases = {alias: metrics[name] for alias, name in _SYNCHRONOUS.items() if name in metrics}
            collected = number(metrics, "rollout/steps_per_s") * number(metrics, "time/round_s")
            metrics = {**metrics, **aliases, "Sync/SamplesCollected": collected}
        event = self._event(step=version)
        add = event.summary.value.add
        for name, value in metrics.items():
            if not isinstance(value, str) and math.isfinite(value):
                add(tag=name, simple_value=value)
        self._append(event)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _append(self, event: Any) -> None:
        now_s = event.wall_time = self._clock()
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", self._crc.masked(part)) for part in (length, data)]
        self._file.write(length + checksums[0] + data + checksums[1])
        if now_s - self._flushed_at_s >= _FLUSH_INTERVAL_S:
            self._file.flush()
            self._flushed_at_s = now_s


class _Crc32c:
    """CRC-32C without a loop over bytes.

    The checksum is linear: each byte adds, by exclusive or, a term that depends on its value and on its
    distance to the end alone. ``_terms`` holds them for a chunk: 256 values of its first byte, and so on.
    """

    _CHUNK = 1024

    def __init__(self) -> None:
        one, low_byte = np.uint32(1), np.uint32(0xFF)
        step = np.arange(256, dtype=np.uint32)
        for _ in range(8):
            step = (step >> one) ^ (np.uint32(0x82F63B78) * (step & one))
        rows = [step]
        while len(rows) < self._CHUNK:
            rows.append(step[rows[-1] & low_byte] ^ (rows[-1] >> np.uint32(8)))
        self._terms: NDArray[np.uint32] = np.concatenate(rows[::-1])
        self._rows = 256 * np.arange(self._CHUNK)

    def checksum(self, data: bytes) -> int:
        register = 0xFFFFFFFF
        for start in range(0, len(data), self._CHUNK):
            chunk = np.frombuffer(data[start : start + self._CHUNK], np.uint8).copy()
            chunk[:4] ^= np.frombuffer(register.to_bytes(4, "little"), np.uint8)[: len(chunk)]
            terms = self._terms.take(self._rows[-len(chunk) :] + chunk)
            register = int(np.bitwise_xor.reduce(terms)) ^ (register >> 8 * len(chunk))
        return register ^ 0xFFFFFFFF

    def masked(self, data: bytes) -> int:
        crc = self.checksum(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
