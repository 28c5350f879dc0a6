"""Files with the settings that a run had until a version, when it is resumed or goes back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.pacing.events import Started
from offbeat.run import directory as directories
from offbeat.run.directory import change_config
from offbeat.run.start import PreparedRun, _own_handlers, load


def texts(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.glob("config-until-*"))}


@pytest.fixture
def resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Change the settings of a run whose newest good checkpoint has this version."""

    def change(version: int) -> dict[str, str]:
        manager = SimpleNamespace(versions=lambda: [version], load=lambda: SimpleNamespace(version=version))
        monkeypatch.setattr(directories, "CheckpointManager", lambda path: manager)
        change_config(tmp_path, load("cartpole-ppo"), ["learner.timeout_s=5.0"])
        return texts(tmp_path)

    (tmp_path / "config-until-00000010.yaml").write_text("first")
    (tmp_path / "config-until-00000020.yaml").write_text("second")
    (tmp_path / "config-until-00000030.yaml").write_text("third")
    (tmp_path / "config.yaml").write_text("newest")
    return change


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (35, {10: "first", 20: "second", 30: "third", 35: "newest"}),
        (30, {10: "first", 20: "second", 30: "third"}),
        (15, {10: "first", 15: "second"}),
        (10, {10: "first"}),
        (5, {5: "first"}),
        (0, {}),
    ],
)
def test_settings_of_rounds_that_stay_trained_are_kept(
    version: int, expected: dict[int, str], resume: Any
) -> None:
    assert resume(version) == {f"config-until-{end:08d}.yaml": text for end, text in expected.items()}


@pytest.mark.parametrize(("version", "expected"), [(15, {10: "first", 15: "second"}), (10, {10: "first"})])
def test_a_run_that_goes_back_keeps_them_too(
    version: int, expected: dict[int, str], resume: Any, tmp_path: Path
) -> None:
    driver: Any = SimpleNamespace(meter=None)
    prepared = PreparedRun(load("cartpole-ppo"), tmp_path, "run", resumed=True)
    started = _own_handlers(prepared, "", print, driver)[Started]
    before = texts(tmp_path)
    started(Started(version, resumed=False), 0.0)
    assert texts(tmp_path) == before
    started(Started(version, resumed=True), 0.0)
    assert texts(tmp_path) == {f"config-until-{end:08d}.yaml": text for end, text in expected.items()}
