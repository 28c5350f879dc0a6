"""What `make install` shows while it waits, and how `make test` divides the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import group_of

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
sleep 1
exit {code}
"""

pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or sys.platform == "win32", reason="needs make and a shell"
)


def install(venv: Path, code: int) -> subprocess.CompletedProcess[str]:
    """Install with a Python that takes a second for everything and installs nothing."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(PYTHON.format(code=code))
    (venv / "bin" / "python").chmod(0o755)
    command = ["make", "--no-print-directory", "install", f"VENV={venv}", "EXTRAS=ray", "DOTS_EVERY_S=0.1"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        command, cwd=ROOT, env=outside, capture_output=True, text=True, timeout=60, check=False
    )


def test_installing_shows_its_steps_and_that_they_go_on(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    done = install(venv, 0)
    assert (done.returncode, done.stderr) == (0, "")
    environment, torch, rest = done.stdout.splitlines()
    assert environment == f"1 of 3: a virtual environment in {venv} "
    assert re.fullmatch(r"2 of 3: torch \.+", torch)
    assert re.fullmatch(r"3 of 3: offbeat and ray \.+", rest)
    assert (venv / ".installed").exists()


def test_an_installation_that_fails_is_not_taken_for_one(tmp_path: Path) -> None:
    done = install(tmp_path / "venv", 7)
    assert done.returncode == 2 and "Error 7" in done.stderr
    assert "3 of 3" not in done.stdout and not (tmp_path / "venv" / ".installed").exists()


@pytest.mark.parametrize("which", range(8))
def test_tests_of_a_file_run_in_one_process(which: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    worker, base = os.environ.get("PYTEST_XDIST_WORKER", ""), tmp_path_factory.getbasetemp()
    first = (base.parent if worker else base) / "worker_of_this_file"
    if not first.exists():
        first.write_text(worker)
    assert first.read_text() == worker


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/chaos/test_ray.py::test_a", "ray"),
        ("tests/integration/test_ray_wide.py::test_a[ray]", "ray"),
        ("tests/integration/test_members.py::test_a[ray]", "ray"),
        ("tests/integration/test_muzero.py::test_ray_reaches_the_same_weights", "ray"),
        ("tests/net/test_net.py::test_run_on_ray_is_the_same[cartpole-ppo]", "ray"),
        ("tests/net/test_net.py::test_a[ppo-per-ray]", "tests/net/test_net.py::test_a[ppo-per-ray]"),
        ("tests/integration/test_docs.py::test_a[ray.md]", "tests/integration/test_docs.py"),
        ("tests/integration/test_runs.py::test_arrays[x]", "tests/integration/test_runs.py"),
        ("tests/unit/test_config.py::test_ray", "tests/unit/test_config.py"),
    ],
)
def test_tests_of_a_file_stay_together_and_so_do_those_of_ray(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group
