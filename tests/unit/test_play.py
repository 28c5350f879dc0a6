"""Agents at play: what is rendered, recorded and compared."""

from __future__ import annotations

import io
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import offbeat
from offbeat.algorithms.ppo import ALGORITHM, PPOConfig
from offbeat.cli import play as cli_play
from offbeat.cli.main import main
from offbeat.config.models import EnvConfig, EvalConfig, RunConfig
from offbeat.envs.judged import check_eval_env, probe_env
from offbeat.errors import CheckpointError, ConfigError, EnvError
from offbeat.observe import video as video_module
from offbeat.observe.video import VideoWriter
from offbeat.roles import SingleRank, WorkerContext
from offbeat.run import playing
from offbeat.run.playing import PlayOptions, PlayResult, StepView

HERE = __name__


class Shown(gymnasium.Env):
    """Counts to ``length``; each reward is ``worth``, the score counts steps. Frames get brighter."""

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, length=4, worth=2.0, size=4, render_mode=None):
        self.observation_space = Box(-1e6, 1e6, (size,), np.float32)
        self.action_space = Discrete(3)
        self.render_mode = render_mode
        self.length, self.worth, self.size = length, worth, size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def step(self, action):
        assert type(action) is int
        self.steps += 1
        is_over = self.steps >= self.length
        return self.look(), self.worth, is_over, False, {"score": self.steps}

    def look(self):
        return self.np_random.normal(size=self.size).astype(np.float32)

    def render(self):
        if self.render_mode == "ansi":
            return f"\x1b[91mcount {self.steps}\x1b[0m\n"
        return np.full((31, 40, 3), 20 * self.steps, np.uint8)


class Scoreless(Shown):
    metadata = {"render_modes": []}  # noqa: RUF012

    def step(self, action):
        return *super().step(action)[:4], {}


class Undrawable(Shown):
    def render(self):
        if self.render_mode == "rgb_array":
            raise gymnasium.error.DependencyNotInstalled("no pencils: pip install pencils")
        return super().render()


class Unseeded(Shown):
    def look(self):
        return np.array([random.random() for _ in range(self.size)], np.float32)


class Holey(Shown):
    def look(self):
        return np.array([np.nan, *super().look()[1:]], np.float32)


class Masked(Discrete):
    def legal(self, obs):
        return np.tile(np.array([False, True, False]), (len(obs), 1))


class Picky(Scoreless):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.action_space = Masked(3)

    def step(self, action):
        assert action == 1
        return super().step(action)


class Agent:
    """Takes action 0, and remembers how it was called."""

    def __init__(self) -> None:
        self.resets = 0
        self.modes: list[bool] = []

    def act(self, obs, *, deterministic=True):
        self.modes.append(deterministic)
        return np.int64(0)

    def reset(self) -> None:
        self.resets += 1


def env(kind: type = Shown, **kwargs: Any) -> EnvConfig:
    return EnvConfig(id=f"{HERE}:{kind.__name__}", kwargs=kwargs)


def play(config: EnvConfig | None = None, **options: Any) -> PlayResult:
    return playing.play(config or env(), Agent(), 7, PlayOptions(**options))


# ---------------------------------------------------------------- the result


def test_one_entry_for_each_episode() -> None:
    agent = Agent()
    result = playing.play(env(), agent, 7, PlayOptions(episodes=3, seed=5, deterministic=False))
    assert (result.version, result.seeds) == (7, (5, 6, 7))
    assert (result.returns, result.lengths, result.scores) == ((8.0,) * 3, (4,) * 3, (4.0,) * 3)
    assert result.endings == ("terminated",) * 3
    assert (result.file, result.notes, result.interrupted) == (None, (), False)
    assert agent.resets == 3
    assert agent.modes == [False] * 12


def test_without_a_score_of_its_own_the_return_counts() -> None:
    assert play(env(Scoreless)).scores == (8.0,)


def test_the_same_seed_is_the_same_game() -> None:
    seen: list[list[float]] = []

    class Watcher(Agent):
        def act(self, obs, *, deterministic=True):
            seen[-1].append(float(obs[0]))
            return 0

    for seed in (1, 1, 2):
        seen.append([])
        playing.play(env(), Watcher(), 0, PlayOptions(seed=seed))
    assert seen[0] == seen[1] != seen[2]


def test_long_episodes_are_ended() -> None:
    result = play(env(length=100), episodes=2, max_steps=9)
    assert (result.lengths, result.endings) == ((9, 9), ("cut", "cut"))
    assert result.notes == ("episode 1, 2 was ended after 9 steps",)


def test_limits_of_the_environment_count() -> None:
    config = EnvConfig(id=f"{HERE}:Shown", kwargs={"length": 100}, max_episode_steps=6)
    assert (play(config).lengths, play(config).endings) == ((6,), ("truncated",))


@pytest.mark.parametrize(
    "options", [{"episodes": 0}, {"max_steps": 0}, {"fps": 0}, {"fps": 51}, {"seed": -1}]
)
def test_wishes_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        PlayOptions(**options)


# ---------------------------------------------------------------- watching


def test_a_spectator_sees_every_step() -> None:
    views: list[StepView] = []
    play(episodes=2, watch=views.append)
    assert [(one.episode, one.step) for one in views] == [(e, s) for e in (1, 2) for s in range(5)]
    assert [one.score for one in views[:5]] == [0, 1, 2, 3, 4]
    assert views[3].text == "\x1b[91mcount 3\x1b[0m\n"
    assert views[0].fps == 10


def test_text_and_pictures_show_the_same_game(tmp_path: Path) -> None:
    views: list[StepView] = []
    result = play(out=tmp_path / "a.gif", watch=views.append, fps=5)
    assert [one.text for one in views] == [f"\x1b[91mcount {step}\x1b[0m\n" for step in range(5)]
    assert (result.num_frames, views[0].fps) == (5, 5)


def test_an_environment_without_text_is_watched_by_numbers() -> None:
    views: list[StepView] = []
    play(env(Scoreless), watch=views.append)
    assert [one.text for one in views] == [None] * 5
    assert views[-1].score == 8.0


def test_two_different_games_are_not_shown_as_one(tmp_path: Path) -> None:
    views: list[StepView] = []
    result = play(env(Unseeded), out=tmp_path / "a.gif", watch=views.append)
    assert {one.text for one in views} == {None}
    assert result.num_frames == 5
    (note,) = result.notes
    assert "plays differently from equal seeds" in note


def test_an_observation_with_nan_equals_itself(tmp_path: Path) -> None:
    views: list[StepView] = []
    result = play(env(Holey), out=tmp_path / "a.gif", watch=views.append)
    assert (result.lengths, result.num_frames, result.notes) == ((4,), 5, ())
    assert [one.text for one in views] == [f"\x1b[91mcount {step}\x1b[0m\n" for step in range(5)]


# ---------------------------------------------------------------- videos


def frames_of(path: Path) -> tuple[list[int], list[int]]:
    """Brightness and duration (ms) of each frame of a GIF."""
    from PIL import Image

    with Image.open(path) as image:
        values, times = [], []
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            values.append(image.convert("RGB").getpixel((3, 3))[0])
            times.append(image.info["duration"])
        assert image.size == (40, 31)
        assert image.info["loop"] == 0
    return values, times


def test_a_gif_has_every_frame_and_rests_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    result = play(out=path, episodes=2)
    assert (result.file, result.num_frames, result.fps) == (path, 10, 10)
    values, times = frames_of(path)
    assert values == [0, 20, 40, 60, 80] * 2
    assert times == [100, 100, 100, 100, 1500] * 2
    assert os.listdir(tmp_path) == ["a.gif"]


def test_an_mp4_has_every_frame(tmp_path: Path) -> None:
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "a.mp4"
    result = play(out=path, fps=4)
    num_frames, seconds = imageio_ffmpeg.count_frames_and_secs(str(path))
    assert (result.num_frames, num_frames) == (5, 5 + 6)
    assert seconds == pytest.approx(11 / 4, abs=0.3)
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_long_videos_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(video_module.MAX_FRAMES, ".gif", 3)
    result = play(out=tmp_path / "a.gif")
    assert (result.num_frames, result.lengths) == (3, (4,))
    assert result.notes == ("the video was cut after 3 frames; a .mp4 can be longer",)
    assert frames_of(tmp_path / "a.gif")[0] == [0, 20, 40]


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_an_interrupted_game_keeps_its_video(tmp_path: Path, suffix: str) -> None:
    def watch(view: StepView) -> None:
        if view.episode == 2 and view.step == 2:
            raise KeyboardInterrupt

    path = tmp_path / f"a.{suffix}"
    result = play(episodes=5, out=path, watch=watch, against="random")
    assert result.interrupted
    assert (result.lengths, result.endings[-1]) == ((4, 2), "interrupted")
    assert result.notes == ("interrupted in episode 2, after 2 steps",)
    assert (result.file, result.num_frames, result.against) == (path, 8, None)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_an_environment_that_fails_leaves_the_old_video(tmp_path: Path, suffix: str) -> None:
    def watch(view: StepView) -> None:
        if view.step == 2:
            raise RuntimeError("broken")

    path = tmp_path / f"a.{suffix}"
    path.write_text("old")
    with pytest.raises(RuntimeError, match="broken"):
        play(out=path, watch=watch)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.avi", r"ends in \.gif or \.mp4"),
        ("video", r"ends in \.gif or \.mp4"),
        ("nowhere/a.gif", "cannot be written: No such file"),
        ("taken.gif", "is a directory"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_playing(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "taken.gif").mkdir()
    with pytest.raises(ConfigError, match=message):
        PlayOptions(out=tmp_path / name)
    assert os.listdir(tmp_path) == ["taken.gif"]


@pytest.mark.parametrize(("suffix", "module"), [("gif", "PIL.Image"), ("mp4", "imageio_ffmpeg")])
def test_a_missing_package_is_named_before_playing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r'pip install "offbeat\[video\]"'):
        PlayOptions(out=tmp_path / f"a.{suffix}")
    result = play(default_out=tmp_path / f"a.{suffix}")
    assert 'pip install "offbeat[video]"' in result.notes[0]
    assert (result.file, result.lengths) == (None, (4,))


def test_an_environment_without_pictures_says_so(tmp_path: Path) -> None:
    views: list[StepView] = []
    with pytest.raises(ConfigError, match="no render mode rgb_array: play it without a video"):
        play(env(Scoreless), out=tmp_path / "a.gif", watch=views.append)
    assert views == [], "refused before playing"
    result = play(env(Scoreless), default_out=tmp_path / "a.gif")
    assert (result.file, result.lengths) == (None, (4,))
    assert "no render mode rgb_array" in result.notes[0]
    assert os.listdir(tmp_path) == []


def test_pictures_that_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install pencils"):
        play(env(Undrawable), out=tmp_path / "a.gif")
    result = play(env(Undrawable), default_out=tmp_path / "a.gif")
    assert "pip install pencils" in result.notes[0]
    assert result.lengths == (4,)


@pytest.mark.parametrize(
    "frame", [None, np.zeros((3, 4)), np.zeros((3, 4, 3)), np.zeros((3, 4, 4), np.uint8)]
)
def test_pictures_of_another_kind_are_refused(tmp_path: Path, frame: object) -> None:
    with pytest.raises(EnvError, match=r"uint8 \[height, width, 3\]"):
        VideoWriter(tmp_path / "a.gif", 6).add(lambda: frame)


def test_pictures_have_one_size(tmp_path: Path) -> None:
    video = VideoWriter(tmp_path / "a.gif", 6)
    video.add(lambda: np.zeros((3, 4, 3), np.uint8))
    with pytest.raises(EnvError, match="keep one size"):
        video.add(lambda: np.zeros((4, 4, 3), np.uint8))
    video.discard()


def test_no_frame_no_video(tmp_path: Path) -> None:
    assert VideoWriter(tmp_path / "a.mp4", 6).close() is None
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- baselines


def test_random_plays_the_same_seeds_with_legal_actions() -> None:
    agent = Agent()
    agent.act = lambda obs, *, deterministic=True: np.int64(1)  # type: ignore[method-assign]
    result = playing.play(env(Picky), agent, 0, PlayOptions(against="random", episodes=2))
    assert result.against == (8.0, 8.0)


def test_an_interrupted_baseline_has_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(obs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(playing, "_random_player", lambda space, seed: give_up)
    result = play(against="random", episodes=2)
    assert (result.lengths, result.against, result.interrupted) == ((4, 4), None, True)
    assert result.notes == ("interrupted while random played",)


def test_unknown_baselines_are_refused_before_playing() -> None:
    views: list[StepView] = []
    with pytest.raises(ConfigError, match=r"no baseline 'greedy' .* known: random"):
        play(against="greedy", watch=views.append)
    with pytest.raises(ConfigError, match="did you mean greedy"):
        play(EnvConfig(id="offbeat/ColorLines-v0"), against="gredy", watch=views.append)
    assert views == []


@pytest.mark.parametrize("name", ["random", "greedy", "windows"])
def test_color_lines_has_baselines(name: str) -> None:
    from offbeat.envs.colorlines.baselines import RandomMoves

    mover = RandomMoves(0)

    class Mover(Agent):
        def act(self, obs, *, deterministic=True):
            return mover.act(obs)

    views: list[StepView] = []
    options = PlayOptions(against=name, episodes=2, max_steps=40, watch=views.append)
    result = playing.play(EnvConfig(id="offbeat/ColorLines-v0"), Mover(), 0, options)
    assert result.against is not None
    assert len(result.against) == len(result.scores) == 2
    assert name == "random" or sum(result.against) > sum(result.scores)
    assert "score 0" in (views[0].text or "")


# ---------------------------------------------------------------- whole runs


SMALL = {"run.rounds": 2, "runtime.kind": "inline", "run.stop_return": None}


def test_play_of_a_run(small_run: Callable[..., Any], tmp_path: Path) -> None:
    run = small_run({**SMALL, "run.seed": 11}).run_dir
    result = offbeat.play(run, video=False, episodes=2, against="random")
    assert (result.version, result.seeds) == (2, (11, 12))
    assert result.returns == result.scores == tuple(map(float, result.lengths))
    assert result.against is not None
    assert result == offbeat.play(run, video=False, episodes=2, against="random", watch=lambda view: None)
    assert offbeat.play(run, video=False, seed=3).seeds == (3,)


def test_a_run_without_a_checkpoint(small_run: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no directory"):
        offbeat.play(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="not a run directory"):
        offbeat.play(tmp_path)
    run = small_run({**SMALL, "checkpoint.enabled": False}).run_dir
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        offbeat.play(run)


def test_recurrent_policies_play(tmp_path: Path) -> None:
    settings = {**SMALL, "run.dir": str(tmp_path / "run"), "run.rounds": 1, "env.num_envs": 4}
    quiet = {"observe.console": "none", "observe.tensorboard": False, "eval.at_end": False}
    small = {"algorithm.num_steps": 16, "algorithm.minibatch_size": 32, "algorithm.num_epochs": 1}
    run = offbeat.train("memory-ppo", overrides={**settings, **quiet, **small}).run_dir
    first = offbeat.play(run, episodes=3, seed=0)
    assert first.scores == tuple(offbeat.play(run, seed=seed).scores[0] for seed in range(3))
    assert "rgb_array" in first.notes[0]


@pytest.fixture
def shown_run(small_run: Callable[..., Any]) -> Path:
    settings = {"env.id": f"{HERE}:Shown", "env.kwargs": {"worth": 0.5}, "eval.env_kwargs": {"worth": 3.0}}
    result = small_run({**SMALL, **settings})
    assert result.eval_return == 12.0  # four steps, judged by eval.env_kwargs
    run_dir: Path = result.run_dir
    return run_dir


def test_play_uses_the_environment_of_evaluation(shown_run: Path) -> None:
    assert offbeat.play(shown_run, video=False).returns == (12.0,)
    assert offbeat.evaluate(shown_run, episodes=2)["eval/return_mean"] == 12.0


def test_no_video_is_recorded_under_either_name(shown_run: Path) -> None:
    for options in ({"video": False}, {"film": False}):
        assert offbeat.play(shown_run, **options).file is None
    for option in ("--no-video", "--no-film"):
        assert run_command("play", str(shown_run), option) == 0
    assert not (shown_run / "play.gif").exists()
    assert offbeat.play(shown_run, film=True).file == shown_run / "play.gif"


def run_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_prints_first_and_last_frame_and_result(
    shown_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("play", str(shown_run), "--episodes", "2", "--best") == 0
    shown = capsys.readouterr().out
    assert shown.count("count 0\nepisode 1, step 0, score 0\n") == 1
    assert shown.count("count 4\nepisode 2, step 4, score 4\n") == 1
    assert "count 2" not in shown
    assert "\x1b" not in shown
    assert "episode 1  4.0 in 4 steps, seed 0, return 12.0\n" in shown
    assert "mean       4.0 in 4 steps\n" in shown
    assert f"{shown_run / 'play.gif'}, 10 frames at 10 a second" in shown
    assert (shown_run / "play.gif").exists()


def test_the_command_speaks_json(shown_run: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "b.gif"
    options = ["--no-show", "--against", "random", "--out", str(out), "--json"]
    assert run_command("play", str(shown_run), *options) == 0
    shown = capfd.readouterr()
    values = json.loads(shown.out)
    assert "count" not in shown.err
    assert (values["scores"], values["returns"], values["against"]) == ([4.0], [12.0], [4.0])
    assert (values["file"], values["num_frames"], values["version"]) == (str(out), 5, 2)


def test_the_command_refuses_and_interrupts(
    shown_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command("play", str(shown_run), "--out", "a.avi") == 2
    assert "ends in .gif or .mp4" in capsys.readouterr().err
    assert run_command("play", str(shown_run), "--out", "a.gif", "--no-film") == 2
    assert "--out and --no-video contradict each other" in capsys.readouterr().err

    def interrupt(self: object, view: StepView) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_play._FirstAndLast, "__call__", interrupt)
    assert run_command("play", str(shown_run)) == 130
    assert "interrupted in episode 1, after 0 steps" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    slept: list[float] = []
    monkeypatch.setattr(cli_play.time, "sleep", slept.append)
    with cli_play._screen() as watch:
        play(fps=20, watch=watch)
    drawn = terminal.getvalue()
    assert [drawn.count(f"count {step}") for step in range(4)] == [1, 1, 1, 1]
    assert "\x1b[1A" in drawn  # the cursor goes up again
    assert len(slept) == 5
    assert max(slept) <= 5 / 20


def test_numbers_alone_do_not_slow_a_game_down(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(cli_play.time, "sleep", lambda seconds: pytest.fail("slept"))
    with cli_play._screen() as watch:
        play(env(Scoreless), watch=watch)
    assert "episode 1, step 4, score 8" in terminal.getvalue()


# ---------------------------------------------------------------- eval.env_kwargs


def judged(**kwargs: Any) -> RunConfig:
    return RunConfig(
        algorithm=PPOConfig(network={"hidden": (8,)}),
        env=EnvConfig(id=f"{HERE}:Shown", kwargs={"length": 3, "worth": 1.0}),
        eval=EvalConfig(episodes=2, env_kwargs=kwargs),
    )


def test_evaluation_has_arguments_of_its_own() -> None:
    roles = ALGORITHM.build(judged(worth=5.0))
    evaluator = roles.evaluate.make(WorkerContext(collector=0, num_collectors=1, seed=0))
    metrics = evaluator.evaluate(roles.learner(SingleRank()).weights(), seed=0)
    assert (metrics["eval/return_mean"], metrics["eval/length_mean"]) == (15.0, 3.0)
    assert judged(worth=5.0).eval_env.kwargs == {"length": 3, "worth": 5.0}
    assert judged().eval_env == judged().env


def test_arguments_that_do_not_fit_are_refused_before_the_run(tmp_path: Path) -> None:
    check_eval_env(judged(worth=5.0), probe_env)
    with pytest.raises(EnvError, match=r"eval\.env_kwargs changes the observations .* do not fit"):
        check_eval_env(judged(size=5), probe_env)
    with pytest.raises(EnvError, match=r"eval\.env_kwargs: .*wealth"):
        check_eval_env(judged(wealth=5), probe_env)
    overrides = {"eval.env_kwargs": {"wealth": 1}, "run.dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=r"eval\.env_kwargs"):
        offbeat.train("cartpole-ppo", overrides=overrides)
    assert not (tmp_path / "run").exists()


def test_they_are_checked_like_those_of_training() -> None:
    with pytest.raises(ConfigError, match=r"eval\.env_kwargs = 3\n    must be a mapping"):
        offbeat.load_config("cartpole-ppo", {"env_kwargs": 3})
    with pytest.raises(ConfigError, match="plain values"):
        offbeat.load_config("cartpole-ppo", {"eval.env_kwargs": {"a": object()}})
    assert offbeat.load_config("cartpole-ppo", {"eval.env_kwargs": None}).eval.env_kwargs == {}


def test_another_environment_drops_them(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("extends: cartpole-ppo\neval:\n  env_kwargs: {a: 1}\n")
    assert offbeat.load_config(base).eval.env_kwargs == {"a": 1}
    assert offbeat.load_config(base, ["env.id=Pendulum-v1"]).eval.env_kwargs == {}


def test_a_resumed_run_is_checked_too(shown_run: Path) -> None:
    before = (shown_run / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"eval\.env_kwargs"):
        offbeat.resume(shown_run, overrides=["rounds=3", "env_kwargs={size: 9}"])
    assert (shown_run / "config.yaml").read_text() == before
