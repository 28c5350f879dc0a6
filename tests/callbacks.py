"""Callbacks that several tests use."""

from __future__ import annotations

from typing import Any

import offbeat


class EndAt(offbeat.Callback):
    """Asks for the end of a run after the round of a version; ``how`` is ``stop`` or ``finish``."""

    def __init__(self, version: int, how: str = "stop") -> None:
        self._version, self._how = version, how

    def on_start(self, info: Any) -> None:
        self._end = getattr(info, self._how)

    def on_round(self, info: Any) -> None:
        if info.version == self._version:
            self._end("enough")
