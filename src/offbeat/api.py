"""Functions for users: train, resume, evaluate, play, replay, digest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat import algorithms
from offbeat.algorithms.judging import MAX_EPISODE_STEPS
from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint
from offbeat.config.code import announced_imports
from offbeat.config.loader import ConfigSource
from offbeat.config.models import RuntimeKind
from offbeat.errors import ConfigError
from offbeat.observe.callbacks import Callback
from offbeat.pipeline import ReplayReport
from offbeat.roles import WorkerContext
from offbeat.run.adapters import as_evaluator
from offbeat.run.directory import (
    Overrides,
    copy_description,
    earlier_settings,
    existing,
    joined,
    removed_on_error,
    settings_of,
    until_version,
)
from offbeat.run.replay import last_version
from offbeat.run.saving import check_algorithm, fitting_weights, learner_digest
from offbeat.run.start import (
    FIX_OF_EVAL,
    Result,
    few_threads,
    load,
    load_for_resume,
    make_pipeline,
    make_roles,
    prepare_resume,
    prepare_run,
    remove_dir_if_refused,
    run_to_completion,
)
from offbeat.runtime.clock import SystemClock
from offbeat.seeding import derive_seed
from offbeat.types import Metrics

if TYPE_CHECKING:
    from offbeat.run.playing import PlayResult, Watch

__all__ = ["Result", "digest", "evaluate", "play", "replay_run", "resume", "train"]


def train(
    recipe: ConfigSource,
    *,
    off_policy_degree: int | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    overrides: Overrides | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train a recipe, a file, a mapping with its contents or a configuration, in a run directory of its own.

    Example: ``offbeat.train("cartpole-ppo", off_policy_degree=4).policy.act(obs)``.
    """
    named = {
        "async_training.off_policy_degree": off_policy_degree,
        "run.rounds": rounds,
        "run.seed": seed,
    }
    chosen, clock = joined(overrides, named), SystemClock()
    prepared = prepare_run(recipe, chosen, load(recipe, chosen), clock)
    with remove_dir_if_refused(prepared):
        return run_to_completion(prepared, callbacks, clock)


@announced_imports()
def resume(
    run_dir: str | Path,
    *,
    overrides: Overrides | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Continue a run from its newest good checkpoint, or from its start if it has none yet.

    Overrides stay with the run: later starts use them too, and so does its replay.
    """
    config = load_for_resume(run_dir, overrides or ())
    prepared = prepare_resume(run_dir, overrides or (), config)
    return run_to_completion(prepared, callbacks, SystemClock())


@announced_imports()
def evaluate(
    run_dir: str | Path,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    best: bool = False,
    overrides: Overrides | None = None,
) -> Metrics:
    """Evaluate a run's newest (or best) weights; returns metrics named ``eval/...``.

    ``overrides`` are settings that a resumed run may have too; they hold for this evaluation only.
    """
    directory = existing(run_dir)
    chosen = joined(overrides, {"eval.episodes": episodes})
    config = load_for_resume(directory, chosen, fix=FIX_OF_EVAL)
    manager = CheckpointManager(directory / "checkpoints")
    saved = _load(manager, manager.best() if best else None)
    check_algorithm(saved, config.algorithm.name)
    seed = derive_seed(config.run.seed, "evaluate", saved.version) if seed is None else seed
    context = WorkerContext(collector=0, num_collectors=1, seed=seed)
    evaluate = make_roles(config).evaluate
    if evaluate is None:
        raise ConfigError(
            f"the algorithm {config.algorithm.name!r} has no evaluator, so that its runs cannot be evaluated:"
            " give Roles(evaluate=PerWorker(...)) in its build"
        )
    evaluator = as_evaluator(evaluate.make(context))
    with fitting_weights(saved):
        return {"eval/version": float(saved.version), **evaluator.evaluate(saved.weights, seed)}


@announced_imports()
def play(
    run_dir: str | Path,
    *,
    episodes: int = 1,
    seed: int | None = None,
    best: bool = False,
    out: str | Path | None = None,
    video: bool = True,
    film: bool | None = None,
    fps: float | None = None,
    against: str | None = None,
    stochastic: bool = False,
    max_steps: int | None = None,
    watch: Watch | None = None,
) -> PlayResult:
    """Play a run's newest (or best) weights in the environment of its evaluation, and record a video.

    The video goes to ``out`` (a ``.gif`` or ``.mp4``), by default to ``play.gif`` in the run's directory;
    ``video=False`` makes none (``film`` is its older name). ``seed`` is that of the first episode, by default
    ``run.seed``; the next have the next ones. ``against`` names a baseline that plays the same seeds;
    ``watch`` is called at every step.

    Example: ``offbeat.play("runs/lines", out="lines.mp4", against="greedy").scores``.
    """
    from offbeat.run import playing

    records = video if film is None else film
    directory = existing(run_dir)
    config = load(settings_of(directory))
    if not config.algorithm.has_envs:
        raise ConfigError(
            f"{config.env.id} is a task of texts without episodes to watch: offbeat eval {run_dir} says how"
            " many problems are solved, and result.policy.answer(prompt) of offbeat.train answers one"
        )
    options = playing.PlayOptions(
        episodes=episodes,
        seed=config.run.seed if seed is None else seed,
        out=None if out is None else Path(out),
        default_out=directory / "play.gif" if records and out is None else None,
        fps=fps,
        against=against,
        deterministic=config.eval.deterministic and not stochastic,
        max_steps=MAX_EPISODE_STEPS if max_steps is None else max_steps,
        watch=watch,
    )
    manager = CheckpointManager(directory / "checkpoints")
    saved = _load(manager, manager.best() if best else None)
    check_algorithm(saved, config.algorithm.name)
    make_env = algorithms.find(config.algorithm.name).make_render_env
    with fitting_weights(saved):
        policy = make_roles(config).policy(saved.weights)
        return playing.play(config.eval_env, policy, saved.version, options, make_env)


@announced_imports()
def replay_run(
    run_dir: str | Path,
    on_round: Callable[[int, int], None] | None = None,
    *,
    runtime: RuntimeKind = "inline",
    until: int | None = None,
    out: str | Path | None = None,
    call: bool = False,
) -> ReplayReport:
    """Repeat a run from its schedule and compare its weights with the recorded ones.

    It ends at the first round whose published weights differ, which the report names. ``until`` stops at this
    version and leaves a run directory at ``out`` (by default beside the run) that can be resumed, evaluated
    and played. ``on_round(version, rounds)`` is called after each round. Tools and rewards are not called:
    their recorded answers are used. With ``call`` they are, and it ends at the first answer that is another
    one.
    """
    if out is not None and until is None:
        raise ConfigError("a replay leaves a run at --out (out) only with --to (until): name its version")
    directory = existing(run_dir)
    earlier = earlier_settings(directory)
    paths = [*earlier, settings_of(directory)]
    configs = [load(path) for path in paths]
    pipelines = [make_pipeline(config, directory, "", (), SystemClock()) for config in configs]
    changes = zip(earlier, pairwise(configs), pipelines[1:], strict=True)
    later = [
        (until_version(path), pipeline.spec())
        for path, (before, after), pipeline in changes
        if before.model_copy(update={"observe": after.observe}) != after  # what is shown changes no weights
    ]
    target = None
    if until is not None:
        target = Path(out) if out is not None else directory.with_name(f"{directory.name}-to-{until}")
        last_version(
            CheckpointManager(directory / "checkpoints").load(), until
        )  # refused before it is written
        copy_description(directory, target, until)
    with few_threads(configs[0]), removed_on_error(target):
        report = pipelines[0].replay(
            later, on_round, runtime=runtime, until=until, directory=target, call=call
        )
    for warning in report.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return report


def digest(run_dir: str | Path) -> str:
    """A sha256 over the learner of a run's newest good checkpoint: weights, optimizer, statistics."""
    return learner_digest(_load(CheckpointManager(existing(run_dir) / "checkpoints")).parts["learner"])


def _load(manager: CheckpointManager, version: int | None = None) -> LoadedCheckpoint:
    """Load a checkpoint and say which newer ones were passed over, and why."""
    saved = manager.load(version)
    for warning in saved.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return saved
