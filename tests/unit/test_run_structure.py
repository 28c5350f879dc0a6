"""What the source of a run keeps to: no clock of its own, one place that waits, no second driver."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import offbeat

SOURCE = Path(offbeat.__file__).parent
RUN = sorted((SOURCE / "run").glob("*.py"))
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time_ns", "process_time"}
CLOCKS |= {"SystemClock", "SYSTEM_CLOCK"}


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(), filename=str(path)))


def clock_uses(path: Path) -> list[str]:
    """Imports of a clock, and names and attributes that are one; it may be the default of a parameter."""
    found, everything = [], list(nodes(path))
    defaults = {
        default
        for node in everything
        if isinstance(node, ast.arguments)
        for default in (*node.defaults, *node.kw_defaults)
    }
    for node in everything:
        match node:
            case _ if node in defaults:
                pass
            case ast.Import(names):
                found += [name.name for name in names if name.name.split(".")[0] in ("time", "datetime")]
            case ast.ImportFrom(module=module) if (module or "").split(".")[0] in ("time", "datetime"):
                found.append(str(module))
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in CLOCKS:
                found.append(name)
            case ast.Attribute(value=ast.Name(id="time"), attr=name):
                found.append(f"time.{name}")
            case _:
                pass
    return found


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_nothing_in_run_reads_a_clock(path: Path) -> None:
    assert clock_uses(path) == []


def test_the_search_for_clocks_finds_them(tmp_path: Path) -> None:
    source = tmp_path / "it.py"
    source.write_text("import time\nfrom time import perf_counter\nnow = perf_counter() + time.time()\n")
    assert clock_uses(source) == ["time", "time", "perf_counter", "time.time"]
    assert clock_uses(SOURCE / "runtime" / "clock.py")


def test_a_clock_may_be_passed_in_but_not_made_or_read(tmp_path: Path) -> None:
    source = tmp_path / "it.py"
    source.write_text("def wait(clock=SYSTEM_CLOCK, *, other=SYSTEM_CLOCK): clock.now_s()\n")
    assert clock_uses(source) == []
    source.write_text("def wait(clock=SystemClock()): SYSTEM_CLOCK.now_s()\n")
    assert sorted(clock_uses(source)) == ["SYSTEM_CLOCK", "SystemClock"]


def is_runtime(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.strip("_") == "runtime"


def test_one_place_waits_for_a_runtime() -> None:
    found = [
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "wait"
        and is_runtime(node.func.value)
    ]
    assert found == ["run/driver.py"]


@pytest.mark.parametrize(
    "name",
    [
        *("session.py", "recording.py", "running.py", "recovery.py", "replaying.py", "lanes.py", "launch.py"),
        *("sync_run.py", "observe/lanes.py"),
    ],
)
def test_the_earlier_driver_is_gone(name: str) -> None:
    assert not (SOURCE / name).exists()


def test_the_loop_that_serves_a_collector_fits_on_a_page() -> None:
    assert len((SOURCE / "runtime" / "serve.py").read_text().splitlines()) <= 220
    assert [path for path in SOURCE.rglob("*.py") if "CollectorRunner" in path.read_text()] == []


def test_only_the_driver_passes_events_on() -> None:
    """Each fact is made once and passes one place."""
    found = {
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit"
    }
    assert found == {"run/driver.py"}
