"""Make every picture of the documentation from real runs.

``returns``   return over wall time: CartPole, and an environment whose steps take about a millisecond
``timeline``  who worked when in the latter, with the dial at 0 and at 1
``console``   the live display as a terminal shows it in the middle of a run
``colorlines``  what Color Lines was learned to, from benchmarks/results/colorlines*.json
``skills``    what teams with and without skills learn, from benchmarks/results/hmasd.json and lbf.json
``planning``  what tree searches over learned models learn, from benchmarks/results/planning*.json
``priors``    what priors are worth to a search in text games, from benchmarks/results/text_priors.json

``python benchmarks/figures.py`` writes them to docs/images/; ``--only NAME`` makes one of them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import matplotlib
import numpy as np
from common import ONE_THREAD, REPOSITORY, offbeat_command, say
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from PIL import Image, ImageDraw, ImageFont
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from terminal import record

from offbeat.observe.events import read_rounds

SYNC, ASYNC, TRAIN = "#5b6b7f", "#0a9396", "#ca6702"
GAMES = {
    "ppo": ("PPO", "#5b6b7f"),
    "per": ("PPO with replay", "#0a9396"),
    "per-critic": ("with replay for the critic only", "#ca6702"),
}
"""Contestants of benchmarks/colorlines.py: name and colour."""
PANELS = {"colorlines": "with and without replay, three seeds", "colorlines_long": "one long run"}
"""Results of benchmarks/colorlines.py by name, and what they show."""
TEAMS = {
    "hmasd": ("HMASD", "#0a9396"),
    "async": ("HMASD at k = 2", "#94d2bd"),
    "mappo": ("MAPPO", "#5b6b7f"),
    "lbf-hmasd": ("HMASD", "#0a9396"),
    "lbf-mappo": ("MAPPO", "#5b6b7f"),
}
"""Contestants of benchmarks/hmasd.py: name and colour."""
TASKS = {"hmasd": ("Alice and Bob", "success"), "lbf": ("Level-based foraging, cooperative", "return")}
"""Results of benchmarks/hmasd.py by name: what was trained, and what its curve shows."""
PLANNERS = {
    "muzero": ("MuZero", "#ca6702"),
    "unizero": ("UniZero", "#5b6b7f"),
    "async": ("UniZero at k = 4", "#0a9396"),
    "minatar": ("MuZero", "#ca6702"),
    "pendulum": ("Sampled MuZero", "#ca6702"),
}
"""Contestants of benchmarks/planning.py: name and colour."""
WORLDS = {
    "CartPole-v1": ("muzero", "unizero", "async"),
    "MinAtar/Breakout-v1": ("minatar",),
    "Pendulum-v1": ("pendulum",),
}
"""What was planned in, and its contestants."""
PLANNED = ("planning_muzero", "planning_unizero", "planning_others")
"""Results of benchmarks/planning.py."""
PRIORS = {
    "pretrained": ("pretrained on 200 other games", "#0a9396"),
    "dose-50": ("on 50", "#94d2bd"),
    "dose-10": ("on 10", "#cfe8df"),
    "uniform": ("uniform", "#5b6b7f"),
    "permuted": ("permuted", "#ca6702"),
    "context-free": ("without the state", "#e9b872"),
    "shuffled": ("trained on dealt labels", "#bb8588"),
    "alone without repeats": ("pretrained, no search", "#001219"),
}
"""Arms of benchmarks/text_priors.py: name and colour."""
RESULTS = REPOSITORY / "benchmarks" / "results"
RECIPES = {"cartpole-ppo": SYNC, "cartpole-ppo-async": ASYNC}
DEGREES = {0: SYNC, 1: ASYNC}
SLOW = (
    "env.id=offbeat.testing.envs:offbeat-test/Slow-v0",
    "env.kwargs={sleep_s: 0.001, sleep_sigma: 0.5}",
    "env.num_envs=8",
    "runtime.kind=processes",
    "runtime.num_workers=2",
    "algorithm.num_steps=32",
    "algorithm.num_epochs=20",
    "algorithm.lr=5e-4",
    "algorithm.minibatch_size=64",
    "async_training.open_rounds=0",
    "async_training.enable_async_debug_log=true",
)
"""An environment whose step sleeps for a log-normal time with a median of one millisecond."""
BASE = "cartpole-ppo"
"""The recipe whose algorithm trains there."""
SCORE = "rollout/return_mean_100"
_TIMEOUT_S = 600


def train(recipe: str, run_dir: Path, *overrides: str) -> Path:
    """Train a recipe in a process of its own; return its run directory."""
    settings = (f"run.dir={run_dir}", "observe.console=none", *overrides)
    say(f"offbeat train {recipe} {' '.join(settings)}")
    command = [*offbeat_command(), "train", recipe, *settings]
    environment = {**os.environ, **ONE_THREAD}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return run_dir


# ---------------------------------------------------------------- return over wall time


def returns(out: Path, runs: Path, seeds: int) -> None:
    """Two panels: cheap steps, where the learner is the bottleneck, and dear ones, where overlap pays."""
    figure, (cheap, dear) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for recipe, colour in RECIPES.items():
        run_dirs = [train(recipe, runs / f"{recipe}-{seed}", f"run.seed={seed}") for seed in range(seeds)]
        _curves(cheap, colour, f"{recipe}, k = {_degree(run_dirs[0])}", run_dirs)
    for k, colour in DEGREES.items():
        slow = (f"async_training.off_policy_degree={k}", "run.rounds=60", *SLOW)
        run_dirs = [train(BASE, runs / f"{k}-{seed}", f"run.seed={seed}", *slow) for seed in range(seeds)]
        _curves(dear, colour, f"k = {k}", run_dirs)
    cheap.set_title("CartPole, until 475: a step takes microseconds")
    dear.set_title("a task whose steps take about a millisecond")
    cheap.set_ylabel("return, mean of the last 100 episodes")
    for axes in (cheap, dear):
        axes.set_xlabel("wall time in seconds")
        axes.legend(frameon=False, loc="lower right")
        _tidy(axes)
    figure.savefig(out / "returns.png", dpi=160)


def _degree(run_dir: Path) -> int:
    return int(read_rounds(run_dir / "events.jsonl")[-1]["metrics"]["pace/off_policy_degree"])


def _curves(axes: Axes, colour: str, label: str, run_dirs: Sequence[Path]) -> None:
    for run_dir in run_dirs:
        metrics = [record["metrics"] for record in read_rounds(run_dir / "events.jsonl")]
        seconds, scores = ([row[name] for row in metrics] for name in ("time/elapsed_s", SCORE))
        axes.plot(seconds, scores, color=colour, lw=1.8, alpha=0.85, label=label)
        label = ""


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)


def colorlines(out: Path, runs: Path, seeds: int) -> None:
    """Scores over wall time: with and without replay, and one long run, beside the baselines.

    A panel whose results are not there is left out.
    """
    files = {RESULTS / f"{name}.json": title for name, title in PANELS.items()}
    for path in files:
        if not path.exists():
            say(f"colorlines: {path.name} is missing in {RESULTS}; benchmarks/colorlines.py --out makes it")
    found = {path: title for path, title in files.items() if path.exists()}
    if not found:
        return
    size = (5 * len(found), 3.8)
    figure, grid = plt.subplots(1, len(found), figsize=size, layout="constrained", sharey=True, squeeze=False)
    panels = grid[0]
    for axes, (path, title) in zip(panels, found.items(), strict=True):
        axes.set_title(title)
        kept = json.loads(path.read_text())
        for name, runs_of in kept["runs"].items():
            label, colour = GAMES[name]
            for run in runs_of:
                minutes, scores = ([point[key] for point in run["curve"]] for key in ("minutes", "score"))
                axes.plot(minutes, scores, color=colour, lw=1.4, alpha=0.85, label=label)
                label = ""
        for policy in ("greedy", "windows"):
            axes.axhline(kept["baselines"][policy], color="#999999", lw=1, ls="--")
            axes.text(0, kept["baselines"][policy], f" {policy}", color="#666666", va="bottom", fontsize=9)
        axes.set_xlabel("wall time in minutes, two cores")
        axes.set_xlim(left=0)
        axes.legend(frameon=False, loc="upper left")
        _tidy(axes)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("score, mean of 100 games")
    figure.savefig(out / "colorlines-scores.png", dpi=160)


def skills(out: Path, runs: Path, seeds: int) -> None:
    """What teams learn over environment steps, one line for each seed."""
    figure, panels = plt.subplots(1, len(TASKS), figsize=(5 * len(TASKS), 3.8), layout="constrained")
    for axes, (name, (title, key)) in zip(panels, TASKS.items(), strict=True):
        kept = json.loads((RESULTS / f"{name}.json").read_text())
        axes.set_title(title)
        for contestant, runs_of in kept["runs"].items():
            label, colour = TEAMS[contestant]
            for run in runs_of:
                steps = [point["env_steps"] / 1e6 for point in run["curve"]]
                scores = [point[key] for point in run["curve"]]
                axes.plot(steps, scores, color=colour, lw=1.4, alpha=0.85, label=label)
                label = ""
        level = max(kept["at_random"].values())
        axes.axhline(level, color="#999999", lw=1, ls="--")
        axes.text(0, level, " at random", color="#666666", va="bottom", fontsize=9)
        axes.set_xlabel("environment steps in millions")
        axes.set_ylabel("share of episodes solved" if key == "success" else "return")
        axes.set_xlim(left=0)
        axes.set_ylim(-0.03, 1.05)
        axes.legend(frameon=False, loc="center right")
        _tidy(axes)
    figure.savefig(out / "skills.png", dpi=160)


def planning(out: Path, runs: Path, seeds: int) -> None:
    """Returns of evaluations over environment steps, one line for each seed, up to the shortest run's end."""
    missing = [name for name in PLANNED if not (RESULTS / f"{name}.json").exists()]
    if missing:
        say(f"planning: {missing} are missing in {RESULTS}; benchmarks/planning.py --out makes them")
        return
    kept = {}
    for name in PLANNED:
        kept |= json.loads((RESULTS / f"{name}.json").read_text())["runs"]
    figure, panels = plt.subplots(1, len(WORLDS), figsize=(4.2 * len(WORLDS), 3.8), layout="constrained")
    for axes, (title, contestants) in zip(panels, WORLDS.items(), strict=True):
        axes.set_title(title)
        for contestant in contestants:
            label, colour = PLANNERS[contestant]
            for run in kept[contestant]:
                steps, scores = ([point[i] for point in run["curve"]] for i in (0, 1))
                axes.plot(np.array(steps) / 1e3, scores, color=colour, lw=1.4, alpha=0.85, label=label)
                label = ""
        axes.set_xlabel("environment steps in thousands")
        ends = [run["curve"][-1][0] for contestant in contestants for run in kept[contestant]]
        axes.set_xlim(0, min(ends) / 1e3)
        axes.legend(frameon=False, loc="lower right")
        _tidy(axes)
    panels[0].set_ylabel("return of evaluations")
    figure.savefig(out / "planning.png", dpi=160)


# ---------------------------------------------------------------- who worked when


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work; ``row`` is a collector's lane, or -1 for the learner. Times in seconds."""

    row: int
    number: int
    start_s: float
    end_s: float


def priors(out: Path, runs: Path, seeds: int) -> None:
    """Share of the maximum score over steps, by prior."""
    found = json.loads((RESULTS / "text_priors.json").read_text())
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for arm, (name, colour) in PRIORS.items():
        if arm in found["arms"]:
            curve = [0.0, *found["arms"][arm]["curve"]]
            steps = np.linspace(0, 4, len(curve))
            style = "--" if arm.startswith("alone") else "-"
            axes.plot(steps, curve, style, color=colour, label=name)
    axes.set_xlabel("steps, in lengths of the solution")
    axes.set_ylabel("share of the maximum score")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize=8)
    _tidy(axes)
    figure.tight_layout()
    figure.savefig(out / "text_priors.png", dpi=150)
    plt.close(figure)


def timeline(out: Path, runs: Path, seeds: int) -> None:
    """The same second and a half of two runs, below each other."""
    figure, panels = plt.subplots(2, 1, figsize=(10, 4.4), layout="constrained", sharex=True)
    for k, axes in zip(DEGREES, panels, strict=True):
        settings = (f"async_training.off_policy_degree={k}", "run.rounds=20", *SLOW)
        run_dir = train(BASE, runs / f"timeline-{k}", *settings)
        _bars(axes, list(spans(run_dir)))
        axes.set_title(f"off_policy_degree = {k}", loc="left", fontsize=11)
    panels[-1].set_xlabel("seconds")
    figure.savefig(out / "timeline.png", dpi=160)


def spans(run_dir: Path) -> Iterator[Span]:
    """What collectors and learner did, from the debug log of a run."""
    arrived = re.compile(r"^(.{23}) .*ticket (\d+) arrived +lane (\d+) .* after ([\d.]+) s$", re.MULTILINE)
    for at, ticket, lane, seconds in arrived.findall((run_dir / "logs" / "run.log").read_text()):
        yield Span(int(lane), int(ticket), _seconds(at) - float(seconds), _seconds(at))
    trained = re.compile(r"^(.{23}) .*round (\d+) trained in ([\d.]+) s", re.MULTILINE)
    for at, number, seconds in trained.findall((run_dir / "logs" / "learner.log").read_text()):
        yield Span(-1, int(number), _seconds(at) - float(seconds), _seconds(at))


def _seconds(at: str) -> float:
    return datetime.strptime(at, "%Y-%m-%d %H:%M:%S.%f").timestamp()


def _bars(axes: Axes, work: Sequence[Span], first_round: int = 4, length_s: float = 1.5) -> None:
    origin_s = next(span.start_s for span in work if span.row == -1 and span.number == first_round)
    for span in work:
        start_s, end_s = span.start_s - origin_s, span.end_s - origin_s
        if end_s < 0 or start_s > length_s:
            continue
        colour = TRAIN if span.row == -1 else ASYNC
        axes.barh(span.row, end_s - start_s, left=start_s, height=0.72, color=colour, ec="white", lw=1.2)
        if start_s >= 0 and end_s <= length_s:
            axes.text((start_s + end_s) / 2, span.row, span.number, ha="center", va="center", color="white")
    lanes = sorted({span.row for span in work})
    names = ["learner: rounds" if lane == -1 else f"collector {lane}: tickets" for lane in lanes]
    axes.set_yticks(lanes, names)
    axes.set_xlim(0, length_s)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


# ---------------------------------------------------------------- the live display

_COLUMNS, _ROWS = 100, 30
_NEXT_FRAME = re.compile(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
_FONT_PX, _LINE_PX, _MARGIN_PX = 26, 38, 36
_THEME = TerminalTheme(
    background=(24, 28, 35),
    foreground=(214, 219, 226),
    normal=[
        (40, 44, 52),
        (224, 108, 117),
        (126, 198, 137),
        (229, 192, 123),
        (97, 175, 239),
        (198, 120, 221),
        (86, 198, 210),
        (171, 178, 191),
    ],
    bright=[
        (80, 88, 101),
        (224, 108, 117),
        (126, 198, 137),
        (229, 192, 123),
        (97, 175, 239),
        (198, 120, 221),
        (86, 198, 210),
        (255, 255, 255),
    ],
)


def console(out: Path, runs: Path, seeds: int) -> None:
    """The frame that was on the terminal when seven tenths of a run were done."""
    recipe, dial = "pendulum-ppo", "async_training.off_policy_degree=1"
    settings = ["run.dir=runs/pendulum", "observe.console=rich", "eval.interval_rounds=10"]
    command = [*offbeat_command(), "train", recipe, dial, *settings]
    say(" ".join(["offbeat", *command[3:]]))
    colours = {**ONE_THREAD, "COLORTERM": "truecolor"}
    session = record(command, columns=_COLUMNS, rows=_ROWS, environment=colours, directory=runs)
    shown = "".join(piece.text for piece in session.pieces)
    if session.exit_code:
        raise SystemExit(shown)
    frames = [frame for frame in _NEXT_FRAME.split(shown) if "%" in frame]
    frame = frames[int(0.7 * len(frames))].replace("\r\n", "\n")
    draw_terminal(frame, f"offbeat train {recipe} {dial}").save(out / "console.png", optimize=True)


def draw_terminal(text: str, title: str) -> Image.Image:
    """Draw text with ANSI colours as a window of a terminal."""
    fonts = {is_bold: _font(is_bold) for is_bold in (False, True)}
    cell_px = fonts[False].getlength("M")
    lines = [line for line in AnsiDecoder().decode(text) if line.plain.strip()]
    width = int(2 * _MARGIN_PX + cell_px * max(len(line.plain) for line in lines))
    top = 2 * _MARGIN_PX + 14
    image = Image.new("RGBA", (width, top + _LINE_PX * len(lines) + _MARGIN_PX), (0, 0, 0, 0))
    drawing = ImageDraw.Draw(image)
    drawing.rounded_rectangle(
        (0, 0, image.width - 1, image.height - 1), 18, fill=tuple(_THEME.background_color)
    )
    for index, colour in enumerate(("#e06c75", "#e5c07b", "#7ec689")):
        drawing.ellipse((_MARGIN_PX + 30 * index, 24, _MARGIN_PX + 30 * index + 18, 42), fill=colour)
    drawing.text((width / 2, 33), title, font=fonts[False], fill=(140, 147, 158), anchor="mm")
    recorder = Console(width=400, color_system="truecolor", file=io.StringIO())
    for row, line in enumerate(lines):
        column = 0
        for segment in line.render(recorder):
            style = segment.style or Style()
            place = (_MARGIN_PX + cell_px * column, top + _LINE_PX * row)
            drawing.text(place, segment.text.rstrip("\n"), font=fonts[bool(style.bold)], fill=_colour(style))
            column += len(segment.text)
    return image


def _font(is_bold: bool) -> ImageFont.FreeTypeFont:
    name = "DejaVuSansMono-Bold.ttf" if is_bold else "DejaVuSansMono.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), _FONT_PX)


def _colour(style: Style) -> tuple[int, ...]:
    colour = style.color.get_truecolor(_THEME) if style.color else _THEME.foreground_color
    share = 0.6 if style.dim else 1.0
    mixed = share * np.array(colour) + (1 - share) * np.array(_THEME.background_color)
    return tuple(int(part) for part in mixed)


# ---------------------------------------------------------------- command line

FIGURES = {
    "colorlines": colorlines,
    "skills": skills,
    "planning": planning,
    "priors": priors,
    "returns": returns,
    "timeline": timeline,
    "console": console,
}


def main() -> int:
    """Make the pictures; the runs behind them are not kept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=sorted(FIGURES), help="make this one")
    parser.add_argument("--seeds", type=int, default=3, help="runs behind each colour of `returns` (3)")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "images", help="where they go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"font.size": 10, "axes.titlesize": 11, "savefig.facecolor": "white"})
    for name in [options.only] if options.only else FIGURES:
        with tempfile.TemporaryDirectory(prefix="offbeat-figures-") as runs:
            FIGURES[name](options.out, Path(runs), options.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
