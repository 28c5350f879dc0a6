"""A small model of tokens in numpy: how it samples a response, and how it is trained."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offbeat.types import Array, Batch, End, Metrics, Piece, Span, StateTree

EOS, CALL = 0, 1
"""Tokens with a meaning: the end, and the call of a tool, whose answer is the next token."""
NUM_TOKENS = 32
FROM_TOOL = -1
"""Stands for the version of a token that a tool gave."""
_SIZE = 8


@dataclass(slots=True, eq=False)
class Response:
    """A response under way. ``uniforms`` are drawn beforehand: samples depend on weights and tokens only.

    ``made`` holds the version behind each token. ``plan`` is the script: the version of each sampled token,
    and whether the cache is made anew for it.
    """

    seed: int
    prompt: list[int]
    uniforms: Array
    plan: list[tuple[int, bool]] | None = None
    plan_end: End = ""
    tokens: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    end: End = ""
    called_s: float | None = None  # when the tool that it waits for was called
    cache: Array = field(default_factory=lambda: np.zeros(_SIZE))
    unseen: list[int] = field(default_factory=list)  # tokens that are not in the cache yet
    is_rebuilt: bool = False  # its cache was made anew for the next token

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model made."""
        return sum(span.size for span in self.spans)

    @property
    def last(self) -> int:
        """The token that was sampled last; -1 where there is none, or a tool has answered since."""
        return self.tokens[-1] if self.made and self.made[-1] != FROM_TOOL else -1

    def rebuild(self) -> None:
        """Throw the cache away: the next step makes it anew, with the weights of then."""
        self.cache, self.unseen = np.zeros(_SIZE), [*self.prompt, *self.tokens]
        self.is_rebuilt = bool(self.spans)

    def follow(self, script: Piece) -> None:
        """Repeat a recorded response: each token with the version that made it, and the same end."""
        self.plan = [
            (span.version, span.rebuilt and place == 0) for span in script.spans for place in range(span.size)
        ]
        self.plan_end = script.end

    def append(self, token: int, version: int, logprob: float = 0.0) -> None:
        """Add a token, which the next step sees."""
        for values, value in ((self.tokens, token), (self.made, version), (self.unseen, token)):
            values.append(value)
        self.logprobs.append(logprob)

    def sample(self, version: int, weights: Mapping[str, Array]) -> None:
        """Make one token. What the cache lacks goes in first, so with the same weights as the token."""
        for token in self.unseen:
            self.cache = np.tanh(weights["embed"][token] + self.cache @ weights["mix"])
        self.unseen.clear()
        odds = np.exp(self.cache @ weights["head"] + weights["bias"])
        sums = odds.cumsum()
        token = int(np.searchsorted(sums, self.uniforms[self.num_sampled] * sums[-1], "right"))
        if self.is_rebuilt or not self.spans or self.spans[-1].version != version:
            self.spans.append(Span(version, 0, self.is_rebuilt))
            self.is_rebuilt = False
        self.spans[-1] = self.spans[-1]._replace(size=self.spans[-1].size + 1)
        self.append(token, version, float(np.log(odds[token] / sums[-1])))

    def arrays(self) -> dict[str, Array]:
        """Return tokens, what made them, and their log-probabilities."""
        tokens, made = np.array(self.tokens, np.int64), np.array(self.made, np.int64)
        return {"tokens": tokens, "made": made, "logprobs": np.array(self.logprobs, np.float64)}

    def begin(self, saved: StateTree, newest: int) -> None:
        """Continue from saved arrays, spans and end, without what versions above ``newest`` made."""
        made = saved["made"].tolist()
        kept = next((place for place, version in enumerate(made) if version > newest), len(made))
        self.tokens, self.made = saved["tokens"].tolist()[:kept], made[:kept]
        self.logprobs = saved["logprobs"].tolist()[:kept]
        self.spans = [Span(*span) for span in saved["spans"] if span[0] <= newest]
        self.end = saved["end"] if kept == len(made) else ""


class TokenLearner:
    """Changes the weights with every token, its version and log-probability, in their order.

    So two runs have equal weights only if they trained the same tokens of the same versions in one order.
    ``bias`` adds to the log-odds of tokens; ``train_s`` is the time that a round takes at least.
    """

    def __init__(self, seed: int = 0, bias: Mapping[int, float] | None = None, train_s: float = 0.0) -> None:
        rng = np.random.default_rng(seed)
        shapes = {"embed": (NUM_TOKENS, _SIZE), "mix": (_SIZE, _SIZE), "head": (_SIZE, NUM_TOKENS)}
        self._weights: dict[str, Array] = {name: rng.normal(0.0, 0.5, size) for name, size in shapes.items()}
        self._weights["bias"] = np.zeros(NUM_TOKENS)
        for token, added in (bias or {}).items():
            self._weights["bias"][token] = added
        self._train_s = train_s

    def train(self, batch: Batch) -> Metrics:
        """Pull the embedding of each token towards a trace of all that came before it."""
        embed, num_tokens = self._weights["embed"], 0
        trace = np.zeros(_SIZE)
        for segment in batch.segments:
            rows = (segment.data[name].tolist() for name in ("tokens", "made", "logprobs"))
            for token, version, logprob in zip(*rows, strict=True):
                trace = np.tanh(embed[token] + 0.7 * trace + 0.1 * np.sin(version) + logprob / 8.0)
                embed[token] += 0.01 * (trace - embed[token])
                num_tokens += 1
        time.sleep(self._train_s)
        return {"learn/tokens": float(num_tokens)}

    def weights(self) -> dict[str, Array]:
        """Return a copy of the weights."""
        return {name: array.copy() for name, array in self._weights.items()}

    def state_dict(self) -> StateTree:
        """Return the weights."""
        return self.weights()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved weights."""
        self._weights = {name: np.array(array) for name, array in state.items()}
