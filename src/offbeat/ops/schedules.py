"""Values that change with the version: functions of it, so that a resumed run needs nothing saved."""

from __future__ import annotations

import math


def linear_schedule(start: float, end: float, *, step: int, num_steps: int) -> float:
    """Value at ``step`` on the line from ``start`` (step 0) to ``end`` (from ``num_steps`` on).

    Example: ``linear_schedule(1.0, 0.0, step=25, num_steps=100)`` is 0.75.
    """
    progress = min(max(step, 0) / num_steps, 1.0)
    return start + progress * (end - start)


def cosine_schedule(start: float, end: float, *, step: int, num_steps: int) -> float:
    """Value at ``step`` on half a cosine from ``start`` to ``end`` (https://arxiv.org/abs/1608.03983).

    Example: ``cosine_schedule(1.0, 0.0, step=50, num_steps=100)`` is 0.5.
    """
    progress = min(max(step, 0) / num_steps, 1.0)
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * progress))
