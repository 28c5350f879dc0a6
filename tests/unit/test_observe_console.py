import io
import itertools
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from offbeat.observe import (
    Callback,
    CheckpointInfo,
    CollectorLostInfo,
    EvalInfo,
    FinishInfo,
    RoundInfo,
    RunControl,
    RunInfo,
    RunSummary,
    make_console,
    preview,
)
from offbeat.observe.console import Display, PlainConsole, RichConsole
from offbeat.observe.text import compact, duration, fill, plain, share, size, sparkline

SUMMARY = RunSummary("cartpole", "ppo", "CartPole-v1", "processes", 4, 100, 1, Path("runs/x"))
METRICS = {
    "rollout/return_mean": 231.44,
    "rollout/return_mean_100": 228.9,
    "learn/samples_per_s": 48_200.0,
    "pace/off_policy_degree": 1,
    "pace/avg_sample_age": 0.9,
    "pace/max_sample_age": 1,
    "pace/collect_idle_ratio": 0.04,
    "pace/train_idle_ratio": 0.31,
    "time/eta_s": 46.0,
    "system/workers_alive": 3,
    "system/worker_restarts": 2,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tell_a_run(console: Callback, clock: Clock, rounds: int = 3) -> None:
    console.on_start(RunInfo(SUMMARY, RunControl(print, print, print), resumed_from=7))
    for version in range(8, 8 + rounds):
        clock.now_s += 1.0
        console.on_round(RoundInfo(version, METRICS, "collect"))
    console.on_eval(EvalInfo(8, {"eval/return_mean": 500.0}))
    console.on_checkpoint(CheckpointInfo(9, Path("x"), 0.25))
    console.on_collector_lost(CollectorLostInfo(1, "killed [by hand]", 2))
    console.on_notice("mind the [gap]")
    clock.now_s += 1.0
    console.on_round(RoundInfo(8 + rounds, METRICS, "collect"))
    console.on_finish(FinishInfo(8 + rounds, "all rounds trained", 61.0, METRICS))


def test_ages_of_replayed_samples_are_shown_beside_those_of_new_ones() -> None:
    replayed = {"learn/replay_size": 9.0, "pace/avg_replayed_age": 7.25, "pace/max_replayed_age": 31.0}
    for kind, words in (
        ("plain", "age 0.9/1 (k 1) replayed 7.2/31  "),
        ("rich", "replayed 7.2 mean · 31 max"),
    ):
        stream = Terminal() if kind == "rich" else io.StringIO()
        console = make_console(kind, SUMMARY, 0.0, stream, Clock())  # type: ignore[arg-type]
        console.on_start(RunInfo(SUMMARY, RunControl(print, print, print)))
        console.on_round(RoundInfo(1, METRICS))
        assert "replayed" not in stream.getvalue()
        console.on_round(RoundInfo(2, {**METRICS, **replayed}))
        console.on_finish(FinishInfo(2, "done", 1.0, {**METRICS, **replayed}))
        assert words in stream.getvalue()


@pytest.mark.parametrize(
    ("kind", "stream", "expected"),
    [
        ("auto", Terminal(), RichConsole),
        ("auto", io.StringIO(), PlainConsole),
        ("plain", Terminal(), PlainConsole),
        ("rich", io.StringIO(), RichConsole),
        ("none", Terminal(), Display),
    ],
)
def test_which_console_is_made(
    kind: str, stream: io.StringIO, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert type(make_console(kind, SUMMARY, stream=stream)) is expected


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_console("auto", SUMMARY, stream=Terminal())) is PlainConsole


def test_plain_lines_come_at_intervals_and_at_what_is_worth_telling() -> None:
    stream, clock = io.StringIO(), Clock()
    tell_a_run(make_console("plain", SUMMARY, log_interval_s=2.0, stream=stream, clock=clock), clock)
    line = (
        "return 231.4 (last 100: 228.9)  48.2k steps/s  age 0.9/1 (k 1)  idle collect 4% train 31%  left 0:46"
    )
    assert stream.getvalue().splitlines() == [
        "cartpole · ppo · CartPole-v1 · processes × 4 · k = 1 from version 7",
        "writes to runs/x",
        f"[  8/100]  {line}",
        f"[ 10/100]  {line}",
        "evaluation of version 8: return 500.0",
        "checkpoint of version 9 (0.25 s)",
        "collector 1 lost: killed [by hand] (restart 2)",
        "mind the [gap]",
        f"[ 11/100]  {line}",
        "finished at version 11 after 1:01: all rounds trained",
    ]


@pytest.mark.parametrize(("kind", "left"), [("plain", "left at most 0:46"), ("rich", "at most 0:46 left")])
def test_what_is_left_is_a_bound_where_a_goal_may_end_the_run(
    kind: str, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    stream, summary = Terminal(), replace(SUMMARY, stop_return=475.0)
    console = make_console(kind, summary, stream=stream)
    console.on_start(RunInfo(summary, RunControl(print, print, print)))
    console.on_round(RoundInfo(8, METRICS))
    assert left in stream.getvalue()
    console.on_finish(FinishInfo(8, "good enough", 1.0, {**METRICS, "time/eta_s": 0.0}))
    assert "0:00" in stream.getvalue()
    assert "at most 0:00" not in stream.getvalue()


def test_a_failed_run_says_so() -> None:
    stream = io.StringIO()
    console = make_console("plain", SUMMARY, stream=stream)
    console.on_finish(FinishInfo(5, "StallError: nothing moved", 3.0, error=RuntimeError("x")))
    assert stream.getvalue() == "failed at version 5 after 0:03: StallError: nothing moved\n"


def test_the_live_display_shows_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    stream, clock = Terminal(), Clock()
    tell_a_run(make_console("rich", SUMMARY, stream=stream, clock=clock), clock)
    shown = stream.getvalue()
    for text in (
        "cartpole · ppo · CartPole-v1 · processes × 4 · k = 1",
        *("11/100", "11%", "0:46 left", "228.9", "231.4", "500.0", "of version 8", "48.2k", "bound k = 1"),
        *("collect 4%", "train 31%", "collecting holds training up", "3/4 alive", "2 restarts", "saved at 9"),
        *("killed [by hand]", "mind the [gap]", "finished at version 11"),
    ):
        assert text in shown


@pytest.mark.parametrize("report", ["[episode 3/10]", "[/] epoch 1", "[/x]", "half [ of"])
def test_reports_of_progress_are_shown_as_they_are(report: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    stream, clock = Terminal(), Clock()
    console = make_console("rich", SUMMARY, stream=stream, clock=clock)
    console.on_start(RunInfo(SUMMARY, RunControl(print, print, print), resumed_from=None))
    clock.now_s += 1.0
    console.refresh(lambda: f"training round 1: {report}")
    console.on_finish(FinishInfo(1, "done", 1.0, {}))
    assert f"training round 1: {report}" in stream.getvalue()


def test_the_live_display_is_drawn_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal(), Clock()
    console = make_console("rich", SUMMARY, stream=stream, clock=clock)
    console.on_start(RunInfo(SUMMARY, RunControl(print, print, print)))
    drawn = []
    for version in range(1, 41):
        before = len(stream.getvalue())
        console.on_round(RoundInfo(version, METRICS, "collect"))
        drawn.append(len(stream.getvalue()) > before)
        clock.now_s += 0.0625
    console.on_finish(FinishInfo(40, "done", 1.0))
    assert drawn == [True, False, False, False] * 10


def test_a_new_phase_is_drawn_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal(), Clock()
    console = make_console("rich", SUMMARY, stream=stream, clock=clock)
    asked: list[float] = []

    def phase() -> str:
        asked.append(clock.now_s)
        return f"evaluating version 5: episode {int(clock.now_s * 1000)}"

    console.refresh(phase)
    assert asked == [], "before the display is open, nothing is drawn"
    console.on_start(RunInfo(SUMMARY, RunControl(print, print, print)))
    drawn = []
    for _ in range(40):
        clock.now_s += 0.0625
        before = len(stream.getvalue())
        console.refresh(phase)
        drawn.append(len(stream.getvalue()) > before)
    assert drawn == [True, False, False, False] * 10
    assert len(asked) == 10, "the phase costs something only when it is due"
    assert "evaluating version 5: episode 2312" in stream.getvalue()


def test_a_phase_that_stays_is_drawn_each_second_and_rounds_are_drawn_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = Terminal(), Clock()
    console = make_console("rich", SUMMARY, stream=stream, clock=clock)
    assert isinstance(console, RichConsole)
    console.on_start(RunInfo(SUMMARY, RunControl(print, print, print)))
    clock.now_s += 1.0
    console.refresh(lambda: "saving")
    before = stream.getvalue()
    assert "saving" in before
    for _ in range(3):  # no round: nothing to draw
        clock.now_s += 0.25
        console.refresh(lambda: "saving")
    assert stream.getvalue() == before
    for _ in range(8):
        clock.now_s += 0.25
        console.refresh(lambda: "saving")
    assert "saving · 0:02" in stream.getvalue()
    num_drawn = 0
    for version in range(1, 9):  # each round comes just after the phase was looked at
        clock.now_s += 0.25
        console.refresh(lambda: "saving")
        clock.now_s += 0.03125
        before = stream.getvalue()
        console.on_round(RoundInfo(version, METRICS, "collect"))
        num_drawn += len(stream.getvalue()) > len(before)
    assert num_drawn >= 7, "the first may come just after the phase was drawn"
    for version in range(9, 17):  # a phase that is new each time: all rounds come into the curve
        clock.now_s += 0.25
        console.refresh(lambda version=version: f"training round {version}")  # type: ignore[misc]
        console.on_round(RoundInfo(version, METRICS, "collect"))
    console.on_finish(FinishInfo(16, "done", 1.0))
    assert len(console._frame.curve) == num_drawn + 8
    assert console._frame.phase == "", "a run that is over is in no phase"


def test_plain_lines_tell_the_phase_when_no_round_ends_and_less_often_the_longer_it_lasts() -> None:
    stream, clock = io.StringIO(), Clock()
    console = make_console("plain", SUMMARY, log_interval_s=2.0, stream=stream, clock=clock)
    phase = "evaluating version 5: episode 3 of 10"
    told = []
    for _ in range(1600):
        clock.now_s += 0.25
        before = len(stream.getvalue())
        console.refresh(lambda: phase)
        if len(stream.getvalue()) > before:
            told.append(clock.now_s)
    assert told[:20] == [2.5 * number for number in range(1, 21)], "no silence of 3 s for a minute"
    pauses = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert pauses == sorted(pauses)
    assert 15.0 < pauses[-1] < 25.0, "a twentieth of 400 s"
    assert stream.getvalue().startswith(f"{phase}, 0:02 so far\n{phase}, 0:05 so far\n")
    console.on_notice("something else")
    clock.now_s += 2.0
    console.refresh(lambda: "saving")
    assert stream.getvalue().endswith("something else\n")
    clock.now_s += 0.5
    console.refresh(lambda: "saving")
    assert stream.getvalue().endswith("saving, 0:02 so far\n"), "another phase begins to count anew"


def test_plain_lines_ask_for_the_phase_at_most_four_times_a_second() -> None:
    clock = Clock()
    console = make_console("plain", SUMMARY, log_interval_s=2.0, stream=io.StringIO(), clock=clock)
    start_s, asked = clock.now_s, list[float]()

    def phase() -> str:
        asked.append(clock.now_s - start_s)
        return "collecting"

    for _ in range(25_600):
        clock.now_s += 0.0078125
        console.refresh(phase)
    assert len(asked) > 20
    assert min(later - earlier for earlier, later in itertools.pairwise(asked)) >= 0.25


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_a_display_is_there_before_the_run_has_started(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream, clock = Terminal(), Clock()
    console = make_console(kind, SUMMARY, stream=stream, clock=clock)
    console.open(resumed_from=7)
    for text in ("cartpole · ppo · CartPole-v1", "runs/x", "7"):
        assert text in stream.getvalue()
    before = len(stream.getvalue())
    for _ in range(1000):  # it refreshes itself
        clock.now_s += 2.5
        time.sleep(0.01)
        if "starting" in stream.getvalue()[before:]:
            break
    else:
        pytest.fail("the display said nothing while the run started")
    console.on_start(RunInfo(SUMMARY, RunControl(print, print, print), resumed_from=7))
    shown = stream.getvalue()
    clock.now_s += 100.0
    time.sleep(0.6)
    assert stream.getvalue() == shown, "nobody refreshes it any more but the driver"
    console.refresh(lambda: "collecting")
    assert "collecting" in stream.getvalue()[len(shown) :]
    console.close()
    console.close()


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_a_start_that_lasts_shows_what_the_learner_reports(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream, clock, steps = Terminal(), Clock(), itertools.count(1)
    console = make_console(kind, SUMMARY, stream=stream, clock=clock)
    console.open(phase=lambda: f"starting: warm-up step {next(steps)}")
    for _ in range(1000):
        clock.now_s += 2.5
        time.sleep(0.01)
        if re.search(r"starting: warm-up step \d+.*[3-9]:\d\d", stream.getvalue()):
            break
    else:
        pytest.fail("the display did not say how far the learner is, and since when the run starts")
    console.close()


def test_a_display_that_never_started_gives_the_terminal_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = make_console("rich", SUMMARY, stream=stream)
    console.open()
    console.close()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l"), "the cursor shows"


def test_the_live_display_shows_what_the_learner_reports_and_where_time_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    console = make_console("rich", replace(SUMMARY, directory=Path("runs/[x]")), stream=stream)
    console.on_start(RunInfo(SUMMARY, RunControl(print, print, print)))
    evaluated = {"eval/return_mean": 487.5, "eval/return_std": 31.24, "eval/episodes": 10.0}
    console.on_eval(EvalInfo(8, {**evaluated, "eval/return_mean_sampled": 236.7}))
    learning = {"learn/loss": 0.01234, "learn/entropy": math.nan, "learn/ess": 0.971, "learn/approx_kl": 4e-5}
    times = {"time/round_s": 0.5, "time/collect_s": 0.25, "time/state_s": 0.125, "time/train_s": 0.375}
    console.on_finish(FinishInfo(8, "done", 1.0, {**METRICS, **learning, **times}))
    for text in (
        "total 0.0123 ",
        "KL 4e-05 · ESS 0.971",
        "round 0.500 s · collect 0.250 · save environments 0.125 · train 0.375",
        "487.5",
        " ± 31.2 over 10 episodes (236.7 with drawn actions), of version 8",
        "runs/[x]",
    ):
        assert text in stream.getvalue()
    assert "entropy" not in stream.getvalue()


def test_a_narrow_terminal_cuts_values_and_not_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    console = make_console("rich", replace(SUMMARY, directory=Path("runs/" + "x" * 100)), stream=stream)
    console.on_start(RunInfo(SUMMARY, RunControl(print, print, print)))
    console.on_finish(FinishInfo(8, "done", 1.0, METRICS))
    for label in ("return", "speed", "staleness", "idle", "workers", "writes to"):
        assert label in stream.getvalue()


def test_a_slow_terminal_gets_fewer_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock = Clock()

    class Slow(Terminal):
        def write(self, text: str) -> int:
            clock.now_s += 1.0
            return super().write(text)

    stream = Slow()
    console = make_console("rich", SUMMARY, stream=stream, clock=clock)
    console.on_start(RunInfo(SUMMARY, RunControl(print, print, print)))
    console.on_round(RoundInfo(1, METRICS))
    before = stream.getvalue()
    clock.now_s += 5.0
    console.on_round(RoundInfo(2, METRICS))
    assert stream.getvalue() == before
    console.on_finish(FinishInfo(2, "done", 1.0))


def test_the_preview_is_a_picture(tmp_path: Path) -> None:
    svg = preview(tmp_path / "preview.svg")
    assert (tmp_path / "preview.svg").read_text(encoding="utf-8") == svg
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "CartPole" in "".join(root.itertext())


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (compact(7.0), "7"),
        (compact(999.0), "999"),
        (compact(999.99), "1.0k"),
        (compact(48_200.0), "48.2k"),
        (compact(-2.5e6), "-2.5M"),
        (compact(3e9), "3.0G"),
        (compact(math.nan), "–"),
        (size(12.0), "12 B"),
        (size(999_600.0), "1 MB"),
        (size(6.4e8), "640 MB"),
        (size(2.5e9), "2.5 GB"),
        (share(0.314), "31%"),
        (share(math.nan), "–"),
        (duration(59.4), "0:59"),
        (duration(59.6), "1:00"),
        (duration(3723.0), "1:02:03"),
        (duration(math.inf), "–"),
        (plain(1.25, 2), "1.25"),
        (sparkline([], 8), ""),
        (sparkline([1.0, math.nan], 8), ""),
        (sparkline([0.0, 1.0, 0.5, math.nan], 8), "▁█▅"),
        (sparkline([2.0, 2.0], 8), "▁▁"),
        (sparkline([float(i) for i in range(100)], 8), "▁▂▃▄▅▆▇█"),
        (fill("{a:1} {c:%} {d:1} {d:k}", {"a": 1, "c": 0.5}), "1.0 50% – –"),
    ],
)
def test_numbers_as_people_read_them(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_name_that_repeats_the_algorithm_is_said_once() -> None:
    stream = io.StringIO()
    summary = RunSummary("ppo", "ppo", "", "inline", 1, 10, -1)
    make_console("plain", summary, stream=stream).on_start(RunInfo(summary, RunControl(print, print, print)))
    assert stream.getvalue() == "ppo · inline × 1 · k = auto\n"


def test_an_evaluation_is_told_with_that_of_drawn_actions() -> None:
    stream = io.StringIO()
    metrics = {"eval/return_mean": -500.0, "eval/return_mean_sampled": -136.7}
    make_console("plain", SUMMARY, stream=stream).on_eval(EvalInfo(3, metrics))
    assert stream.getvalue() == "evaluation of version 3: return -500.0 (-136.7 with drawn actions)\n"
