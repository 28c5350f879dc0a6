"""Run directories of earlier code are shown, evaluated, repeated and resumed, to the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.net.comparing import differences
from tests.net.kept_runs import EXPECTED, KEPT_RUNS, RUNS, copied, look
from tests.net.machine import fingerprint


@pytest.mark.parametrize("name", KEPT_RUNS)
def test_kept_run_can_be_used_as_ever(name: str, tmp_path: Path) -> None:
    kept = json.loads(EXPECTED.read_text())
    before, now = kept[name], look(copied(name, tmp_path))
    if kept["machine"] != fingerprint():
        before, now = anywhere(before), anywhere(now)
    assert differences(before, now) == []


def anywhere(found: dict[str, Any]) -> dict[str, Any]:
    """The part that does not depend on how a machine rounds: all but evaluations, new weights, equality.

    Earlier code wrote no checksums, so the first replay compares only the end and goes through all rounds.
    After new rounds, whose checksums are there, it ends at the first one that differs.
    """
    left_out = ("evaluation", "digest_further", "replay_further")
    part = {name: value for name, value in found.items() if name not in left_out}
    return {**part, "replay": {"rounds": found["replay"]["rounds"]}}


def test_kept_runs_are_small_and_tell_nothing_of_their_machine() -> None:
    for name in KEPT_RUNS:
        files = [path for path in (RUNS / name).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 150_000
        assert not [path for path in files if path.name in ("lock", "run.log")]
        manifest = json.loads((RUNS / name / "manifest.json").read_text())
        assert (manifest["git"], manifest["platform"], manifest["pid"]) == (None, "any", 1)
