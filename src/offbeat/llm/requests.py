"""Requests to generate, and the responses to them: token ids in, token ids out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError
from offbeat.types import End, Piece, Span

MOST_SAMPLES = 1 << 16
"""Responses to one request: each takes memory from `Engine.submit` on."""
MOST_THREADS = 256


@dataclass(frozen=True, slots=True)
class Response:
    """One response, whole or as far as it is.

    ``tokens`` are all after the prompt; ``log_probs`` those of its own tokens under the weights and the
    temperature that drew them, 0 where ``is_own`` is false: these were given, such as the answer of a tool.
    ``made_s`` says when each token was made, in seconds since 1970; NaN where that is not known.
    ``spans`` say which version made how many of its own tokens, in order, ``end`` why it ended; it is empty
    for a response under way.
    """

    key: int
    sample: int
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    is_own: NDArray[np.bool_]
    spans: tuple[Span, ...] = ()
    end: End = ""
    made_s: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def piece(self) -> Piece:
        """The record from which a replay repeats it."""
        return Piece(self.spans, self.end)

    @property
    def versions(self) -> NDArray[np.int32]:
        """The version of the weights that drew each of its own tokens."""
        sizes = [span.size for span in self.spans]
        return np.repeat(np.array([span.version for span in self.spans], np.int32), sizes)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how to continue it ``num_samples`` times.

    ``key`` names it, ``seed`` and the number of the sample alone decide what is drawn at each position.
    ``temperature`` 0 takes the most likely token; ``top_k`` 0 and ``top_p`` 1 draw among all. It ends at one
    of ``stop_ids`` (None: where the model says so), after ``max_new_tokens``, at the engine's limit, or
    ``time_limit_s`` after it was submitted. ``hold``: a response that ended at a stop token keeps its cache
    until it is extended (`Engine.extend`) or released. ``samples`` are the numbers of those to make, empty
    for all. ``begun`` are responses to go on with, whose own tokens count towards ``max_new_tokens``;
    ``scripts`` the records to repeat, one for each sample.

    Example: ``Request(key=3, prompt=(1, 306), num_samples=8, max_new_tokens=64, seed=7)``.
    """

    key: int
    prompt: tuple[int, ...]
    num_samples: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] | None = None
    seed: int = 0
    time_limit_s: float = math.inf
    hold: bool = False
    samples: tuple[int, ...] = ()
    begun: tuple[Response, ...] = ()
    scripts: tuple[Piece, ...] = field(default=())

    @property
    def wanted(self) -> Sequence[int]:
        """Numbers of the samples to make."""
        return self.samples or range(self.num_samples)

    def check(self, vocab_size: int, max_length: int, most_stops: int) -> None:
        """Raise ConfigError if an engine with these limits cannot take it."""
        if not self.prompt:
            raise ConfigError("the prompt has no tokens: begin it with the tokenizer's first token at least")
        if len(self.prompt) >= max_length:
            raise ConfigError(
                f"the prompt has {len(self.prompt)} tokens, and a sequence at most {max_length} with the "
                "response: shorten it, or give the engine a larger max_length"
            )
        check_tokens("the prompt", self.prompt, vocab_size)
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ConfigError("num_samples and max_new_tokens must be at least 1")
        if self.num_samples > MOST_SAMPLES:
            raise ConfigError(
                f"num_samples is {self.num_samples}, and may be {MOST_SAMPLES}: use several requests, each "
                "with a seed of its own"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ConfigError(f"temperature is {self.temperature}: it must be a finite number, 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}: it must be above 0, and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}: it must be 0 (all tokens) or more")
        if self.stop_ids is not None and len(self.stop_ids) > most_stops:
            raise ConfigError(f"stop_ids has {len(self.stop_ids)} tokens, and may have {most_stops}")
        if self.scripts and len(self.scripts) != self.num_samples:
            raise ConfigError(f"there are {len(self.scripts)} scripts for {self.num_samples} samples")
        if not self.time_limit_s > 0.0:
            raise ConfigError(f"time_limit_s is {self.time_limit_s}: it must be above 0")
        if len({*self.samples} & {*range(self.num_samples)}) < len(self.samples):
            raise ConfigError(
                f"samples is {self.samples}: they must be different, and 0 to {self.num_samples - 1}"
            )
        for one in self.begun:
            name, size = f"begun sample {one.sample}", len(self.prompt) + len(one.tokens)
            if not 0 <= one.sample < self.num_samples:
                raise ConfigError(f"{name} is not among num_samples={self.num_samples}")
            if size > max_length:
                raise ConfigError(
                    f"{name} has {size} tokens with its prompt: give the engine a max_length of {size}"
                )
            check_tokens(name, one.tokens.tolist(), vocab_size)


def check_threads(threads: int) -> None:
    """Raise ConfigError for a number of threads that torch cannot start; it would end the process."""
    if not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"threads is {threads}: use 1 to {MOST_THREADS}, and at most the number of cores")


def check_tokens(name: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ConfigError if one of them is no token of the model."""
    wrong = [token for token in tokens if not 0 <= token < vocab_size]
    if wrong:
        raise ConfigError(
            f"{name} has token {wrong[0]}, and the model tokens 0 to {vocab_size - 1}: "
            "use the tokenizer that belongs to the model"
        )
