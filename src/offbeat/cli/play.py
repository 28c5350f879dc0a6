"""``offbeat play``."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.output import EXIT_INTERRUPTED, JsonFlag, reporting, show_table
from offbeat.cli.resume import RunDirectory

if TYPE_CHECKING:
    from rich.live import Live

    from offbeat.run.playing import PlayResult, StepView, Watch

_LINE_S = 0.1


def play(
    run: RunDirectory,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 1,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the first episode, run.seed when not given.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Play the best checkpoint, not the last.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Video, a .gif or .mp4; RUN/play.gif when not given.", show_default=False),
    ] = None,
    fps: Annotated[
        int | None, typer.Option(min=1, max=50, help="Steps a second; as the environment says, or 6.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="NAME", help="A baseline that plays the same seeds, such as random.")
    ] = None,
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Draw actions instead of taking the most likely.")
    ] = False,
    max_steps: Annotated[int | None, typer.Option(min=1, help="End episodes after this many steps.")] = None,
    no_show: Annotated[bool, typer.Option("--no-show", help="Show nothing but the result.")] = False,
    no_video: Annotated[bool, typer.Option("--no-video", "--no-film", help="Record no video.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Watch the weights of a run play, and record a video."""
    with reporting(as_json) as report:
        from offbeat import api

        if out is not None and no_video:
            raise typer.BadParameter("--out and --no-video contradict each other; leave one out")
        with contextlib.nullcontext() if no_show else _screen() as watch:
            result = api.play(
                run,
                episodes=episodes,
                seed=seed,
                best=best,
                out=out,
                video=not no_video,
                fps=fps,
                against=against,
                stochastic=stochastic,
                max_steps=max_steps,
                watch=watch,
            )
        notes = [*result.notes, *_missing_best(run, best)]
        for note in notes:
            print(f"note: {note}")
        show_table(f"version {result.version} of {run} at play", _rows(result, against))
        report.values.update(run_dir=run, **_values(result), notes=notes)
        if result.interrupted:
            report.exit_code = EXIT_INTERRUPTED


def _missing_best(run: str, best: bool) -> list[str]:
    from offbeat.checkpoint import CheckpointManager

    if not best or CheckpointManager(Path(run) / "checkpoints").best() is not None:
        return []
    return ["no checkpoint of this run has a score (eval.interval_rounds), so the newest was played"]


# ---------------------------------------------------------------- the result


def _rows(result: PlayResult, against: str | None) -> dict[str, str]:
    rows = {f"episode {number}": _episode(result, number - 1, against) for number in _numbers(result)}
    if len(result.scores) > 1:
        rows["mean"] = f"{fmean(result.scores):.1f} in {fmean(result.lengths):,.0f} steps" + _versus(
            against, None if result.against is None else fmean(result.against)
        )
    if result.file is not None:
        rows["video"] = f"{result.file}, {result.num_frames:,} frames at {result.fps:g} a second"
    return rows


def _numbers(result: PlayResult) -> range:
    return range(1, len(result.scores) + 1)


def _episode(result: PlayResult, index: int, against: str | None) -> str:
    score, total = result.scores[index], result.returns[index]
    reward = "" if score == total else f", return {total:.1f}"
    rival = None if result.against is None else result.against[index]
    text = f"{score:.1f} in {result.lengths[index]:,} steps, seed {result.seeds[index]}{reward}"
    return text + _versus(against, rival)


def _versus(name: str | None, score: float | None) -> str:
    return "" if score is None else f"; {name}: {score:.1f}"


def _values(result: PlayResult) -> dict[str, object]:
    return {
        "version": result.version,
        "seeds": result.seeds,
        "returns": result.returns,
        "lengths": result.lengths,
        "scores": result.scores,
        "endings": result.endings,
        "against": result.against,
        "file": result.file,
        "num_frames": result.num_frames,
        "fps": result.fps,
        "interrupted": result.interrupted,
    }


# ---------------------------------------------------------------- the screen


@contextlib.contextmanager
def _screen() -> Iterator[Watch]:
    """A terminal shows the game as it goes, in one place; elsewhere its first and last frames are printed."""
    if sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            screen = _InPlace(live)
            yield screen
            screen.close()
        return
    pages = _FirstAndLast()
    yield pages
    pages.close()


class _InPlace:
    """Draws every step over the one before, at the speed it is meant to be seen at."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._due_s = 0.0
        self._hidden: StepView | None = None

    def __call__(self, view: StepView) -> None:
        if view.text is not None:
            self._draw(view)
            self._wait(1 / view.fps)
        elif time.monotonic() < self._due_s:
            self._hidden = view  # nothing to look at but numbers: no reason to slow the game down
        else:
            self._draw(view)
            self._due_s = time.monotonic() + _LINE_S

    def close(self) -> None:
        """Leave the last step on the screen."""
        if self._hidden is not None:
            self._draw(self._hidden)

    def _draw(self, view: StepView) -> None:
        from rich.console import Group
        from rich.text import Text

        picture = [] if view.text is None else [Text.from_ansi(view.text.rstrip("\n"))]
        self._live.update(Group(*picture, Text(_status(view), style="bold")), refresh=True)
        self._hidden = None

    def _wait(self, frame_s: float) -> None:
        now_s = time.monotonic()
        self._due_s = max(self._due_s + frame_s, now_s)
        time.sleep(self._due_s - now_s)


class _FirstAndLast:
    """Prints the first and the last frame of each episode."""

    def __init__(self) -> None:
        self._last: StepView | None = None

    def __call__(self, view: StepView) -> None:
        if view.step == 0:
            self.close()
            self._print(view)
        else:
            self._last = view

    def close(self) -> None:
        """Print the last frame, if it has not been yet."""
        if self._last is not None:
            self._print(self._last)
        self._last = None

    def _print(self, view: StepView) -> None:
        from rich.text import Text

        if view.text is not None:
            print(f"{Text.from_ansi(view.text).plain.rstrip()}\n{_status(view)}\n")


def _status(view: StepView) -> str:
    return f"episode {view.episode}, step {view.step:,}, score {view.score:g}"
