from pathlib import Path

import pytest

from offbeat.errors import OffbeatError
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
)
from offbeat.observe.callbacks import added_metrics, call_all, finish_all

SUMMARY = RunSummary("demo", "ppo", "CartPole-v1", "inline", 2, 10, 0)


class Recorder(Callback):
    def __init__(self, extra: dict[str, float] | None = None) -> None:
        self.seen: list[object] = []
        self.extra = extra

    def on_start(self, info: RunInfo) -> None:
        self.seen.append(info)

    def on_round(self, info: RoundInfo) -> dict[str, float] | None:
        self.seen.append(info)
        return self.extra

    def on_eval(self, info: EvalInfo) -> None:
        self.seen.append(info)

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        self.seen.append(info)

    def on_collector_lost(self, info: CollectorLostInfo) -> None:
        self.seen.append(info)

    def on_notice(self, text: str) -> None:
        self.seen.append(text)

    def on_finish(self, info: FinishInfo) -> None:
        self.seen.append(info)


class Faulty(Callback):
    def on_round(self, info: RoundInfo) -> None:
        raise ZeroDivisionError("mine")

    def on_finish(self, info: FinishInfo) -> None:
        raise KeyError("also mine")


def happenings() -> list[tuple[str, object]]:
    return [
        ("on_start", RunInfo(SUMMARY, RunControl(print, print, print))),
        ("on_round", RoundInfo(1, {"a/b": 1.0})),
        ("on_eval", EvalInfo(1, {"eval/return_mean": 2.0})),
        ("on_checkpoint", CheckpointInfo(1, Path("x"), 0.1)),
        ("on_collector_lost", CollectorLostInfo(0, "killed", 1)),
        ("on_notice", "hello"),
        ("on_finish", FinishInfo(1, "done", 1.0)),
    ]


def test_every_happening_reaches_every_callback() -> None:
    first, second = Recorder(), Recorder()
    for hook, info in happenings():
        call_all([first, Callback(), second], hook, info)
    expected = [info for _, info in happenings()]
    assert first.seen == expected
    assert second.seen == expected


def test_added_metrics_are_gathered() -> None:
    callbacks = [Recorder({"my/a": 1}), Recorder(), Recorder({"my/b": 2.5})]
    assert added_metrics(callbacks, RoundInfo(1, {})) == {"my/a": 1.0, "my/b": 2.5}


@pytest.mark.parametrize(
    "callbacks", [[Recorder({"pace/lag": 0.0})], [Recorder({"x": 1}), Recorder({"x": 2})]]
)
def test_added_metrics_cannot_take_a_name_that_is_taken(callbacks: list[Callback]) -> None:
    with pytest.raises(OffbeatError, match="names of your own"):
        added_metrics(callbacks, RoundInfo(1, {"pace/lag": 1.0}))


def test_what_a_callback_raises_goes_up_with_its_own_type_and_its_owner() -> None:
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        added_metrics([Recorder(), Faulty()], RoundInfo(1, {}))
    assert any("Faulty.on_round" in note for note in caught.value.__notes__)


def test_at_the_end_all_are_told_and_the_first_error_goes_up() -> None:
    last = Recorder()
    with pytest.raises(KeyError, match="also mine"):
        finish_all([Faulty(), last], FinishInfo(1, "done", 1.0))
    assert len(last.seen) == 1
