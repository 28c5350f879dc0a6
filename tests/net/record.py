"""Write the kept files: ``python -m tests.net.record [--ref REF | --runs | NAME ...]``."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
import tempfile
from pathlib import Path

import offbeat
from tests.net import keeping
from tests.net.comparing import differences
from tests.net.subjects import missing_package, subjects


def main() -> None:
    """Record what is asked for; everything twice, to be sure that it can be compared at all."""
    parser = argparse.ArgumentParser(prog="python -m tests.net.record", description=__doc__)
    parser.add_argument("names", nargs="*", help="recipes and incidents; all by default")
    parser.add_argument("--out", type=Path, default=keeping.KEPT, help="the folder to write to")
    parser.add_argument("--once", action="store_true", help="do not record twice")
    parser.add_argument("--ref", help="make a reference of another commit, for this machine only")
    parser.add_argument("--runs", action="store_true", help="make the kept run directories")
    parser.add_argument("--source", type=Path, help="the folder that offbeat has to be imported from")
    chosen = parser.parse_args()
    if chosen.source is not None and not Path(offbeat.__file__).is_relative_to(chosen.source):
        sys.exit(f"offbeat comes from {offbeat.__file__}, not from {chosen.source}")
    if chosen.ref is not None:
        keeping.make_reference(chosen.ref)
    elif chosen.runs:
        from tests.net.kept_runs import make_all

        make_all()
    else:
        record(chosen.names or list(subjects()), chosen.out, twice=not chosen.once)


def record(names: list[str], out: Path, twice: bool) -> None:
    """Record subjects into a folder."""
    for name in names:
        package = missing_package(name)
        if package is not None:
            print(f"{name}: left out, {package} is not installed")
            continue
        with tempfile.TemporaryDirectory() as directory:
            first = subjects()[name](Path(directory) / "first" / "run")
            if twice:
                second = subjects()[name](Path(directory) / "second" / "run")
                found = differences(first, second) + differences(second, first)
                if found:
                    sys.exit("\n".join([f"{name} differs between two recordings:", *found]))
        keeping.write(out, name, first)
        print(f"{name}: recorded", flush=True)


if __name__ == "__main__":
    main()
