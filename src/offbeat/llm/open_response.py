"""One response under way, as the engine knows it on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from offbeat.llm.requests import Request, Response
from offbeat.types import Piece, Span


@dataclass(slots=True, eq=False)
class Open:
    """A response under way. ``length`` tokens of its sequence are known while it is not a row."""

    request: Request
    sample: int
    stops: tuple[int, ...]
    deadline_s: float
    script: Piece | None
    begun: Response | None = None
    slot: int = -1
    is_row: bool = False
    has_ended_turn: bool = False  # and waits for `Engine.extend`
    length: int = 0
    given: list[tuple[int, int]] = field(default_factory=list)  # positions that were not drawn
    spans: list[Span] = field(default_factory=list)  # closed ones
    version: int = -1  # of the span at hand
    is_rebuilt: bool = False  # at its beginning
    stamp: int | None = None  # version of the cache
    num_new: int = 0  # own tokens it may have

    def __post_init__(self) -> None:
        begin = len(self.request.prompt)
        self.length, self.num_new = begin, self.request.max_new_tokens
        if self.begun is None:
            return
        self.length += len(self.begun.tokens)
        self.spans = list(self.begun.spans)
        is_own = np.concatenate(([True], self.begun.is_own, [True]))
        edges = (begin + np.flatnonzero(np.diff(is_own.astype(np.int8)))).tolist()
        self.given = list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def name(self) -> tuple[int, int]:
        """Key and sample."""
        return self.request.key, self.sample

    @property
    def is_fresh(self) -> bool:
        """True while nothing but the prompt is known."""
        return self.length == len(self.request.prompt)

    def num_own(self, length: int) -> int:
        """Number of its own tokens in a sequence of this length."""
        return length - len(self.request.prompt) - sum(end - begin for begin, end in self.given)

    def begin_span(self, length: int, version: int, is_rebuilt: bool) -> None:
        """Let another version, or another cache, make the tokens from here on."""
        size = self.num_own(length) - sum(span.size for span in self.spans)
        if size:
            self.spans.append(Span(self.version, size, self.is_rebuilt))
        self.version, self.is_rebuilt = version, is_rebuilt

    def scripted(self, num_own: int) -> tuple[Span, int] | None:
        """Return the recorded span of its next token, and the tokens until its end; None without one."""
        until = 0
        for span in self.script.spans if self.script is not None else ():
            until += span.size
            if num_own < until:
                return span, until - num_own
        return None
