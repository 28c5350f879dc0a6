"""Defines `Algorithm`: a name, its settings, and a function that makes its roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeVar

from offbeat.config.models import AlgorithmConfig, EnvConfig, RunConfig
from offbeat.envs.judged import EnvSpaces
from offbeat.envs.make import make_single
from offbeat.roles import Evaluator, Learner, PerWorker, Ranks, SerialCollector
from offbeat.types import Array

T = TypeVar("T")
Weights = Mapping[str, Array]
"""Published weights: names to numpy arrays."""


class Policy(Protocol):
    """A trained policy for users: observations in, actions out."""

    def act(self, obs: Array, *, deterministic: bool = True) -> Array:
        """Choose the action for one observation ``[...]``, or actions for a batch of them ``[N, ...]``."""
        ...

    def reset(self) -> None:
        """Reset the recurrent state at the start of an episode."""
        ...


@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of one run.

    ``learner`` is called in the learner's process, in each of them if it has several ranks, and may import
    torch; ``collect`` and ``evaluate`` are made in workers; without ``evaluate`` nothing is evaluated. A
    ``stream`` trains each segment once; a learner with a ``replay`` keeps what it gets and samples: at most
    ``replay_ratio`` rounds per segment (None: as fast as it can), the first once ``min_segments`` came and
    ``warmup_s`` seconds went by. ``data_parallel`` says that the learner shares its work with other ranks:
    without it, ``learner.num_ranks`` has to be 1.
    """

    collect: PerWorker[SerialCollector]
    learner: Callable[[Ranks], Learner]
    policy: Callable[[Weights], Policy]
    mode: Literal["stream", "replay"]
    segments_per_round: int
    evaluate: PerWorker[Evaluator] | None = None
    replay_ratio: float | None = None
    min_segments: int = 0
    warmup_s: float = 0.0
    data_parallel: bool = False


_OLDER_NAMES = {"facts": "startup_notes", "look": "probe_env", "show": "make_render_env"}


def _accept_older_names(kind: type[T]) -> type[T]:
    """Let a class be made with, and read by, the older names of its fields."""
    make: Callable[..., None] = getattr(kind, "__init__")  # noqa: B009

    @wraps(make)
    def init(self: object, *args: Any, **fields: Any) -> None:
        make(self, *args, **{_OLDER_NAMES.get(name, name): value for name, value in fields.items()})

    setattr(kind, "__init__", init)  # noqa: B010
    for older, name in _OLDER_NAMES.items():
        setattr(kind, older, property(attrgetter(name)))
    return kind


@_accept_older_names
@dataclass(frozen=True, slots=True)
class Algorithm:
    """An entry of the registry. Example: ``ALGORITHM = Algorithm("ppo", PPOConfig, build)``.

    ``check`` looks at what only a try can tell, such as whether the environment can be made, before a run
    leaves any trace; it raises an error that names the fix. ``startup_notes`` are reported by ``offbeat
    check`` and when a run starts: by name, what is worth knowing before, such as the memory that a replay
    takes. ``probe_env`` makes one environment and returns what networks are fitted to; None for algorithms
    without environments. ``make_render_env`` makes one environment in a render mode, for `offbeat play`.
    The older names ``facts``, ``look`` and ``show`` of these three are accepted, too.
    """

    name: str
    config_model: type[AlgorithmConfig]
    build: Callable[[RunConfig], Roles]
    check: Callable[[RunConfig], None] | None = None
    startup_notes: Callable[[RunConfig], Mapping[str, str]] | None = None
    probe_env: Callable[[EnvConfig], EnvSpaces] | None = None
    make_render_env: Callable[[EnvConfig, str | None], Any] = make_single
