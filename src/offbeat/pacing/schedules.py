"""Random schedules for the simulator: a configuration, how long things take, and what goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from offbeat.errors import ConfigError
from offbeat.pacing.config import AUTO, PaceConfig
from offbeat.pacing.presets import Preset

_LARGE = 0.01
PRESETS = ("one_step_off", "verl_fully_async", "areal")
_DEGREES = (AUTO, AUTO, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of a schedule. Shares in [0, 1], times in simulated seconds.

    ``loss`` and ``hang`` are the shares of tickets whose collector dies or hangs in the middle, ``kills`` are
    (time, collector) of collectors that die whatever they do, ``poison`` is a ticket that kills each of its
    collectors, ``start_death`` and ``start_hang`` are the shares of collectors that do not come up.
    ``publish_breaks_at`` is the attempt from which on every publish fails. At the version ``publish_hang_at``
    or ``train_hang_at`` the learner hangs, at ``nan_at`` its loss is NaN once, and at the times
    ``learner_crashes`` it dies. ``eval_hang`` is the share of evaluations that never end. ``crashes`` are the
    times at which the whole run dies; it continues from its checkpoint. ``suspensions`` are the times at
    which the machine is suspended, and for how long. At most ``max_restarts`` collectors are replaced.
    """

    loss: float = 0.0
    hang: float = 0.0
    kills: tuple[tuple[float, int], ...] = ()
    poison: int | None = None
    start_death: float = 0.0
    start_hang: float = 0.0
    max_restarts: int = 100_000
    publish_failure: float = 0.0
    publish_breaks_at: int | None = None
    publish_hang_at: int | None = None
    train_hang_at: int | None = None
    nan_at: int | None = None
    learner_crashes: tuple[float, ...] = ()
    eval_hang: float = 0.0
    crashes: tuple[float, ...] = ()
    suspensions: tuple[tuple[float, float], ...] = ()
    stop_at_s: float | None = None
    resume_after_stop: bool = False


@dataclass(frozen=True, slots=True)
class Closing:
    """Gates that are closed at a time and opened ``for_s`` seconds later.

    ``collect`` is whether tickets may be issued meanwhile, ``rounds`` how many may be trained (None: any).
    """

    at_s: float
    for_s: float
    collect: bool
    rounds: int | None


@dataclass(frozen=True, slots=True)
class Collectors:
    """Collectors of a schedule: how many tickets each holds, 0 for one that works one by one.

    ``piece_s`` is the longest piece of work; ``changes`` the share of pieces after which a capacity is
    another one, ``sleeps`` that of tickets which wait for something outside, and ``drops`` that of segments
    that are not worth training. It takes up to ``answer_s`` until one hears that it is asked for begun work.
    ``saves``: those that work one by one have a state that can be saved.
    """

    capacities: tuple[int, ...]
    piece_s: float = 1.0
    changes: float = 0.0
    sleeps: float = 0.0
    drops: float = 0.0
    answer_s: float = 0.0
    saves: bool = True


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run to simulate. ``collect_s`` is each collector's typical time for a segment.

    ``tail`` is the exponent of a Pareto factor on collect and train times (small is heavy, None is
    steady), ``grid_s`` rounds times up so that things happen at once, ``ess_cost`` is how much effective
    sample size a round of staleness costs, ``think_s`` is the user's pause between two steps of a stepwise
    run, and ``busy_s`` how long at most the driver is busy between two steps (None: it decides after each
    event). Collectors work one by one where ``collectors`` is None. ``moves`` are (time, collector) of those
    that leave (None: one joins).
    """

    config: PaceConfig
    seed: int
    collect_s: tuple[float, ...]
    train_s: float = 1.0
    publish_s: float = 0.0
    snapshot_s: float = 0.0
    write_s: float = 0.0
    eval_s: float = 0.0
    start_s: float = 0.0
    tail: float | None = None
    grid_s: float = 0.0
    ess_cost: float = 0.0
    dial_turns: tuple[tuple[float, int], ...] = ()
    faults: Faults = Faults()
    closings: tuple[Closing, ...] = ()
    think_s: float = 0.0
    busy_s: float | None = None
    collectors: Collectors | None = None
    moves: tuple[tuple[float, int | None], ...] = ()


def steady_schedule(collect_s: float, train_s: float, degree: int, rounds: int = 200) -> Schedule:
    """A run without noise or faults: four collectors, four segments a round."""
    config = PaceConfig(rounds=rounds, segments_per_round=4, num_collectors=4, off_policy_degree=degree)
    return Schedule(config, seed=0, collect_s=(collect_s,) * 4, train_s=train_s)


def draw_schedule(seed: int) -> Schedule:
    """Draw a schedule; the same seed gives the same one."""
    rng = Random(seed)
    config = _draw_config(rng)
    collectors = _draw_collectors(rng, config)
    if rng.random() < _LARGE:
        config, collectors = _enlarged(rng, config)
    collect_s, train_s = _draw_collect_s(rng, config.num_collectors), rng.uniform(0.1, 2.0)
    if collectors is not None:  # its pieces are so far in units of the mean time for a segment
        mean_s = sum(collect_s) / len(collect_s)
        collectors = replace(collectors, piece_s=mean_s * collectors.piece_s)
    length_s = _rough_length_s(config, collect_s, train_s)
    schedule = Schedule(
        config=config,
        seed=seed,
        collect_s=collect_s,
        train_s=train_s,
        publish_s=rng.choice((0.0, 0.0, 0.1, rng.uniform(0, 3.0))),
        snapshot_s=rng.choice((0.0, rng.uniform(0, 1.0))),
        write_s=rng.choice((0.0, 0.1, 0.5)),
        eval_s=rng.choice((0.1, rng.uniform(0, 5.0), rng.uniform(5.0, 60.0))),
        start_s=rng.choice((0.0, rng.uniform(0, 5.0))),
        tail=rng.choice((None, 3.0, 1.5, 1.1)),
        grid_s=rng.choice((0.0, 0.0, 0.5, 1.0)),
        ess_cost=rng.choice((0.0, 0.05, 0.3)),
        dial_turns=_draw_dial_turns(rng, config, length_s),
        faults=_draw_faults(rng, config, length_s),
        collectors=collectors,
        moves=_draw_moves(rng, config, length_s),
    )
    schedule = _with_opening(schedule, Random(f"opening of {seed}"))
    schedule = _with_driver(schedule, Random(f"gates of {seed}"), length_s)
    evaluates = Random(f"first evaluation of {seed}").random() < 0.2
    schedule = replace(schedule, config=replace(schedule.config, eval_at_start=evaluates))
    rng = Random(f"preset of {seed}")
    has_preset = rng.random() < 0.1 and not schedule.config.stepwise and config.mode == "stream"
    return with_preset(schedule, rng.choice(PRESETS)) if has_preset else schedule


def with_preset(schedule: Schedule, name: str) -> Schedule:
    """Return a stream's schedule under the rule of a preset, with numbers drawn for it."""
    rng, config = Random(f"{name} of {schedule.seed}"), schedule.config
    preset, interval = _draw_preset(rng, name)
    degree = 1 if preset.in_step else math.ceil(preset.rounds_ahead) - 1
    most = config.max_outstanding
    config = replace(
        config,
        preset=preset,
        off_policy_degree=degree,
        open_rounds=0,
        mode="stream",
        replay_ratio=None,
        min_segments=0,
        warmup_s=0.0,
        straggler_policy="wait",
        publish_interval=interval,
        stepwise=False,
        max_outstanding=None if most is None else max(most, preset.batches * config.segments_per_round),
    )
    return replace(schedule, config=config, dial_turns=())


def _draw_preset(rng: Random, name: str) -> tuple[Preset, int]:
    """Draw the numbers of a preset: its rule, and rounds between two publications."""
    if name == "one_step_off":
        return Preset(name, 1.0, in_step=True), 1
    if name == "areal":
        return Preset(name, 1.0 + rng.choice((0, 1, 2, 4))), 1
    batches = rng.choice((1, 1, 2, 3))
    interval = batches * rng.choice((1, 2, 4))
    return Preset(name, interval * rng.choice((1.0, 1.1, 1.5, 2.0)), batches, by_arrival=True), interval


def _draw_collectors(rng: Random, config: PaceConfig) -> Collectors | None:
    if rng.random() < 0.4:
        return None
    most = rng.choice((1, 3, 8, 8, 600))
    capacities = [rng.randint(1, most) for _ in range(config.num_collectors)]
    one_by_one = rng.choice((0.0, 0.0, 0.5))
    return Collectors(
        tuple(0 if rng.random() < one_by_one else capacity for capacity in capacities),
        piece_s=rng.choice((0.2, 1.0, 5.0)),
        changes=rng.choice((0.0, 0.05, 0.3)),
        sleeps=rng.choice((0.0, 0.0, 0.0, 0.3)),
        drops=rng.choice((0.0, 0.0, 0.0, 0.1, 0.5, 0.99)),
        answer_s=rng.choice((0.0, 0.1, rng.uniform(0, 4.0))),
        saves=rng.random() < 0.8,
    )


def _enlarged(rng: Random, config: PaceConfig) -> tuple[PaceConfig, Collectors]:
    """Return a run of a few large rounds, on a few collectors of hundreds of tickets."""
    num_collectors = rng.randint(1, 3)
    config = replace(
        config,
        rounds=rng.randint(1, 3),
        segments_per_round=rng.randint(40, 120),
        num_collectors=num_collectors,
        min_segments=0,
        replay_ratio=None,
        max_outstanding=None,
        issue_interval_s=0.0,
    )
    capacities = tuple(rng.choice((64, 200, 600)) for _ in range(num_collectors))
    return config, Collectors(capacities, piece_s=0.3, changes=rng.choice((0.0, 0.1)))


def _with_opening(schedule: Schedule, rng: Random) -> Schedule:
    """Open the dial step by step in half of the runs."""
    open_rounds = rng.choice((0, 0, 0, 1, 2, 3))
    return replace(schedule, config=replace(schedule.config, open_rounds=open_rounds))


def _with_driver(schedule: Schedule, rng: Random, length_s: float) -> Schedule:
    """Close gates now and then, or go step by step where k is 0; keep the driver busy."""
    config = schedule.config
    if config.off_policy_degree == 0 and rng.random() < 0.4:
        config = replace(config, stepwise=True)
        schedule = replace(schedule, config=config, dial_turns=())
    if rng.random() < 0.4:
        closings = tuple(_draw_closing(rng, length_s) for _ in range(rng.randint(1, 5)))
        schedule = replace(schedule, closings=closings)
    schedule = replace(schedule, think_s=rng.choice((0.0, rng.uniform(0, 3.0))))
    busy_s = rng.choice((None, 0.0, rng.uniform(0, 0.3), rng.uniform(0, 3.0)))
    return replace(schedule, busy_s=busy_s)


def _draw_closing(rng: Random, length_s: float) -> Closing:
    rounds = rng.choice((None, 0, rng.randint(0, 3)))
    return Closing(rng.uniform(0, length_s), rng.uniform(0, 20.0), rng.random() < 0.4, rounds)


def _draw_config(rng: Random) -> PaceConfig:
    mode: Literal["stream", "replay"] = "replay" if rng.random() < 0.3 else "stream"
    degree, size = rng.choice(_DEGREES), rng.randint(1, 6)
    longest_interval = 4 if mode == "replay" else max(degree, 0) + 1
    ratio = rng.choice((None, 0.15, 0.3, 0.5, 1.0, 1.7, 3.0)) if mode == "replay" else None
    min_segments = _draw_min_segments(rng, mode, degree, size)
    needed = max(size, min_segments, math.ceil(1 / ratio) if ratio else 0)
    return PaceConfig(
        rounds=rng.choice((rng.randint(1, 4), rng.randint(3, 12), rng.randint(8, 40))),
        segments_per_round=size,
        num_collectors=rng.randint(1, 8),
        off_policy_degree=degree,
        auto_max=rng.randint(0, 8),
        mode=mode,
        replay_ratio=ratio,
        min_segments=min_segments,
        max_outstanding=rng.choice((None, None, needed, needed + rng.randint(0, 2 * size))),
        publish_interval=rng.choice((1, rng.randint(1, longest_interval))),
        eval_interval=rng.choice((None, 1, 2, 5)),
        eval_at_end=rng.random() < 0.3,
        async_eval=rng.random() < 0.5,
        checkpoint_interval=rng.choice((None, 1, 3)),
        checkpoint_interval_s=rng.choice((None, None, 5.0)),
        checkpoint_at_end=rng.random() < 0.5,
        issue_interval_s=rng.choice((0.0, 0.0, 0.0, rng.uniform(0, 0.5))),
        straggler_policy=rng.choice(("wait", "cut")),
        max_drops_per_round=rng.choice((None, None, 0, rng.randint(1, 4 * size))),
        max_publish_retries=rng.randint(0, 4),
        publish_retry_delay_s=rng.choice((0.0, 0.1, 1.0)),
        seed=rng.getrandbits(32),
        warmup_s=rng.choice((0.0, 0.0, 0.0, rng.uniform(0, 10.0))),
    )


def _draw_min_segments(rng: Random, mode: str, degree: int, size: int) -> int:
    most = 4 * size if mode == "replay" else (max(degree, 0) + 1) * size
    return rng.choice((0, 0, rng.randint(0, most)))


def _draw_collect_s(rng: Random, num_collectors: int) -> tuple[float, ...]:
    base = rng.uniform(0.1, 2.0)
    slowest = rng.choice((1.0, 1.0, 3.0, 10.0))
    return tuple(base * rng.choice((1.0, slowest)) for _ in range(num_collectors))


def _rough_length_s(config: PaceConfig, collect_s: tuple[float, ...], train_s: float) -> float:
    collect_round_s = config.segments_per_round / sum(1 / time for time in collect_s)
    return config.rounds * (collect_round_s + train_s + config.segments_per_round * config.issue_interval_s)


def _draw_dial_turns(rng: Random, config: PaceConfig, length_s: float) -> tuple[tuple[float, int], ...]:
    if rng.random() < 0.5:
        return ()
    degrees = (rng.randint(AUTO, 8) for _ in range(rng.randint(1, 6)))
    allowed = [degree for degree in degrees if _allowed(config, degree)]
    return tuple((rng.uniform(0, length_s), degree) for degree in allowed)


def _allowed(config: PaceConfig, degree: int) -> bool:
    try:
        config.check_degree(degree)
    except ConfigError:
        return False
    return True


def _draw_moves(rng: Random, config: PaceConfig, length_s: float) -> tuple[tuple[float, int | None], ...]:
    if rng.random() < 0.7:
        return ()
    numbers = range(config.num_collectors + 2)
    return tuple(
        (rng.uniform(0, length_s), rng.choice((None, rng.choice(numbers)))) for _ in range(rng.randint(1, 6))
    )


def _draw_faults(rng: Random, config: PaceConfig, length_s: float) -> Faults:
    if rng.random() < 0.2:
        return Faults()

    def times(most: int) -> list[float]:
        return [rng.uniform(0, 1.5 * length_s) for _ in range(rng.randint(0, most))]

    def seldom(most: int) -> int | None:
        return rng.randint(0, most) if rng.random() < 0.03 else None

    scale = min(1.0, 4.0 / config.segments_per_round)  # so that large rounds end, too
    return Faults(
        loss=scale * rng.choice((0.0, 0.05, rng.uniform(0, 0.5))),
        hang=scale * rng.choice((0.0, 0.0, rng.uniform(0, 0.1))),
        kills=tuple((time, rng.randrange(config.num_collectors)) for time in times(2)),
        poison=seldom(config.rounds * config.segments_per_round),
        start_death=rng.choice((0.0, 0.0, 0.2)),
        start_hang=rng.choice((0.0, 0.0, 0.1)),
        max_restarts=rng.choice((100_000,) * 9 + (rng.randint(0, 5),)),
        publish_failure=rng.choice((0.0, 0.1, 0.5)),
        publish_breaks_at=seldom(config.rounds + 1),
        publish_hang_at=seldom(config.rounds),
        train_hang_at=seldom(config.rounds),
        nan_at=rng.randint(0, config.rounds) if rng.random() < 0.1 else None,
        learner_crashes=tuple(times(2)) if rng.random() < 0.2 else (),
        eval_hang=rng.choice((0.0, 0.0, 0.2)),
        crashes=tuple(times(2)) if rng.random() < 0.3 else (),
        suspensions=tuple((at_s, rng.uniform(1.0, 600.0)) for at_s in times(1)) if rng.random() < 0.2 else (),
        stop_at_s=rng.uniform(0, length_s) if rng.random() < 0.15 else None,
        resume_after_stop=rng.random() < 0.5,
    )
