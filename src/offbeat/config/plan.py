"""Description of a run by its configuration, in words: for ``offbeat check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from offbeat.config.checks import crowding
from offbeat.config.errors import shown
from offbeat.config.layers import Path, parse_yaml
from offbeat.config.loader import dump_yaml
from offbeat.config.models import AUTO, PresetConfig, RunConfig, Section


def describe(
    config: RunConfig,
    step_bytes: int | None = None,
    facts: Mapping[str, str] | None = None,
    notes: Sequence[str] | None = None,
) -> str:
    """The plan of the run, and below it the resolved configuration, in which changes are marked.

    ``step_bytes`` is the size of one environment step in a segment, for the memory guess; None: not known.
    ``facts`` are what the algorithm adds to the plan; ``notes`` come below it, by default `remarks`.
    """
    rows = plan(config, step_bytes) | dict(facts or {})
    width = max(map(len, rows))
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items()]
    below = [f"  note: {text}" for text in (remarks(config) if notes is None else notes)]
    return "\n".join(["plan:", *lines, *below, "", "configuration:", *_marked(config)])


def _marked(config: RunConfig) -> list[str]:
    """The lines of the resolved configuration, those that differ from a default with that default."""
    text = dump_yaml(config.resolved())
    layer, _ = parse_yaml(text, "configuration")
    assert layer is not None, "a configuration that was written can be read"
    lines = text.splitlines()
    for path, default in _changed(config, None, ()):
        line = layer.place(path).line
        if path in layer.places and line is not None:
            lines[line - 1] += (
                f"  # default: {shown(list(default) if isinstance(default, tuple) else default)}"
            )
    return lines


def _changed(section: Section, default: object, path: Path) -> Iterator[tuple[Path, object]]:
    """Values that differ from the default: that of ``default``, a section of the same kind, or their own."""
    for name, field in type(section).model_fields.items():
        value, own = getattr(section, name), field.get_default(call_default_factory=True)
        known = getattr(default, name) if type(default) is type(section) else own
        if isinstance(value, Section):
            yield from _changed(value, known, (*path, name))
        elif not field.is_required() and value != known:
            yield (*path, name), known


def plan(config: RunConfig, step_bytes: int | None = None) -> dict[str, str]:
    """The plan of the run by topic: who works where, how much a round is, how old samples may get."""
    return {
        "collectors": _collectors(config),
        "learner": _learner(config),
        "evaluation": _evaluation(config),
        "round": _round(config),
        **({} if (update := config.resolved().algorithm.update(config)) is None else {"update": update}),
        "run": _run(config),
        "staleness": staleness_bound(config),
        "memory": _memory(config, step_bytes),
        "checkpoints": _checkpoints(config),
    }


def staleness_bound(config: RunConfig) -> str:
    """The promise of the dial in a sentence."""
    dial = config.async_training
    if dial.preset is not None:
        return _preset(dial.preset, config.segments_per_round)
    if config.algorithm.mode == "replay":
        return f"{_distance(config)}; {_ages(config)}"
    if dial.off_policy_degree == AUTO:
        return (
            f"tuned while running: at most {_count(dial.auto_max, 'version')}, and as few as keep learner and"
            " collectors busy"
        )
    if dial.off_policy_degree == 0:
        return "none: strictly on-policy, every sample is trained by the very weights that collected it"
    versions, rounds = (_count(dial.off_policy_degree, noun) for noun in ("version", "round"))
    opening = f", one more every {_count(dial.open_rounds, 'round')} at the start" if dial.open_rounds else ""
    return f"at most {versions}: collectors run up to {rounds} ahead of the learner{opening}"


def _preset(preset: PresetConfig, segments_per_round: int) -> str:
    """Return what the rule of another project bounds."""
    if preset.name == "one_step_off":
        return "at most 1 version, by the rule one_step_off: a round is collected whole by the version before"
    most = _count(int(preset.rounds_ahead * segments_per_round + 1e-9), "segment")
    if preset.is_bounded:
        oldest = _count(preset.implied["off_policy_degree"], "version")
        return f"at most {oldest}: the rule {preset.name} leaves nothing over when weights are published"
    return (
        f"no age is bounded by the rule {preset.name}: at most {most} are outstanding when weights are"
        " published, whatever their versions; pace/max_sample_age reports the oldest"
    )


def _distance(config: RunConfig) -> str:
    """Return how far collecting and training run apart in a replay run."""
    dial = config.async_training
    if dial.off_policy_degree == AUTO:
        return (
            f"collectors run ahead of the learner by at most {_count(dial.auto_max, 'round')}, tuned while"
            " running"
        )
    if dial.off_policy_degree == 0:
        return "collectors and learner take turns"
    return f"collectors run up to {_count(dial.off_policy_degree, 'round')} ahead of the learner"


def _ages(config: RunConfig) -> str:
    """Return how old samples drawn from a replay may be."""
    oldest = getattr(config.algorithm, "max_age", None)
    if oldest is not None:
        return f"what is drawn from the replay is at most {_count(oldest, 'version')} old (algorithm.max_age)"
    bound = ", algorithm.max_age bounds it" if hasattr(config.algorithm, "max_age") else ""
    return f"what is drawn from the replay may be of any age: pace/max_replayed_age reports it{bound}"


def remarks(config: RunConfig) -> list[str]:
    """Settings that work and probably do not do what was meant."""
    dial, evaluation = config.async_training, config.eval
    never_evaluated = evaluation.interval_rounds is None and not evaluation.at_end
    found = size_remarks(config)
    by_setting = {
        "enable_async_eval has nothing to do until eval.interval_rounds is set": (
            dial.enable_async_eval and evaluation.interval_rounds is None
        ),
        "nothing is ever evaluated, so no checkpoint is known to be the best": (
            never_evaluated and config.checkpoint.enabled and config.checkpoint.keep_best
        ),
        "runtime.kind inline takes turns in one thread, so off_policy_degree above 0 saves no time": (
            config.runtime.kind == "inline" and dial.largest_degree > 0
        ),
        "the run would end (batch_timeout) before a hung collector is replaced (generation_timeout)": (
            dial.generation_timeout >= dial.batch_timeout
        ),
        "checkpoints are off: the run cannot be resumed": not config.checkpoint.enabled,
    }
    return found + [text for text, applies in by_setting.items() if applies]


def size_remarks(config: RunConfig) -> list[str]:
    """Numbers that work and are probably far from what was meant; a run's start says so, too."""
    degree, crowd = config.async_training.off_policy_degree, crowding(config)
    found = [] if crowd is None else [crowd]
    if degree > config.run.rounds:
        found.append(
            f"off_policy_degree {degree:,} is above run.rounds {config.run.rounds:,}: it bounds nothing"
        )
    return found


def _collectors(config: RunConfig) -> str:
    workers, envs = config.runtime.num_workers, config.envs_per_worker
    where = {
        "inline": "taking turns in this process",
        "threads": "in threads of this process",
        "processes": "in processes of their own",
        "ray": "in Ray actors",
    }[config.runtime.kind]
    threads = _count(config.runtime.worker_torch_threads, "torch thread")
    work = f"{_count(envs, 'environment')} of " if config.algorithm.has_envs else ""
    return f"{workers} {where}, each with {work}{config.env.id} and {threads}"


def _learner(config: RunConfig) -> str:
    is_ray, ranks = config.runtime.kind == "ray", config.learner.num_ranks
    where = "in a Ray actor" if is_ray else "in this process"
    if ranks > 1:
        where = f"{ranks} ranks " + ("in Ray actors" if is_ray else "in this process and others")
    return f"{where}, {_count(config.runtime.torch_threads, 'torch thread')}{' each' if ranks > 1 else ''}"


def _evaluation(config: RunConfig) -> str:
    evaluation = config.eval
    interval = evaluation.interval_rounds
    if interval is None and not (evaluation.at_start or evaluation.at_end):
        return "never"
    how = "beside training" if config.async_training.enable_async_eval else "training pauses for it"
    early = ["at the start"] if evaluation.at_start else []
    early += [f"every {_count(interval, 'round')}"] if interval else []
    times = [f"{', '.join(early)} ({how})"] if early else []
    times += ["at the end"] if evaluation.at_end else []
    if not config.algorithm.has_envs:
        return f"{' and '.join(times)}: {_count(evaluation.episodes, 'held-out problem')}"
    envs = min(evaluation.num_envs, evaluation.episodes)
    return f"{' and '.join(times)}: {_count(evaluation.episodes, 'episode')} in {_count(envs, 'environment')}"


def _round(config: RunConfig) -> str:
    segments = _count(config.segments_per_round, "segment")
    samples = config.algorithm.samples_per_segment(config)
    total = config.algorithm.samples_per_round(config)
    if samples is None or total is None:
        return segments
    new = " new" if total < config.segments_per_round * samples else ""
    return f"{segments} of {samples:,} samples = {total:,}{new} samples"


def _run(config: RunConfig) -> str:
    rounds = _count(config.run.rounds, "round")
    samples, asked = config.steps_of(config.run.rounds), config.run.total_timesteps
    total = "" if samples is None else f" = {samples:,} samples"
    total += "" if asked is None else f" (total_timesteps {asked:,})"
    stop = config.run.stop_return
    early = "" if stop is None else f", ending early at a mean return of {stop:g}"
    if config.run.stop_eval_return is not None:
        early += f", ending early at an evaluation of {config.run.stop_eval_return:g}"
    return f"{rounds}{total}{early}, seed {config.run.seed}, in {config.run.dir or _default_dir(config)}"


def _default_dir(config: RunConfig) -> str:
    return f"runs/{config.run.name or config.algorithm.name}-<date>-<time>"


def _memory(config: RunConfig, step_bytes: int | None) -> str:
    is_stream = config.algorithm.mode == "stream"
    bound, whole = ("at most", "the learner") if is_stream else ("about", "the learner with its replay")
    most = f"{bound} {_count(config.max_outstanding_segments, 'segment')} collected or collecting at once"
    copy = f"; a copy of {whole} is kept for checkpoints" if config.checkpoint.enabled else ""
    samples = config.algorithm.samples_per_segment(config)
    if samples is None or step_bytes is None:
        return most + copy
    each = samples * step_bytes
    return f"{most}, about {_size(each)} each: {_size(each * config.max_outstanding_segments)}{copy}"


def _checkpoints(config: RunConfig) -> str:
    saving = config.checkpoint
    if not saving.enabled:
        return "none"
    times = [f"every {_count(saving.interval_rounds, 'round')}"] if saving.interval_rounds else []
    times += [f"every {saving.interval_s:g} s"] if saving.interval_s else []
    best = " and the best" if saving.keep_best else ""
    return f"{' or '.join([*times, 'at the end'])}; the newest {saving.keep}{best} are kept"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _size(num_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
