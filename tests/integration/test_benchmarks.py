"""The benchmark scripts run and end with one JSON line; what they measure is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT.resolve().parent / "shared" / "data" / "models" / "stories260K"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["pipeline_limit.py"],
        ["data_path.py"],
        ["startup.py"],
        ["cartpole.py", "--peers"],
        ["fuzz_checkpoint.py"],
        ["replay.py", "--peers"],
        ["kill_resume.py"],
        ["checkpoint.py"],
        ["chaos.py"],
        ["colorlines_env.py"],
        ["replay_learner.py"],
        ["hmasd.py"],
        ["search.py", "--no-peer"],
        ["planning.py"],
        ["dial.py"],
        ["connect4.py"],
        ["driver_cost.py"],
        ["wide_environments.py"],
        ["llm_engine.py"],
        ["llm_twin.py"],
        ["llm_async.py"],
        ["llm_faults.py"],
        ["text_priors.py"],
    ],
)
def test_script_ends_with_its_figures(command: list[str]) -> None:
    script, *options = command
    if script == "llm_engine.py" and not MODEL.is_dir():
        pytest.skip(f"needs {MODEL.name} in the shared data beside the checkout")
    full = [sys.executable, str(ROOT / "benchmarks" / script), *options, "--quick", "--json"]
    done = subprocess.run(full, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    assert figures["holds"] is (done.returncode == 0)
