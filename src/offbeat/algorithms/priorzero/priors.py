"""Priors: log-probabilities of a state's valid actions, from a prompt, and controls to hold them against."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.priorzero.prompts import EMPTY, label
from offbeat.errors import ConfigError
from offbeat.llm.loading import read_description
from offbeat.llm.model import Decoder
from offbeat.llm.scoring import Scorer, Scores
from offbeat.llm.tokens import Tokenizer

Floats = NDArray[np.float64]
Normalise = Literal["sum", "mean", "context_free"]
_MOST_CACHED = 50_000


class Prior(Protocol):
    """Gives log-probabilities over the valid actions of states, each shown as a prompt."""

    @property
    def version(self) -> str:
        """Stands for what answers: another model, or other weights, is another version."""

    def log_probs(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[Floats]:
        """Return for each prompt the log-probabilities of its actions; their exponentials sum to 1."""


class UniformPrior:
    """Holds all valid actions for equally likely."""

    version = "uniform"

    def log_probs(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[Floats]:
        """Return the log of one divided by the number of actions."""
        return [np.full(len(own), -np.log(len(own))) for own in actions]


class LabelScores(Protocol):
    """Gives log-probs of labels behind prompts: a language model, or a table of what one said."""

    @property
    def version(self) -> str:
        """Stands for the weights."""

    def of(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[Scores]:
        """Return the scores of each prompt's actions."""


class ModelScores:
    """Scores of a language model."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, version: str) -> None:
        self._tokenizer, self._labels = tokenizer, dict[str, list[int]]()
        self.load(version, model)

    def load(self, version: str, model: Decoder) -> None:
        """Take other weights."""
        self._scorer, self.version = Scorer(model, max_cached=1), version

    def of(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[Scores]:
        """Return the scores of each prompt's actions."""
        encoded = [[self._encode(action) for action in own] for own in actions]
        return self._scorer.score([self._tokenizer.encode(prompt) for prompt in prompts], encoded)

    def _encode(self, action: str) -> list[int]:
        if action not in self._labels:
            self._labels[action] = self._tokenizer.encode(label(action))
        return self._labels[action]


class ModelPrior:
    """A language model's log-probs of the actions behind the prompt, normalised over these.

    ``normalise`` says what of a label's token log-probs counts: their ``sum``, their ``mean``, or their sum
    less that under an empty prompt (``context_free``), which leaves out how likely the label is in itself.
    Answers are kept by version, prompt and actions; ``num_asked`` and ``num_cached`` count prompts.

    Example: ``read_prior(Path("tiny-prior")).log_probs([prompt], [actions])``.
    """

    def __init__(
        self, scores: LabelScores, normalise: Normalise = "sum", *, max_cached: int = _MOST_CACHED
    ) -> None:
        if normalise not in get_args(Normalise):
            raise ConfigError(
                f"prior.normalise is {normalise!r}; use one of {', '.join(get_args(Normalise))}"
            )
        self._scores, self._normalise, self._max_cached = scores, normalise, max_cached
        self._cache: OrderedDict[tuple[str, str, tuple[str, ...]], Floats] = OrderedDict()
        self.num_asked = self.num_cached = 0

    @property
    def version(self) -> str:
        """The version of the scores, and how they are used."""
        return f"{self._scores.version}/{self._normalise}"

    @property
    def hit_rate(self) -> float:
        """Share of prompts that were answered from what is kept."""
        return self.num_cached / max(self.num_asked, 1)

    def log_probs(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[Floats]:
        """Return the log-probabilities of the valid actions."""
        version = self.version
        asked = [(version, prompt, tuple(own)) for prompt, own in zip(prompts, actions, strict=True)]
        new = [one for one in dict.fromkeys(asked) if one not in self._cache]
        self.num_asked += len(asked)
        self.num_cached += len(asked) - len(new)
        if new:
            self._cache |= dict(zip(new, self._compute(new), strict=True))
        found = [self._cache[one] for one in asked]
        for one in asked:
            self._cache.move_to_end(one)
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return found

    def _compute(self, asked: Sequence[tuple[str, str, tuple[str, ...]]]) -> list[Floats]:
        actions = [own for _, _, own in asked]
        scores = self._scores.of([prompt for _, prompt, _ in asked], actions)
        if self._normalise == "mean":
            return [_normalised(one.means) for one in scores]
        if self._normalise == "sum":
            return [_normalised(one.sums) for one in scores]
        bare = self._scores.of([EMPTY] * len(actions), actions)
        return [_normalised(one.sums - free.sums) for one, free in zip(scores, bare, strict=True)]


def read_prior(folder: Path, normalise: Normalise = "sum") -> ModelPrior:
    """Return the prior of a model's folder, frozen."""
    return ModelPrior(read_scores(folder), normalise)


def read_scores(folder: Path) -> ModelScores:
    """Read a model's folder."""
    _, tokenizer = read_description(folder)
    model = Decoder.read(folder)
    return ModelScores(model, tokenizer, version_of(model))


def version_of(model: Decoder) -> str:
    """Return a SHA-256 of weights and shape, which stands for the model in tables and caches."""
    found = hashlib.sha256(repr(model.shape).encode())
    for name, weight in model.weights().items():
        found.update(name.encode())
        found.update(weight.cpu().float().numpy().tobytes())
    return found.hexdigest()


class ContextFreePrior:
    """A control: the same prior without the state, so that only how likely a label is in itself is left."""

    def __init__(self, prior: Prior) -> None:
        self._prior = prior

    @property
    def version(self) -> str:
        """The prior's version, marked."""
        return f"context-free:{self._prior.version}"

    def log_probs(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[Floats]:
        """Return what the prior makes of the actions behind an empty prompt."""
        return self._prior.log_probs([EMPTY] * len(prompts), actions)


class PermutedPrior:
    """A control: the prior's probabilities, handed to the state's actions in another order.

    The order follows a hash of each label: the same actions are always permuted the same way. It is exactly
    as peaked as the prior.
    """

    def __init__(self, prior: Prior) -> None:
        self._prior = prior

    @property
    def version(self) -> str:
        """The prior's version, marked."""
        return f"permuted:{self._prior.version}"

    def log_probs(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[Floats]:
        """Return the prior's log-probs in another order."""
        found = self._prior.log_probs(prompts, actions)
        return [one[permutation(own)] for one, own in zip(found, actions, strict=True)]


def permutation(actions: Sequence[str]) -> NDArray[np.int64]:
    """Return for each action, in the game's order, the place of the one whose probability it gets.

    Example: a game lists moves first; their probabilities go to whatever has the lowest hashes.
    """
    order = sorted(range(len(actions)), key=lambda at: _hash(actions[at]))
    found = np.empty(len(actions), np.int64)
    found[order] = np.arange(len(actions))
    return found


class MatchedPrior:
    """Brings a prior to one entropy in each state, by a temperature found for that state.

    ``share`` is that entropy in units of the uniform one's, log n for n actions. Arms of a comparison that
    differ in how peaked they are differ in how much is explored.
    """

    def __init__(self, prior: Prior, share: float) -> None:
        if not 0 < share < 1:
            raise ConfigError(f"prior.match_entropy is {share}; it is a share of log n, above 0 and below 1")
        self._prior, self._share = prior, share

    @property
    def version(self) -> str:
        """The prior's version with the entropy."""
        return f"{self._prior.version}@{self._share}"

    def log_probs(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[Floats]:
        """Return the prior's log-probs at another temperature."""
        found = self._prior.log_probs(prompts, actions)
        return [match_entropy(one, self._share * np.log(len(one))) for one in found]


def match_entropy(log_probs: Floats, entropy: float) -> Floats:
    """Return log-probs at the temperature at which they have this entropy, in nats.

    Where several actions are exactly as likely as the best one, no temperature goes below the log of their
    number; where all are, none changes anything.
    """
    if len(log_probs) == 1 or np.ptp(log_probs) == 0:
        return log_probs
    relative = log_probs - log_probs.max()
    low, high = np.log(1e-6 / -relative.min()), np.log(1e4 / -relative[relative < 0].max())
    for _ in range(60):
        middle = 0.5 * (low + high)
        if _entropy(relative * np.exp(middle)) > entropy:
            low = middle
        else:
            high = middle
    return _normalised(relative * np.exp(0.5 * (low + high)))


def _entropy(scores: Floats) -> float:
    found = _normalised(scores)
    return -float((np.exp(found) * found).sum())


def _normalised(scores: Floats) -> Floats:
    highest = scores.max()
    shifted: Floats = scores - highest
    result: Floats = shifted - np.log(np.exp(shifted).sum())
    return result


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
