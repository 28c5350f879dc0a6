import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import ConfigError
from offbeat.observe import SinkList, make_sinks, sinks
from offbeat.observe.tensorboard import TensorBoardSink, _Crc32c
from offbeat.observe.wandb import WandbSink

ROUND = {
    "pace/off_policy_degree": 0,
    "rollout/return_mean": math.nan,
    "learn/loss": 0.5,
    "weights/current_param_version": 3,
    "rollout/total_generated_samples": 400,
    "rollout/steps_per_s": 40.0,
    "time/round_s": 2.5,
    "time/collect_s": 2.0,
    "time/train_s": 1.5,
}


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    # TensorBoard turns simple values into tensors as it loads them.
    tags = accumulator.Tags()
    found = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["tensors"]:
        found[tag] = [(e.step, e.tensor_proto.float_val[0]) for e in accumulator.Tensors(tag)]
    return found


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.write(3, ROUND)
    sink.write(4, {**ROUND, "learn/loss": 0.25})
    sink.write(2, {"eval/return_mean": 9.0})
    sink.close()
    sink.close()
    found = read_scalars(tmp_path / "tensorboard")
    assert found["learn/loss"] == [(3, 0.5), (4, 0.25)]
    assert found["eval/return_mean"] == [(2, 9.0)]
    assert "rollout/return_mean" not in found
    assert {tag: found[tag][0] for tag in found if tag.startswith("Sync/")} == {
        "Sync/PolicyVersion": (3, 3.0),
        "Sync/SamplesCollected": (3, 100.0),
        "Sync/CollectionTime": (3, 2.0),
        "Sync/UpdateTime": (3, 1.5),
    }


def test_asynchronous_runs_have_no_sync_family(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(tmp_path)
    sink.write(3, {**ROUND, "pace/off_policy_degree": 1})
    sink.close()
    assert not [tag for tag in read_scalars(tmp_path) if tag.startswith("Sync/")]


def test_after_a_resume_tensorboard_forgets_the_interrupted_attempt(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    times = iter(float(second) for second in range(1_000_000, 2_000_000))
    first = TensorBoardSink(tmp_path, clock=lambda: next(times))
    for version in (1, 2, 3, 4):
        first.write(version, {"learn/loss": float(version)})
    first.close()
    second = TensorBoardSink(tmp_path, resumed_from=2, clock=lambda: next(times))
    second.write(3, {"learn/loss": 30.0})
    second.close()
    assert read_scalars(tmp_path)["learn/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 9, 1023, 1024, 1025, 1027, 3000])
def test_checksums_agree_with_a_loop_over_bits(length: int) -> None:
    data = bytes((i * i + 7 * i) % 251 for i in range(length))
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    assert _Crc32c().checksum(data) == register ^ 0xFFFFFFFF


def test_checksum_of_the_standard_check_string() -> None:
    assert _Crc32c().checksum(b"123456789") == 0xE3069283


def test_tensorboard_is_written_when_installed_and_not_refused(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    opened = make_sinks(tmp_path)
    assert [type(sink) for sink in opened.sinks] == [TensorBoardSink]
    opened.close()
    assert (tmp_path / "tensorboard").is_dir()
    assert make_sinks(tmp_path / "none", tensorboard=False).sinks == ()


def test_a_missing_tensorboard_is_an_error_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    assert make_sinks(tmp_path).sinks == ()
    with pytest.raises(ConfigError, match=r"pip install 'offbeat\[tensorboard\]'"):
        make_sinks(tmp_path, tensorboard=True)


class FakeRun:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.logged: list[dict[str, Any]] = []
        self.defined: list[tuple[str, str]] = []
        self.finished = 0

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


class FakeError(Exception):
    pass


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("wandb")
    module.errors = types.SimpleNamespace(Error=FakeError)
    module.reachable = True
    module.runs = []

    def init(**settings: Any) -> FakeRun:
        if not module.reachable and settings.get("mode") != "offline":
            raise FakeError("no network")
        module.runs.append(FakeRun(settings))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_finite_numbers_keyed_by_version(tmp_path: Path, fake_wandb: Any) -> None:
    sink = WandbSink(tmp_path / "run", "project", config={"seed": 1})
    sink.write(3, {"learn/loss": 0.5, "rollout/return_mean": math.nan})
    sink.close()
    sink.close()
    (run,) = fake_wandb.runs
    assert run.logged == [{"learn/loss": 0.5, "version": 3}]
    assert run.defined == [("*", "version")]
    assert run.finished == 1
    assert (run.settings["name"], run.settings["project"]) == ("run", "project")
    assert run.settings["config"] == {"seed": 1}


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path, fake_wandb: Any) -> None:
    for directory in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        make_sinks(directory, tensorboard=False, use_wandb=True).close()
    ids = [run.settings["id"] for run in fake_wandb.runs]
    assert ids[0] == ids[1] != ids[2]


def test_without_a_network_wandb_goes_on_offline(tmp_path: Path, fake_wandb: Any) -> None:
    fake_wandb.reachable = False
    WandbSink(tmp_path, "project")
    assert fake_wandb.runs[0].settings["mode"] == "offline"


def test_a_missing_wandb_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'offbeat\[wandb\]'"):
        make_sinks(tmp_path, tensorboard=False, use_wandb=True)


def test_a_list_of_sinks_is_a_sink() -> None:
    class Memory:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def write(self, version: int, metrics: object) -> None:
            self.seen.append((version, metrics))

        def close(self) -> None:
            self.seen.append("closed")

    both = [Memory(), Memory()]
    together = SinkList(both)
    together.write(1, {"a": 1.0})
    together.close()
    assert [sink.seen for sink in both] == [[(1, {"a": 1.0}), "closed"]] * 2


class Failing:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def write(self, version: int, metrics: Any) -> None:
        self.calls.append("write")
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.calls.append("close")
        raise OSError(28, "No space left on device")


def test_a_sink_that_the_disk_fails_is_given_up_and_the_others_go_on() -> None:
    told: list[str] = []
    failing, good = Failing(), FakeSink()
    together = SinkList([failing, good], told.append)
    together.write(1, ROUND)
    together.write(2, ROUND)
    together.close()
    assert failing.calls == ["write", "close"]
    assert good.versions == [1, 2]
    (text,) = told
    assert text == "Failing gets no more metrics in this start of the run: [Errno 28] No space left on device"


def test_a_sink_whose_last_bytes_find_no_room_is_told() -> None:
    told: list[str] = []
    SinkList([Failing()], told.append).close()
    assert len(told) == 1


class FakeSink:
    def __init__(self) -> None:
        self.versions: list[int] = []

    def write(self, version: int, metrics: Any) -> None:
        self.versions.append(version)

    def close(self) -> None:
        pass
