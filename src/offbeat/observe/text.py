"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

_DASH = "–"
REPLAY_METRIC = "learn/replay_size"
"""A metric of learners with a replay only: there the age of samples is not bounded by k."""


def fill(template: str, metrics: Mapping[str, float]) -> str:
    """Put metrics into a text: ``fill("{rollout/steps_per_s:k} steps/s", metrics)``.

    After the colon: 0 to 3 decimal places, ``k`` compact, ``B`` bytes, ``%`` share, ``t`` duration. What is
    not known becomes a dash.
    """
    return template.format_map(_Cells(metrics))


def number(metrics: Mapping[str, float], name: str) -> float:
    """A metric; NaN when it is missing."""
    return float(metrics.get(name, math.nan))


def plain(value: float, digits: int = 1) -> str:
    """``231.4``; a dash for what is not known."""
    return f"{value:.{digits}f}" if math.isfinite(value) else _DASH


def evaluation(metrics: Mapping[str, float]) -> str:
    """Return an evaluation in words: ``-500.0 ± 0.0 over 10 episodes (-136.7 with drawn actions)``.

    Only the mean is always there; it is a dash when it is not known.
    """
    mean, spread, drawn = (number(metrics, f"eval/return_{n}") for n in ("mean", "std", "mean_sampled"))
    episodes = number(metrics, "eval/episodes")
    text = f"{mean:,.1f}" if math.isfinite(mean) else _DASH
    if math.isfinite(spread):
        text += f" ± {spread:,.1f}"
    if math.isfinite(episodes):
        text += f" over {episodes:,.0f} episode" + ("" if episodes == 1 else "s")
    if math.isfinite(drawn):
        text += f" ({drawn:,.1f} with drawn actions)"
    return text


def compact(value: float) -> str:
    """``950``, ``48.2k``, ``1.3M``."""
    if not math.isfinite(value):
        return _DASH
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.99995 * limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def size(num_bytes: float) -> str:
    """``640 MB``, in powers of ten."""
    if not math.isfinite(num_bytes):
        return _DASH
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * limit:
            return f"{num_bytes / limit:.1f} {unit}" if limit == 1e9 else f"{num_bytes / limit:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def share(value: float) -> str:
    """``43%``."""
    return f"{100 * value:.0f}%" if math.isfinite(value) else _DASH


def duration(seconds: float) -> str:
    """``0:46``, ``1:02:03``; whole seconds, rounded."""
    if not math.isfinite(seconds):
        return _DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: list[float], width: int) -> str:
    """A curve of block characters, at most ``width`` wide, from the lowest to the highest value."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    step = max(1.0, len(finite) / width)
    picked = [finite[min(len(finite) - 1, int((i + 1) * step) - 1)] for i in range(min(width, len(finite)))]
    low, high = min(picked), max(picked)
    scale = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / scale)] for value in picked)


_FORMATS: dict[str, Callable[[float], str]] = {
    **{str(digits): partial(plain, digits=digits) for digits in range(4)},
    "k": compact,
    "B": size,
    "%": share,
    "t": duration,
}


@dataclass(frozen=True, slots=True)
class _Cell:
    value: float

    def __format__(self, spec: str) -> str:
        return _FORMATS[spec](float(self.value))


class _Cells(dict[str, _Cell]):
    """Metrics ready for ``str.format_map``, made as they are asked for."""

    def __init__(self, metrics: Mapping[str, float]) -> None:
        self._metrics = metrics

    def __missing__(self, name: str) -> _Cell:
        return _Cell(self._metrics.get(name, math.nan))
