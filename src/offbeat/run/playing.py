"""Plays episodes in one environment; renders them, records a video and compares with a baseline."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np

from offbeat.algorithms.judging import MAX_EPISODE_STEPS
from offbeat.config.errors import did_you_mean
from offbeat.config.models import EnvConfig
from offbeat.envs.make import make_single
from offbeat.errors import ConfigError
from offbeat.observe.video import MAX_FPS, VideoWriter, check_place, missing_package
from offbeat.types import Array

if TYPE_CHECKING:
    from offbeat.algorithms.base import Policy

DEFAULT_FPS = 6.0
"""For environments that do not say how fast they want to be seen."""
_BASELINES = {
    "offbeat/ColorLines-v0": "offbeat.envs.colorlines.baselines:BASELINES",
    "offbeat/Connect4-v0": "offbeat.envs.connect4.baselines:BASELINES",
}
_RANDOM = "random"

Player = Callable[[Array], Any]
"""Chooses an action for one observation."""
Ending = Literal["terminated", "truncated", "cut", "interrupted"]
MakeShown = Callable[[EnvConfig, str | None], Any]
"""Makes one environment of a configuration, in one of its render modes."""


@dataclass(frozen=True, slots=True)
class StepView:
    """One step as ``watch`` gets it: at the start of an episode (``step`` 0) and after every step of it.

    ``score`` is the environment's own (``info["score"]``) where it has one, else the return so far; ``text``
    is the environment drawn in characters, None when it cannot be. ``fps`` is the speed to watch it at.
    """

    episode: int
    step: int
    score: float
    text: str | None
    fps: float


Moment = StepView
"""Older name of `StepView`."""
Watch = Callable[[StepView], None]


@dataclass(frozen=True, slots=True)
class Game:
    """One episode that was played."""

    seed: int
    total: float
    length: int
    score: float
    ending: Ending


@dataclass(frozen=True, slots=True)
class PlayResult:
    """Episodes that a run's weights played, one entry for each.

    ``scores`` are the environment's own (``info["score"]``) where it has some, else the returns. ``against``
    are those of the baseline on the same seeds. ``file`` is the video, None when there is none; ``notes`` say
    what did not go as asked. The last episode of an ``interrupted`` one is not whole.
    """

    version: int
    seeds: tuple[int, ...]
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    scores: tuple[float, ...]
    endings: tuple[Ending, ...]
    against: tuple[float, ...] | None = None
    file: Path | None = None
    num_frames: int = 0
    fps: float = DEFAULT_FPS
    notes: tuple[str, ...] = ()
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """Options of playing. ``out`` is a video that is required, ``default_out`` one to write if possible."""

    episodes: int = 1
    seed: int = 0
    out: Path | None = None
    default_out: Path | None = None
    fps: float | None = None
    against: str | None = None
    deterministic: bool = True
    max_steps: int = MAX_EPISODE_STEPS
    watch: Watch | None = None

    def __post_init__(self) -> None:
        for name in ("episodes", "max_steps", "fps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}, it has to be at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed is {self.seed}, it has to be 0 or more")
        if self.fps is not None and self.fps > MAX_FPS:
            raise ConfigError(f"fps is {self.fps:g}, at most {MAX_FPS} can be shown")
        if self.out is not None:
            check_place(self.out)
            if (reason := missing_package(self.out)) is not None:
                raise ConfigError(reason)


def play(
    env: EnvConfig, policy: Policy, version: int, options: PlayOptions, make: MakeShown = make_single
) -> PlayResult:
    """Play episodes with a policy; episode i is reset with ``seed + i``, and so is the baseline's."""
    _no_windows()
    notes: list[str] = []
    modes = _RenderModes(env, make)
    baseline = None
    if options.against is not None:
        baseline = _baseline(env, modes.action_space, options.against, options.seed)
    video = modes.video(options, notes)
    rendered = _RenderedEnv(env, modes.render_modes(video, options.watch), notes, make)
    sink = _FrameSink(video, options.watch, options.fps or modes.fps)

    def act(obs: Array) -> Any:
        return policy.act(obs, deterministic=options.deterministic)

    try:
        games = _play_all(rendered, act, policy.reset, options, sink)
        file = None if video is None else video.close()
    finally:
        rendered.close()
        if video is not None:
            video.discard()
    if video is not None and video.is_cut:
        notes.append(f"the video was cut after {video.num_frames} frames; a .mp4 can be longer")
    result = _result(version, games, notes)
    if video is not None:
        result = replace(result, file=file, num_frames=video.num_frames)
    if baseline is not None and not result.interrupted:
        against = _play_baseline(env, baseline, options, make)
        result = replace(result, against=against, interrupted=against is None)
        if against is None:
            notes.append(f"interrupted while {options.against} played")
    return replace(result, fps=sink.fps, notes=tuple(notes))


def _result(version: int, games: Sequence[Game], notes: list[str]) -> PlayResult:
    cut = [str(number) for number, game in enumerate(games, 1) if game.ending == "cut"]
    if cut:
        notes.append(f"episode {', '.join(cut)} was ended after {games[int(cut[0]) - 1].length:,} steps")
    interrupted = bool(games) and games[-1].ending == "interrupted"
    if interrupted:
        notes.append(f"interrupted in episode {len(games)}, after {games[-1].length:,} steps")
    return PlayResult(
        version=version,
        seeds=tuple(game.seed for game in games),
        returns=tuple(game.total for game in games),
        lengths=tuple(game.length for game in games),
        scores=tuple(game.score for game in games),
        endings=tuple(game.ending for game in games),
        interrupted=interrupted,
    )


# ---------------------------------------------------------------- playing


def _play_all(
    env: _RenderedEnv, act: Player, forget: Callable[[], None], options: PlayOptions, sink: _FrameSink
) -> list[Game]:
    games: list[Game] = []
    for number in range(options.episodes):
        forget()
        games.append(_play_one(env, act, number, options, sink))
        if games[-1].ending == "interrupted":
            break
    return games


def _play_one(env: _RenderedEnv, act: Player, number: int, options: PlayOptions, sink: _FrameSink) -> Game:
    seed = options.seed + number
    total, length, score = 0.0, 0, 0.0
    ending: Ending = "cut"
    try:
        obs, info = env.reset(seed)
        score = _score(info, total)
        sink(env, number + 1, length, score)
        while length < options.max_steps:
            obs, reward, is_terminated, is_truncated, info = env.step(act(obs))
            total, length = total + reward, length + 1
            score = _score(info, total)
            sink(env, number + 1, length, score)
            if is_terminated or is_truncated:
                ending = "terminated" if is_terminated else "truncated"
                break
    except KeyboardInterrupt:
        ending = "interrupted"
    sink.end()
    return Game(seed, total, length, score, ending)


def _score(info: Mapping[str, Any], total: float) -> float:
    score = info.get("score")
    return float(score) if isinstance(score, int | float | np.number) else total


def _play_baseline(
    config: EnvConfig, baseline: Player, options: PlayOptions, make: MakeShown
) -> tuple[float, ...] | None:
    """Return the scores of a baseline, which is not rendered; None when it was interrupted."""
    env = _RenderedEnv(config, [None], [], make)
    try:
        games = _play_all(env, baseline, lambda: None, options, _FrameSink(None, None, DEFAULT_FPS))
    finally:
        env.close()
    is_whole = games[-1].ending != "interrupted"
    return tuple(game.score for game in games) if is_whole else None


class _FrameSink:
    """A sink of rendered steps: the video and the callback ``watch``."""

    def __init__(self, video: VideoWriter | None, watch: Watch | None, fps: float) -> None:
        self.fps = fps
        self._video = video
        self._watch = watch

    def __call__(self, env: _RenderedEnv, episode: int, step: int, score: float) -> None:
        if self._video is not None:
            self._video.add(lambda: env.render("rgb_array"))
        if self._watch is not None:
            text = env.render("ansi")
            self._watch(StepView(episode, step, score, text if isinstance(text, str) else None, self.fps))

    def end(self) -> None:
        """Note the end of an episode."""
        if self._video is not None:
            self._video.hold()


# ---------------------------------------------------------------- the environment


class _RenderedEnv:
    """An environment in lockstep copies, one per render mode: Gymnasium makes each for one mode only.

    All are played alike from the same seeds. Observations come from the first; another that differs from it
    draws from elsewhere than its seed, and is no longer rendered.
    """

    def __init__(
        self, env: EnvConfig, render_modes: Sequence[str | None], notes: list[str], make: MakeShown
    ) -> None:
        self._name = env.id
        self._first = render_modes[0]
        self._envs = {mode: make(env, mode) for mode in render_modes}
        self._notes = notes
        space = self._envs[self._first].action_space
        self._is_scalar = isinstance(space, gymnasium.spaces.Discrete)
        self._dtype = space.dtype

    def reset(self, seed: int) -> tuple[Array, Mapping[str, Any]]:
        """Start an episode; returns observation and info."""
        results = {mode: env.reset(seed=seed) for mode, env in self._envs.items()}
        self._compare({mode: result[0] for mode, result in results.items()})
        obs, info = results[self._first]
        return obs, info

    def step(self, action: Any) -> tuple[Array, float, bool, bool, Mapping[str, Any]]:
        """Take one action; returns what Gymnasium's step does."""
        plain = int(action) if self._is_scalar else np.array(action, self._dtype)
        results = {mode: env.step(plain) for mode, env in self._envs.items()}
        self._compare({mode: result[0] for mode, result in results.items()})
        obs, reward, is_terminated, is_truncated, info = results[self._first]
        return obs, float(reward), bool(is_terminated), bool(is_truncated), info

    def render(self, mode: str) -> object:
        """Return a picture of the environment; None when it has no copy with this render mode."""
        return self._envs[mode].render() if mode in self._envs else None

    def close(self) -> None:
        """Free what the environments hold."""
        for env in self._envs.values():
            env.close()

    def _compare(self, seen: Mapping[str | None, Array]) -> None:
        for mode, obs in seen.items():
            if mode != self._first and not _are_equal(obs, seen[self._first]):
                self._envs.pop(mode).close()
                self._notes.append(
                    f"{self._name} plays differently from equal seeds: {mode} is not rendered any more"
                )


def _are_equal(one: Array, other: Array) -> bool:
    """Compare two observations, NaN included; of a team's views, what agents see."""
    one, other = (getattr(seen, "obs", seen) for seen in (one, other))
    is_float = np.issubdtype(np.asarray(one).dtype, np.inexact)
    return np.array_equal(one, other, equal_nan=is_float)


class _RenderModes:
    """Render modes that an environment has, and those to make it with."""

    def __init__(self, env: EnvConfig, make: MakeShown) -> None:
        self._env = env
        self._make = make
        probe = make(env, None)
        modes, fps = probe.metadata.get("render_modes") or (), probe.metadata.get("render_fps")
        self.action_space = probe.action_space
        self.fps = float(min(fps, MAX_FPS)) if fps else DEFAULT_FPS
        self._modes = tuple(modes)
        probe.close()

    def video(self, options: PlayOptions, notes: list[str]) -> VideoWriter | None:
        """Return the writer of the video, None without one; ConfigError when ``out`` cannot be written."""
        path = options.out or options.default_out
        if path is None:
            return None
        reason = self._no_pictures() or missing_package(path) or self._render_error()
        if reason is None:
            return VideoWriter(path, options.fps or self.fps)
        if options.out is not None:
            raise ConfigError(reason)
        notes.append(f"no video: {reason}")
        return None

    def render_modes(self, video: VideoWriter | None, watch: Watch | None) -> list[str | None]:
        """Return the render modes to make the environment with."""
        wanted: list[str | None] = ["rgb_array"] if video is not None else []
        if watch is not None and "ansi" in self._modes:
            wanted.append("ansi")
        return wanted or [None]

    def _no_pictures(self) -> str | None:
        if "rgb_array" in self._modes:
            return None
        return f"{self._env.id} has no render mode rgb_array: play it without a video"

    def _render_error(self) -> str | None:
        """Try to render a frame; return why that fails, None when it does not."""
        env = self._make(self._env, "rgb_array")
        try:
            env.reset(seed=0)
            env.render()
        except Exception as error:  # an environment is somebody else's code
            return f"{self._env.id} cannot be drawn: {type(error).__name__}: {error}"
        finally:
            env.close()
        return None


def _no_windows() -> None:
    """Environments that draw with pygame do so in memory, and it need not introduce itself."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if sys.platform == "linux" and not {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


# ---------------------------------------------------------------- baselines


def _baseline(env: EnvConfig, space: gymnasium.Space[Any], name: str, seed: int) -> Player:
    """The baseline of this name for this environment."""
    place = _BASELINES.get(env.id)
    known: Mapping[str, Any] = {} if place is None else pkgutil.resolve_name(place)
    if name in known:
        act: Player = known[name](seed).act
        return act
    if name == _RANDOM:
        return _random_player(space, seed)
    hint = did_you_mean(name, {*known, _RANDOM})
    raise ConfigError(f"there is no baseline {name!r} for {env.id}; {hint}")


def _random_player(space: gymnasium.Space[Any], seed: int) -> Player:
    """Any action with equal probability, of the legal ones where the space knows them."""
    space.seed(seed)
    rng = np.random.default_rng(seed)
    legal: Callable[[Array], Array] | None = getattr(space, "legal", None)
    if legal is None:
        return lambda obs: space.sample()
    return lambda obs: rng.choice(np.flatnonzero(legal(obs[None])[0]))
