"""Whether kernels are compiled is decided in one place, without importing numba."""

import subprocess
import sys

import pytest

from offbeat.ops import compiled

CODE = """
import sys
{before}
from offbeat.ops.compiled import numba_is_wanted
wanted, is_loaded = numba_is_wanted(), sys.modules.get("numba") is not None
from offbeat.ops.jit import IS_COMPILED, jit
from offbeat.ops.compiled import uses_numba
def one(): return 1
print(wanted, is_loaded, IS_COMPILED, uses_numba(), jit(one) is one)
"""
BROKEN = """
import importlib.abc

class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numba":
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise ImportError("numba needs another numpy")

sys.meta_path.insert(0, Broken())
"""


def decisions(before=""):
    code = CODE.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(("value", "wanted"), [("0", False), ("1", True), (None, True)])
def test_the_environment_decides_where_numba_is_installed(monkeypatch, value, wanted):
    monkeypatch.setattr(compiled, "_is_installed", lambda: True)
    monkeypatch.delenv("OFFBEAT_NUMBA", raising=False)
    if value is not None:
        monkeypatch.setenv("OFFBEAT_NUMBA", value)
    assert compiled.numba_is_wanted() is wanted
    monkeypatch.setattr(compiled, "_is_installed", lambda: False)
    assert compiled.numba_is_wanted() is False


def test_asking_does_not_import_numba(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setenv("OFFBEAT_NUMBA", "1")
    assert decisions() == ["True", "False", "True", "True", "False"]


def test_without_numba_nothing_is_compiled():
    assert decisions("sys.modules['numba'] = None") == ["False", "False", "False", "False", "True"]


def test_a_numba_that_cannot_be_imported_is_none(monkeypatch):
    monkeypatch.setenv("OFFBEAT_NUMBA", "1")
    assert decisions(BROKEN) == ["True", "False", "False", "False", "True"]


REPORTED = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from offbeat.progress import progress_to
from kernels import outer
seen = []
with progress_to(seen.append):
    outer(3)
    outer(4)
print(seen)
"""
KERNELS = """
from offbeat.ops.jit import jit

@jit
def inner(number):
    return number + 1

@jit
def outer(number):
    return inner(number) + 1
"""


def test_compiling_is_reported_once_and_not_when_the_result_is_on_disk(tmp_path, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setenv("OFFBEAT_NUMBA", "1")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "kernels.py").write_text(KERNELS)
    command = [sys.executable, "-c", REPORTED, str(tmp_path)]
    said = [subprocess.run(command, capture_output=True, text=True, timeout=100).stdout for _ in range(2)]
    assert said == ["['compiling kernels, once', '']\n", "[]\n"]
