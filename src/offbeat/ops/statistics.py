"""Masked means, running moments, and what staleness costs, in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.types import Array

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


def masked_mean(values: Floats, mask: Bools) -> float:
    """Mean of ``values`` where ``mask`` holds, both ``[...]``; 0 when it holds nowhere."""
    count = np.count_nonzero(mask)
    return float(np.sum(values, where=mask, dtype=np.float64) / count) if count else 0.0


def masked_normalise(
    values: Floats, mask: Bools, *, weights: Floats | None = None, eps: float = 1e-8
) -> Floats:
    """Shift and scale ``values`` to mean 0 and deviation 1 over ``mask``, both ``[...]``; 0 elsewhere.

    With ``weights`` ``[...]`` mean and deviation are weighted ones.
    """
    mean = masked_mean(values, mask) if weights is None else _weighted_mean(values, mask, weights)
    centred = values - np.float32(mean)
    centred[~mask] = 0
    squares = np.square(centred)
    variance = masked_mean(squares, mask) if weights is None else _weighted_mean(squares, mask, weights)
    deviation = variance**0.5
    normalised: Floats = centred / np.float32(deviation + eps)
    return normalised


def _weighted_mean(values: Floats, mask: Bools, weights: Floats) -> float:
    total = np.sum(weights, where=mask, dtype=np.float64)
    return float(np.sum(values * weights, where=mask, dtype=np.float64) / total) if total else 0.0


def effective_sample_size(log_ratios: Floats) -> float:
    """Share of samples that importance weights leave, ``(sum w)^2 / (M sum w^2)`` in [0, 1].

    Args:
        log_ratios: ``[M]``, ``log w``: log-probability under the target policy minus behaviour policy.
    """
    if not log_ratios.size:
        return 1.0
    weights = np.exp(log_ratios.astype(np.float64) - log_ratios.max())
    return float(weights.sum() ** 2 / (weights.size * np.square(weights).sum()))


def approx_kl(log_ratios: Floats) -> float:
    """Estimate of KL(p || q) from samples of p: mean of ``(r - 1) - log r``, ``r = q / p``; never negative.

    Low variance and unbiased, http://joschu.net/blog/kl-approx.html.

    Args:
        log_ratios: ``[M]``, ``log q - log p`` at the samples.
    """
    if not log_ratios.size:
        return 0.0
    wide = log_ratios.astype(np.float64)
    return float(np.mean(np.expm1(wide) - wide))


def explained_variance(predictions: Floats, targets: Floats) -> float:
    """``1 - Var(targets - predictions) / Var(targets)``, both ``[M]``; 0 when the targets do not vary."""
    variance = float(np.var(targets)) if targets.size else 0.0
    return 1.0 - float(np.var(targets - predictions)) / variance if variance else 0.0


def log_softmax_at(logits: Floats, index: Array) -> Floats:
    """Log-probability ``[...]`` of the entries ``index`` ``[...]`` under logits ``[..., P]``."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chosen: Floats = np.take_along_axis(shifted, index[..., None], axis=-1)[..., 0]
    logp: Floats = chosen - np.log(np.exp(shifted).sum(axis=-1))
    return logp


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and variance of a stream, mergeable in any order.

    Example: ``Moments.empty((4,)).merge(Moments.of(samples))`` with ``samples`` of shape ``[M, 4]``.
    """

    count: float
    mean: Array
    var: Array

    @classmethod
    def empty(cls, shape: tuple[int, ...] = ()) -> Moments:
        """Of nothing: mean 0 and variance 1, so that normalising with it changes nothing."""
        return cls(0.0, np.zeros(shape), np.ones(shape))

    @classmethod
    def of(cls, samples: Array) -> Moments:
        """Of the rows of ``samples`` ``[M, ...]``, M >= 1."""
        wide = samples.astype(np.float64)
        return cls(float(len(wide)), wide.mean(axis=0), wide.var(axis=0))

    def merge(self, other: Moments) -> Moments:
        """Moments of both streams together (Chan et al. 1979, pairwise update)."""
        if not self.count or not other.count:
            return other if other.count else self
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        squares = self.var * self.count + other.var * other.count
        squares += np.square(delta) * (self.count * other.count / count)
        return Moments(count, np.asarray(mean), np.asarray(squares / count))

    def scale(self, *, eps: float = 1e-8) -> Floats:
        """``1 / sqrt(var + eps)``, float32."""
        return np.asarray(1.0 / np.sqrt(self.var + eps), np.float32)

    def state_dict(self) -> dict[str, Array | float]:
        """Plain values for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "var": self.var}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Moments:
        """The moments that ``state_dict`` described."""
        return cls(float(state["count"]), np.array(state["mean"]), np.array(state["var"]))
