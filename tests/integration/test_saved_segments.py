"""Segments of functions in checkpoints: any tree of plain values comes back, the rest is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat import Callback, PerWorker, Pipeline
from offbeat.checkpoint import CheckpointManager
from offbeat.config.models import CheckpointConfig
from offbeat.config.settings import Settings
from offbeat.errors import ConfigError
from offbeat.observe.callbacks import RoundInfo
from offbeat.observe.events import read_events


@dataclass
class Note:
    """What no checkpoint can hold."""

    text: str = "x"


def tree(ticket: Any, weights: Any) -> Any:
    return {
        "text": f"ticket {ticket.number}",
        "ids": [(ticket.number, 0.5), None, b"\x00"],
        "obs": np.full(3, ticket.number, np.float32),
        "nested": {"reward": np.float64(1.5), 7: True},
    }


class Remembers:
    """A learner that keeps the texts and sums of what it was given."""

    def __init__(self, context: Any = None) -> None:
        self.seen: list[Any] = []

    def train(self, batch: Any) -> dict[str, float]:
        for segment in batch.segments:
            data = segment.data
            (number, half), none, raw = data["ids"]
            assert (half, none, raw, data["nested"]) == (0.5, None, b"\x00", {"reward": 1.5, 7: True})
            assert type(data["ids"][0]) is tuple and data["obs"].tolist() == [number] * 3
            self.seen.append(data["text"])
        return {}

    def weights(self) -> Any:
        return {"w": np.zeros(2)}

    def state_dict(self) -> Any:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


class Stateless:
    def train(self, batch: Any) -> dict[str, float]:
        return {}

    def weights(self) -> Any:
        return {"w": np.zeros(2)}


def pipeline(
    kind: str, run_dir: Path | None, collect: Any = tree, train: Any = Remembers, **more: Any
) -> Any:
    return Pipeline(
        collect=collect,
        train=PerWorker(lambda context: train()),
        runtime=kind,  # type: ignore[arg-type]
        off_policy_degree=3,
        num_workers=1,
        segments_per_round=2,
        run_dir=run_dir,
        **{"settings": Settings(checkpoint=CheckpointConfig(interval_rounds=1)), **more},
    )


def holds(ticket: Any, weights: Any) -> Any:
    return {"steps": [{"note": Note()}]}


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_waiting_segments_of_any_plain_tree_come_back(kind: str, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_round(self, info: RoundInfo) -> None:
            if info.version == 6:
                stopping.stop()

    stopping = pipeline(kind, tmp_path, callbacks=[Stop()])
    stopping.run(rounds=20)
    saved = CheckpointManager(tmp_path / "checkpoints").load()
    waiting = [segment["data"]["text"] for segment in saved.parts["store"]["segments"]]
    pipeline(kind, tmp_path).resume(rounds=20)
    seen = CheckpointManager(tmp_path / "checkpoints").load().parts["learner"]["seen"]
    assert sorted(seen) == sorted(f"ticket {number}" for number in range(40))
    assert kind != "inline" or waiting, "some were waiting"


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_segment_that_no_checkpoint_can_hold_is_refused_at_its_arrival(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline(kind, tmp_path / "run", holds).run(rounds=3)
    text = str(caught.value)
    assert "segment.data of collector_0['steps'][0]['note'] is a " in text and ".Note, which" in text
    assert "return arrays and plain values, or train without checkpoints: checkpoint.enabled=false" in text
    assert not [one for one in read_events(tmp_path / "run" / "events.jsonl") if one["kind"] == "round"]


@pytest.mark.parametrize("why", ["no directory", "no checkpoints", "no state"])
def test_functions_of_runs_that_save_nothing_return_what_they_like(why: str, tmp_path: Path) -> None:
    off = Settings(checkpoint=CheckpointConfig(enabled=False))
    more = {"settings": off} if why == "no checkpoints" else {}
    run_dir = None if why == "no directory" else tmp_path / "run"
    assert pipeline("threads", run_dir, holds, Stateless, **more).run(rounds=3).version == 3
