"""The fingerprint of a machine: where it is the same, floats are."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "numpy", "numba", "gymnasium")


def fingerprint() -> dict[str, str]:
    """Everything that decides how floats are rounded: CPU flags, packages, threads."""
    versions = {name: _version(name) for name in _PACKAGES}
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return {"cpu": _cpu(), "python": platform.python_version(), **versions, "threads": threads}


def _cpu() -> str:
    """Architecture and a hash of what the CPU can do; libraries choose their kernels by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    words = " ".join(sorted(flags.partition(":")[2].split())) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(words.encode()).hexdigest()[:12]}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
