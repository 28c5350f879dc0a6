"""What users call: train, resume, evaluate, play, replay, digest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat import algorithms, launch
from offbeat.algorithms.judging import MAX_EPISODE_STEPS
from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint
from offbeat.config.models import RunConfig
from offbeat.launch import Overrides, Result
from offbeat.observe.callbacks import Callback
from offbeat.recording import learner_digest
from offbeat.replaying import ReplayReport
from offbeat.roles import WorkerContext
from offbeat.seeding import derive_seed
from offbeat.types import Metrics

if TYPE_CHECKING:
    from offbeat.playing import PlayResult, Watch

__all__ = ["Result", "digest", "evaluate", "play", "replay_run", "resume", "train"]


def train(
    recipe: str | Path | RunConfig,
    *,
    off_policy_degree: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    overrides: Overrides | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train a recipe, a file or a configuration, in a run directory of its own.

    Example: ``offbeat.train("cartpole-ppo", off_policy_degree=4).policy.act(obs)``.
    """
    named = {
        "async_training.off_policy_degree": off_policy_degree,
        "run.rounds": rounds,
        "run.seed": seed,
    }
    chosen = launch.joined(overrides, named)
    start = launch.start_anew(recipe, chosen, launch.load(recipe, chosen))
    with launch.without_trace(start):
        return _to_the_end(start, callbacks)


def resume(
    run_dir: str | Path,
    *,
    overrides: Overrides | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Go on with a run from its newest good checkpoint, or from its beginning if it has none yet.

    Overrides stay with the run: what comes after them goes on with them, also in its replay.
    """
    config = launch.load_again(run_dir, overrides or ())
    return _to_the_end(launch.start_again(run_dir, overrides or (), config), callbacks)


def _to_the_end(start: launch.Start, callbacks: Sequence[Callback]) -> Result:
    with launch.opened(start, callbacks) as opened:
        while not opened.run.finished:
            opened.run.step()
        report = opened.run.report()
    return opened.result(report)


def evaluate(
    run_dir: str | Path,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    best: bool = False,
    overrides: Overrides | None = None,
) -> Metrics:
    """Judge a run's newest (or best) weights; returns metrics named ``eval/...``.

    ``overrides`` are settings that a resumed run may have too; they hold for this judgement only.
    """
    directory = launch.existing(run_dir)
    chosen = launch.joined(overrides, {"eval.episodes": episodes})
    config = launch.load_again(directory, chosen)
    manager = CheckpointManager(directory / "checkpoints")
    saved = _load(manager, manager.best() if best else None)
    seed = derive_seed(config.run.seed, "evaluate", saved.version) if seed is None else seed
    context = WorkerContext(collector=0, num_collectors=1, seed=seed)
    evaluator = launch.make_roles(config).evaluate.make(context)
    return {"eval/version": float(saved.version), **evaluator.evaluate(saved.weights, seed)}


def play(
    run_dir: str | Path,
    *,
    episodes: int = 1,
    seed: int | None = None,
    best: bool = False,
    out: str | Path | None = None,
    film: bool = True,
    fps: float | None = None,
    against: str | None = None,
    stochastic: bool = False,
    max_steps: int | None = None,
    watch: Watch | None = None,
) -> PlayResult:
    """Play a run's newest (or best) weights in the environment of its evaluation, and film it.

    The film goes to ``out`` (a ``.gif`` or ``.mp4``), by default to ``play.gif`` in the run's directory;
    ``film=False`` makes none. ``seed`` is that of the first episode, by default ``run.seed``; the next have
    the next ones. ``against`` names a baseline that plays the same seeds; ``watch`` is called at every step.

    Example: ``offbeat.play("runs/lines", out="lines.mp4", against="greedy").scores``.
    """
    from offbeat import playing

    directory = launch.existing(run_dir)
    config = launch.load(directory / "config.yaml")
    wishes = playing.Wishes(
        episodes=episodes,
        seed=config.run.seed if seed is None else seed,
        out=None if out is None else Path(out),
        film=directory / "play.gif" if film and out is None else None,
        fps=fps,
        against=against,
        deterministic=config.eval.deterministic and not stochastic,
        max_steps=MAX_EPISODE_STEPS if max_steps is None else max_steps,
        watch=watch,
    )
    manager = CheckpointManager(directory / "checkpoints")
    saved = _load(manager, manager.best() if best else None)
    policy = launch.make_roles(config).policy(saved.weights)
    show = algorithms.find(config.algorithm.name).show
    return playing.play(config.eval_env, policy, saved.version, wishes, show)


def replay_run(run_dir: str | Path, tell: Callable[[int, int], None] | None = None) -> ReplayReport:
    """Repeat a run serially from its schedule and compare the weights with its newest checkpoint's.

    ``tell(version, rounds)`` is called after each of the rounds.
    """
    directory = launch.existing(run_dir)
    earlier = sorted(directory.glob(launch.UNTIL.format("*")))
    configs = [launch.load(path) for path in (*earlier, directory / "config.yaml")]
    pipelines = [launch.make_pipeline(config, directory, "", ()) for config in configs]
    changes = [launch.until_version(path) for path in earlier]
    later = [(version, pipeline.plan()) for version, pipeline in zip(changes, pipelines[1:], strict=True)]
    with launch.few_threads(configs[0]):
        report = pipelines[0].replay(later, tell)
    for warning in report.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return report


def digest(run_dir: str | Path) -> str:
    """A sha256 over the learner of a run's newest good checkpoint: weights, optimizer, statistics."""
    return learner_digest(_load(CheckpointManager(launch.existing(run_dir) / "checkpoints")).parts["learner"])


def _load(manager: CheckpointManager, version: int | None = None) -> LoadedCheckpoint:
    """Load a checkpoint and say which newer ones were passed over, and why."""
    saved = manager.load(version)
    for warning in saved.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return saved
