"""Runs do what kept files say, or what the commit that wrote them does on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.net import keeping
from tests.net.comparing import differences, unordered
from tests.net.incidents import INCIDENTS
from tests.net.keeping import KEPT, TIMEOUT_S, NoReference, RecordingFailed, reference
from tests.net.recording import Record, record_recipe
from tests.net.small import recipes
from tests.net.subjects import EVALUATES_BESIDE, incident, missing_package, subjects

QUICK = ("cartpole-ppo", "cartpole-ppo-per", "alice-bob-hmasd", "cartpole-muzero", "cartpole-unizero")
"""Recipes that `make test` also runs on processes: one of each kind of algorithm."""
ON_RAY = ("cartpole-ppo", "cartpole-ppo-per")


pytestmark = pytest.mark.timeout(TIMEOUT_S + 300.0)  # the first test may have to record the reference


def on_processes() -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in recipes()]


def expected(name: str) -> tuple[Record, bool]:
    """The record to compare with; skips where a package or the commits to make it from are missing."""
    package = missing_package(name)
    if package is not None:
        pytest.skip(f"needs {package}")
    try:
        return reference(name)
    except NoReference as error:
        pytest.skip(f"this machine is not the one of the kept files, and none can be recorded: {error}")


def check(before: Record, now: Record, exact: bool) -> None:
    found = differences(before, now, exact)
    assert not found, "\n".join(found[:30])


def test_everything_has_its_kept_file() -> None:
    assert sorted(path.stem for path in KEPT.glob("*.json")) == sorted(subjects())


@pytest.mark.parametrize("name", [*recipes(), EVALUATES_BESIDE])
def test_run_is_as_it_was(name: str, tmp_path: Path) -> None:
    before, exact = expected(name)
    check(before, subjects()[name](tmp_path / "run"), exact)


@pytest.mark.parametrize("recipe", on_processes())
def test_run_on_processes_is_the_same(recipe: str, tmp_path: Path) -> None:
    before, exact = expected(recipe)
    check(unordered(before), unordered(record_recipe(recipe, tmp_path / "run", "processes")), exact)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes())
def test_run_in_threads_is_the_same(recipe: str, tmp_path: Path) -> None:
    before, exact = expected(recipe)
    check(unordered(before), unordered(record_recipe(recipe, tmp_path / "run", "threads")), exact)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ON_RAY)
def test_run_on_ray_is_the_same(recipe: str, tmp_path: Path, shared_ray: None) -> None:
    before, exact = expected(recipe)
    check(unordered(before), unordered(record_recipe(recipe, tmp_path / "run", "ray")), exact)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", INCIDENTS)
def test_incident_goes_as_it_went(name: str, tmp_path: Path) -> None:
    before, exact = expected(incident(name))
    check(before, subjects()[incident(name)](tmp_path / "run"), exact)


@pytest.mark.parametrize(
    ("code", "within_s"), [("raise SystemExit('no such kernel')", 60.0), ("while 1: 0", 0.3)]
)
def test_reference_that_cannot_be_recorded_is_an_error_and_not_tried_twice(
    code: str, within_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def record(ref: str, is_asked_for: bool) -> None:
        tried.append(ref)
        keeping._record(tmp_path)

    (tmp_path / "python").write_text(f"#!{sys.executable}\n{code}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(keeping, "CACHE", tmp_path / "net")
    monkeypatch.setattr(keeping, "TIMEOUT_S", within_s)
    monkeypatch.setattr(keeping, "_failures", [])
    monkeypatch.setattr(keeping, "kept_commit", lambda: "HEAD")
    monkeypatch.setattr(keeping, "make_reference", record)
    for _ in range(2):
        with pytest.raises(RecordingFailed, match=r"no such kernel|took more than"):
            keeping.made_reference()
    assert tried == ["HEAD"]


def test_differences_are_found() -> None:
    """The net holds: each thing that may not change is missed when it does."""
    kept: Record = {
        "digest": "a",
        "schedule": ['{"kind":"round","version":0}'],
        "metrics": {"1": {"learn/loss": 1.0, "queue/size": 2}},
        "names": {"on_round": ["learn/loss"]},
        "journal": [{"kind": "start"}],
    }
    more = {
        **kept,
        "schedule": ['{"kind":"round","version":0,"sum":1}'],
        "names": {"on_round": ["a", "learn/loss"]},
    }
    assert differences(kept, more) == []
    for part, value in (
        ("digest", "b"),
        ("schedule", ['{"version":0,"kind":"round"}']),
        ("schedule", ['{"kind":"round", "version":0}']),
        ("schedule", []),
        ("metrics", {"1": {"learn/loss": 1.0 + 1e-9, "queue/size": 2}}),
        ("names", {"on_round": []}),
        ("journal", [{"kind": "start"}, {"kind": "notice"}]),
    ):
        assert differences(kept, {**kept, part: value}), part
    close = {**kept, "digest": "b", "metrics": {"1": {"learn/loss": 1.0 + 1e-4, "queue/size": 2}}}
    assert differences(kept, close, exact=False) == []
    far = {**kept, "metrics": {"1": {"learn/loss": 1.0, "queue/size": 3}}}
    assert differences(kept, far, exact=False)
    assert differences(kept, {**kept, "schedule": ['{"kind":"round","version": 0}']}, exact=False)
