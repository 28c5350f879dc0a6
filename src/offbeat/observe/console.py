"""Display of a running run: one live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from offbeat.observe.callbacks import (
    Bottleneck,
    Callback,
    CheckpointInfo,
    CollectorLostInfo,
    EvalInfo,
    FinishInfo,
    RoundInfo,
    RunInfo,
    RunSummary,
)
from offbeat.observe.text import REPLAY_METRIC, duration, evaluation, fill, number, plain, sparkline

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text

ConsoleKind = Literal["auto", "rich", "plain", "none"]

_REFRESH_S = 0.25
_SILENT_ROUNDS = 1.25  # intervals without a line after which a phase gets one: rounds are to come first
_PHASE_SHARE = 0.05  # a phase that lasts is told of in intervals that grow with it
_STARTING = "starting"
_MOST_OF_TIME = 0.01
_SILENT_S, _MOST_WHEN_SILENT = 2.5, 0.1  # rather a tenth of the time than no sign of life
_WIDTH = 92
_BAR_WIDTH = 40
_CURVE_WIDTH = 24


class Display(Callback):
    """A display of the run. This one shows nothing."""

    def open(self, resumed_from: int | None = None, phase: Callable[[], str] = lambda: _STARTING) -> None:
        """Show what is run, and the ``phase`` until `on_start`: imports and warm-ups take time."""

    def refresh(self, phase: Callable[[], str]) -> None:
        """Show the phase of the run between rounds; called often, asks for the phase only when it is due."""

    def close(self) -> None:
        """Leave the terminal as it was; a second call does nothing."""


class _Starting:
    """Refreshes a display from a thread of its own while the main one imports or warms up."""

    def __init__(self, refresh: Callable[[Callable[[], str]], None], phase: Callable[[], str]) -> None:
        self._refresh, self._phase = refresh, phase
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="starting", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(_REFRESH_S):
            self._refresh(self._phase)

    def end(self) -> None:
        """Stop refreshing."""
        self._is_over.set()
        self._thread.join()


def make_console(
    kind: ConsoleKind,
    summary: RunSummary,
    log_interval_s: float = 2.0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Display:
    """Return the display that ``observe.console`` asks for; ``auto``: rich on a terminal, plain elsewhere."""
    stream = sys.stdout if stream is None else stream
    if kind == "none":
        return Display()
    if kind == "plain" or (kind == "auto" and not _is_terminal(stream)):
        return PlainConsole(summary, stream, log_interval_s, clock)
    return RichConsole(summary, stream, clock)


def preview(path: str | Path | None = None) -> str:
    """A frame of the live display as SVG, from made-up numbers: the picture in the documentation."""
    from rich.console import Console

    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(_render(_preview_frame()))
    svg = console.export_svg(title="offbeat train")
    if path is not None:
        Path(path).write_text(svg, encoding="utf-8")
    return svg


def _is_same_phase(text: str, before: str) -> bool:
    """Compare two phases without their reports of progress, which come behind a colon."""
    return text.partition(": ")[0] == before.partition(": ")[0]


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


# ---------------------------------------------------------------- plain lines


_PLAIN_LINE = (
    "return {rollout/return_mean:1} (last 100: {rollout/return_mean_100:1})  "
    "{learn/samples_per_s:k} steps/s  "
    "age {pace/avg_sample_age:1}/{pace/max_sample_age:0} (k {pace/off_policy_degree:0}){replayed}  "
    "idle collect {pace/collect_idle_ratio:%} train {pace/train_idle_ratio:%}  left "
)


_REPLAYED_AGE = "pace/avg_replayed_age"
_REPLAYED = " replayed {pace/avg_replayed_age:1}/{pace/max_replayed_age:0}"


class PlainConsole(Display):
    """One line every ``log_interval_s`` seconds, and one for whatever else is worth telling.

    When no round ends in that time, the line is the phase and how long it has lasted, less and less often.
    """

    def __init__(
        self, summary: RunSummary, stream: TextIO, log_interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._summary = summary
        self._stream = stream
        self._interval_s = log_interval_s
        self._clock = clock
        self._told_at_s = -math.inf
        self._line_at_s = self._phase_since_s = clock()
        self._next_phase_s = -math.inf
        self._phase = ""
        self._starting: _Starting | None = None
        self._is_open = False

    def open(self, resumed_from: int | None = None, phase: Callable[[], str] = lambda: _STARTING) -> None:
        """Say what is run, and where it writes; until the start is over, say that it lasts."""
        self._introduce(resumed_from)
        self._starting = _Starting(self.refresh, phase)

    def _introduce(self, resumed_from: int | None) -> None:
        self._is_open = True
        resumed = "" if resumed_from is None else f" from version {resumed_from}"
        self._say(f"{_title(self._summary)}{resumed}")
        if self._summary.directory is not None:
            self._say(f"writes to {self._summary.directory}")

    def on_start(self, info: RunInfo) -> None:
        self.close()
        if not self._is_open:
            self._introduce(info.resumed_from)

    def close(self) -> None:
        """Say no longer that the run starts."""
        if self._starting is not None:
            self._starting.end()
            self._starting = None

    def on_round(self, info: RoundInfo) -> None:
        """Print a line of metrics, when the last one is long enough ago."""
        if self._clock() - self._told_at_s >= self._interval_s:
            self._told_at_s = self._clock()
            self._say(self._progress(info.version, info.metrics))

    def refresh(self, phase: Callable[[], str]) -> None:
        """Print the phase when no line came for an interval, or for a twentieth of the time it has lasted."""
        now_s = self._clock()
        if now_s < max(self._line_at_s + _SILENT_ROUNDS * self._interval_s, self._next_phase_s):
            return
        self._next_phase_s, text = now_s + _REFRESH_S, phase()
        if not _is_same_phase(text, self._phase):
            self._phase_since_s = self._line_at_s
        self._phase = text
        lasts_s = now_s - self._phase_since_s
        if text and now_s - self._line_at_s >= _PHASE_SHARE * lasts_s:
            self._say(f"{text}, {duration(lasts_s)} so far")

    def on_eval(self, info: EvalInfo) -> None:
        result = plain(number(info.metrics, "eval/return_mean"))
        if not math.isnan(sampled := number(info.metrics, "eval/return_mean_sampled")):
            result += f" ({plain(sampled)} with drawn actions)"
        self._say(f"evaluation of version {info.version}: return {result}")

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        self._say(f"checkpoint of version {info.version} ({info.seconds:.2f} s)")

    def on_collector_lost(self, info: CollectorLostInfo) -> None:
        self._say(f"collector {info.collector} lost: {info.reason} (restart {info.restarts})")

    def on_notice(self, text: str) -> None:
        self._say(text)

    def on_finish(self, info: FinishInfo) -> None:
        if info.metrics:
            self._say(self._progress(info.version, info.metrics))
        self._say(_ending(info))

    def _progress(self, version: int, metrics: Mapping[str, float]) -> str:
        rounds = str(self._summary.rounds)
        line = _PLAIN_LINE.replace("{replayed}", _REPLAYED if _REPLAYED_AGE in metrics else "")
        progress = f"[{version:>{len(rounds)}}/{rounds}]  {fill(line, metrics)}"
        return progress + _time_left(self._summary, metrics)

    def _say(self, text: str) -> None:
        self._line_at_s = self._clock()
        print(text, file=self._stream, flush=True)


def _title(summary: RunSummary) -> str:
    what = [summary.name, *(word for word in (summary.algorithm, summary.env_id) if word)]
    dial = "auto" if summary.off_policy_degree < 0 else str(summary.off_policy_degree)
    where = f"{summary.runtime} × {summary.num_workers}"
    return " · ".join([*dict.fromkeys(what), where, f"k = {dial}"])


def _time_left(summary: RunSummary, metrics: Mapping[str, float]) -> str:
    """``0:46``; an upper bound for a run that ends when it is good enough."""
    eta_s = number(metrics, "time/eta_s")
    may_end_early = summary.stop_return is not None and eta_s > 0
    return f"at most {duration(eta_s)}" if may_end_early else duration(eta_s)


def _ending(info: FinishInfo) -> str:
    if info.restart is not None:
        return f"interrupted at version {info.version} after {duration(info.seconds)}: {info.restart}"
    if info.error is not None:
        return f"failed at version {info.version} after {duration(info.seconds)}: {info.reason}"
    word = "stopped" if info.stopped else "finished"
    return f"{word} at version {info.version} after {duration(info.seconds)}: {info.reason}"


# ---------------------------------------------------------------- the live display


@dataclass(slots=True)
class _Frame:
    """Everything the display shows."""

    summary: RunSummary
    version: int = 0
    phase: str = ""
    phase_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    bottleneck: Bottleneck | None = None
    eval_version: int | None = None
    eval_metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: int | None = None
    curve: list[float] = field(default_factory=list)


class RichConsole(Display):
    """One live display. Drawn at most four times a second, and once open for at most 1 % of the time."""

    def __init__(self, summary: RunSummary, stream: TextIO, clock: Callable[[], float]) -> None:
        from rich.console import Console

        self._frame = _Frame(summary)
        self._console: Console = Console(file=stream)
        self._clock = clock
        self._next_s = self._next_phase_s = self._drawn_s = self._phase_since_s = -math.inf
        self._has_new_round = False
        self._phase: Callable[[], str] = str
        self._live: Live | None = None
        self._starting: _Starting | None = None

    def open(self, resumed_from: int | None = None, phase: Callable[[], str] = lambda: _STARTING) -> None:
        """Open the display, and show until the start is over how long it lasts."""
        self._show(resumed_from)
        self._starting = _Starting(self.refresh, phase)

    def _show(self, resumed_from: int | None) -> None:
        from rich.live import Live

        self._frame.version, self._frame.phase = resumed_from or 0, _STARTING
        self._phase_since_s = self._drawn_s = self._clock()
        self._live = Live(_render(self._frame), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def on_start(self, info: RunInfo) -> None:
        self._end_start()
        if self._live is None:
            self._show(info.resumed_from)

    def _end_start(self) -> None:
        if self._starting is not None:
            self._starting.end()
            self._starting = None

    def close(self) -> None:
        self._end_start()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_round(self, info: RoundInfo) -> None:
        """Take the round's numbers and draw them, when the last drawing is long enough ago."""
        self._frame.version, self._frame.bottleneck = info.version, info.bottleneck
        self._frame.metrics.update(info.metrics)
        self._has_new_round = True
        if self._clock() >= self._next_s:
            self._draw()

    def refresh(self, phase: Callable[[], str]) -> None:
        """Draw the phase when it is another one or lasts, and the last drawing is long enough ago."""
        now_s = self._clock()
        if self._live is None or now_s < max(self._next_s, self._next_phase_s):
            return
        self._next_phase_s, self._phase = now_s + _REFRESH_S, phase
        if self._is_new_phase(now_s) or (self._frame.phase and now_s >= self._drawn_s + 1.0):
            self._draw(looks=False)

    def _is_new_phase(self, now_s: float) -> bool:
        before, self._frame.phase = self._frame.phase, self._phase()
        if not _is_same_phase(self._frame.phase, before):
            self._phase_since_s = now_s
        self._frame.phase_s = now_s - self._phase_since_s
        return self._frame.phase != before

    def on_eval(self, info: EvalInfo) -> None:
        self._frame.eval_version = info.version
        self._frame.eval_metrics = dict(info.metrics)

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        self._frame.checkpoint = info.version

    def on_collector_lost(self, info: CollectorLostInfo) -> None:
        self._above(f"collector {info.collector} lost: {info.reason} (restart {info.restarts})")

    def on_notice(self, text: str) -> None:
        self._above(text)

    def on_finish(self, info: FinishInfo) -> None:
        """Draw the last state, close the display and print how the run ended."""
        self._frame.version = info.version
        self._frame.metrics.update(info.metrics)
        if self._live is not None:
            self._has_new_round, self._phase = True, str
            self._draw()
            self.close()
        self._console.print(
            _ending(info), style="red" if info.error else "green", markup=False, highlight=False
        )

    def _draw(self, looks: bool = True) -> None:
        if self._live is None:
            return
        if self._has_new_round:
            self._has_new_round, curve = False, self._frame.curve
            curve.append(number(self._frame.metrics, "rollout/return_mean_100"))
            if len(curve) > 16 * _CURVE_WIDTH:
                self._frame.curve = curve[1::2]
        began_s = self._clock()
        if looks:
            self._is_new_phase(began_s)
        self._live.update(_render(self._frame), refresh=True)
        self._drawn_s = ended_s = self._clock()
        spent_s = ended_s - began_s
        pause_s = min(spent_s / _MOST_OF_TIME, max(_SILENT_S, spent_s / _MOST_WHEN_SILENT))
        self._next_s = ended_s + max(_REFRESH_S, pause_s)

    def _above(self, text: str, style: str = "yellow") -> None:
        self._console.print(text, style=style, markup=False, highlight=False)


def _render(frame: _Frame) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    rows = _rows(frame)
    table.add_column(style="dim", no_wrap=True, min_width=max(len(label) for label, _ in rows))
    table.add_column(no_wrap=True)
    for label, line in rows:
        table.add_row(label, Text.from_markup(line))
    title = Text.assemble(("offbeat ", "bold cyan"), (_title(frame.summary), "bold"))
    return Group(title, _progress_line(frame), table)


def _progress_line(frame: _Frame) -> Text:
    from rich.text import Text

    rounds = max(1, frame.summary.rounds)
    done = min(1.0, frame.version / rounds)
    filled = int(done * _BAR_WIDTH)
    elapsed = duration(number(frame.metrics, "time/elapsed_s"))
    left = _time_left(frame.summary, frame.metrics)
    return Text.assemble(
        ("━" * filled, "green" if done == 1 else "cyan"),
        ("━" * (_BAR_WIDTH - filled), "bright_black"),
        (f"  {frame.version}/{frame.summary.rounds}", "bold"),
        f"  {done:.0%}",
        (f"  {elapsed} elapsed · {left} left", "dim"),
    )


_VERDICTS: dict[Bottleneck | None, str] = {
    None: "",
    "collect": "[yellow]collecting holds training up[/]",
    "train": "[yellow]training holds collecting up[/]",
    "balanced": "[green]balanced[/]",
}


_LEARNING = {
    "losses": {"total": "loss", "policy": "policy_loss", "value": "value_loss"},
    "policy": {"entropy": "entropy", "KL": "approx_kl", "KL to behaviour": "behaviour_kl", "ESS": "ess"},
}


def _rows(frame: _Frame) -> list[tuple[str, str]]:
    """Labels and lines, the lines with rich's markup."""
    from rich.markup import escape

    metrics = frame.metrics
    round_s = number(metrics, "time/round_s")
    rounds_per_s = plain(1 / round_s if round_s > 0 else math.nan)
    verdict = _VERDICTS[frame.bottleneck]
    learning = {label: _known(metrics, names) for label, names in _LEARNING.items()}
    saved = "" if frame.checkpoint is None else f" · saved at {frame.checkpoint}"
    restarts = "yellow" if number(metrics, "system/worker_restarts") > 0 else "default"
    replayed = " · replayed {pace/avg_replayed_age:1} mean · {pace/max_replayed_age:0} max"
    bound = "at most k = {} rounds ahead" if REPLAY_METRIC in metrics else "bound k = {}"
    lines = {
        "return": "[bold green]{rollout/return_mean_100:1}[/] last 100 · {rollout/return_mean:1} this round",
        "speed": f"[bold]{{learn/samples_per_s:k}}[/] steps/s · {rounds_per_s} rounds/s"
        " · {rollout/total_generated_samples:k} steps so far",
        **{label: line for label, line in learning.items() if line},
        "staleness": "[bold]{pace/avg_sample_age:1}[/] mean · {pace/max_sample_age:0} max"
        f"{replayed if _REPLAYED_AGE in metrics else ''} · {bound.format('{pace/off_policy_degree:0}')}",
        "idle": f"collect {{pace/collect_idle_ratio:%}} · train {{pace/train_idle_ratio:%}}  {verdict}",
        "time": "round {time/round_s:3} s · collect {time/collect_s:3} · save environments {time/state_s:3}"
        " · train {time/train_s:3}",
        "workers": f"{{system/workers_alive:0}}/{frame.summary.num_workers} alive"
        f" · [{restarts}]{{system/worker_restarts:0}} restarts[/] · {{system/rss_bytes:B}}{saved}",
    }
    filled = {label: fill(line, metrics) for label, line in lines.items()}
    lasts = f" · {duration(frame.phase_s)}" if frame.phase and frame.phase_s >= 1 else ""
    filled["phase"] = f"{escape(frame.phase) or '–'}{lasts}"  # reports of the user's own code are in it
    filled["return"] += f"  [green]{sparkline(frame.curve, _CURVE_WIDTH)}[/]"
    if frame.eval_version is not None:
        filled["evaluation"] = _evaluation(frame)
    if frame.summary.directory is not None:
        filled["writes to"] = escape(str(frame.summary.directory))
    return list(filled.items())


def _known(metrics: Mapping[str, float], names: Mapping[str, str]) -> str:
    """Those of the learner's metrics that it reports, by label."""
    values = ((label, number(metrics, f"learn/{name}")) for label, name in names.items())
    return " · ".join(f"{label} {value:.3g}" for label, value in values if math.isfinite(value))


def _evaluation(frame: _Frame) -> str:
    mean, space, rest = evaluation(frame.eval_metrics).partition(" ")
    return f"[bold]{mean}[/]{space}{rest}, of version {frame.eval_version}"


def _preview_frame() -> _Frame:
    metrics: dict[str, float] = {
        "rollout/return_mean": 231.4,
        "rollout/return_mean_100": 228.9,
        "learn/samples_per_s": 48_200.0,
        "rollout/total_generated_samples": 1_687_552,
        "pace/off_policy_degree": 1,
        "pace/avg_sample_age": 0.9,
        "pace/max_sample_age": 1,
        "pace/collect_idle_ratio": 0.04,
        "pace/train_idle_ratio": 0.31,
        "system/workers_alive": 4,
        "system/worker_restarts": 0,
        "system/rss_bytes": 6.4e8,
        "learn/loss": 0.0127,
        "learn/entropy": 0.541,
        "learn/approx_kl": 0.0043,
        "learn/ess": 0.972,
        "time/round_s": 0.085,
        "time/collect_s": 0.081,
        "time/state_s": 0.001,
        "time/train_s": 0.059,
        "time/elapsed_s": 35.0,
        "time/eta_s": 50.0,
    }
    curve = [20 + 209 / (1 + math.exp(-(i - 11) / 3)) for i in range(_CURVE_WIDTH)]
    summary = RunSummary("cartpole", "ppo", "CartPole-v1", "processes", 4, 1000, 1, Path("runs/cartpole"))
    phase = "training round 412"
    judged = {"eval/return_mean": 487.5, "eval/return_std": 31.2, "eval/episodes": 10.0}
    return _Frame(summary, 412, phase, 0.0, metrics, "collect", 400, judged, 400, curve)
