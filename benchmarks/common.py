"""What the benchmarks share: their command line, their last line, and the cost of a tree of processes."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import selectors
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of every timed process: at these sizes more threads only spin, on either side."""
SHARED = ("torch", "numpy", "numba", "llvmlite", "gymnasium")
"""Packages that a peer has in the same version as offbeat."""


def parser(about: str | None) -> argparse.ArgumentParser:
    """A command line with what every benchmark takes."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print the figures as one JSON line at the end")
    made.add_argument("--quick", action="store_true", help="a smoke run: small, its figures mean little")
    made.add_argument(
        "--out", type=_new_file, metavar="FILE", help="keep the figures here as JSON, with the command"
    )
    return made


def _new_file(name: str) -> Path:
    path = Path(name)
    if not path.parent.is_dir():  # said now, and not when all is measured
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}: make it first")
    return path


def conclude(figures: Mapping[str, Any], holds: bool, options: argparse.Namespace) -> int:
    """Say whether the bar was met, last of all, and keep the figures if asked; return the exit code."""
    here = machine()
    if here["load"] > here["cpus"]:
        say(f"\nnote: load {here['load']} on {here['cpus']} processors; wall times suffer from that")
    say(f"\n{'holds' if holds else 'DOES NOT HOLD'}")
    told = {**rounded(figures), "machine": here, "holds": holds}
    if options.out is not None:
        options.out.write_text(json.dumps({"command": command(), **told}, indent=1) + "\n")
    if options.json:
        say(json.dumps(told))
    return 0 if holds else 1


def command() -> str:
    """What was typed to start this benchmark, from the root of the repository."""
    script, *arguments = sys.argv
    if "--out" in arguments:
        at = arguments.index("--out")
        del arguments[at : at + 2]
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *arguments])


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else float("nan")


def rounded(value: Any, digits: int = 4) -> Any:
    """The same tree of figures with its floats rounded, small ones to two digits; None for no number."""
    if isinstance(value, float):
        if value != value or abs(value) == float("inf"):
            return None
        return round(value, digits) if abs(value) >= 0.1**digits else float(f"{value:.2g}")
    if isinstance(value, Mapping):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def offbeat_command() -> list[str]:
    """The ``offbeat`` command of the Python that runs the benchmark."""
    return [sys.executable, "-c", "from offbeat.cli.main import main; main()"]


def peer_python(name: str, requirements: Sequence[str], alone: Sequence[str] = ()) -> str:
    """The Python of a peer's own virtual environment, ``.venvs/NAME``, which is made on first use.

    ``alone`` are packages that come without what they require: for peers that require a GPU's.
    """
    directory = REPOSITORY / ".venvs" / name
    python, marker = directory / "bin" / "python", directory / "complete"
    if not marker.exists():
        say(f"making {directory.relative_to(REPOSITORY)} ...")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        torch = f"torch=={metadata.version('torch').partition('+')[0]}"
        constraints = _peer_constraints(directory / "constraints.txt")
        # torch first and by itself: the peer then takes this one instead of choosing its own.
        for packages in ((torch,), requirements, ("--no-deps", *alone) if alone else ()):
            if not packages:
                continue
            install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
            subprocess.run([*install, *packages], check=True)
        marker.touch()
    return str(python)


def _peer_constraints(path: Path) -> Path:
    """Hold peers to the numerical packages that offbeat runs with, and to nothing else.

    All of our versions would be too many: pip then falls back to an old release of a peer.
    """
    ours = (REPOSITORY / "constraints.txt").read_text().splitlines()
    path.write_text("\n".join(line for line in ours if line.partition("==")[0] in SHARED) + "\n")
    return path


# ---------------------------------------------------------------- a tree of processes


@dataclass(frozen=True, slots=True)
class Cost:
    """What a tree of processes has used so far; ``pss_bytes`` is 0 where it was not asked for."""

    cpu_s: float
    wall_s: float
    num_processes: int
    pss_bytes: int = 0


@dataclass(slots=True)
class ProcessTree:
    """A command and everything it starts, seen from outside (Linux). One at a time.

    The kernel keeps with each process the processor time of the children it has waited for, and children
    whose parent is gone become ours (this process is their subreaper), as zombies if they have ended. So
    the sum over all our descendants misses nobody, at whatever moment it is taken.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    _process: subprocess.Popen[bytes] = field(init=False)
    _started_s: float = field(init=False)

    def start(self) -> None:
        """Run the command; what it prints goes to ``log``."""
        _become_subreaper()
        with open(self.log or os.devnull, "wb") as output:
            self._started_s = time.perf_counter()
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def is_running(self) -> bool:
        """Whether the command itself goes on. Ended, it stays a zombie that can be counted, until `end`."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def cost(self, with_memory: bool = False) -> Cost:
        """What was used up to now; reading the memory takes some milliseconds."""
        wall_s = time.perf_counter() - self._started_s
        cpu_s = _descendants()
        pss_bytes = sum(map(_pss_bytes, cpu_s)) if with_memory else 0
        return Cost(sum(cpu_s.values()), wall_s, len(cpu_s), pss_bytes)

    def finish(self, timeout_s: float) -> Cost:
        """Wait for the command's end, return what it cost, and clear it away."""
        give_up_s = time.perf_counter() + timeout_s
        while self.is_running and time.perf_counter() < give_up_s:
            time.sleep(0.005)
        cost, ended = self.cost(), not self.is_running
        code = self.end()
        if not ended or code != 0:
            how = f"exit code {code}" if ended else f"not done after {timeout_s:g} s"
            raise SystemExit(f"{' '.join(self.command)}: {how}\n{self.log_tail()}")
        return cost

    def end(self) -> int:
        """Kill whatever is left, reap it, and return the command's exit code."""
        give_up_s = time.perf_counter() + 30
        while left := _descendants():
            if time.perf_counter() > give_up_s:
                raise SystemExit(f"processes {sorted(left)} cannot be killed")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.005)
        return self._process.returncode

    def _reap(self) -> None:
        self._process.poll()  # first, so that the exit code is not lost to the loop below
        with contextlib.suppress(ChildProcessError):
            while self._process.returncode is not None and os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def log_tail(self, num_chars: int = 2000) -> str:
        """The end of what the command printed."""
        return self.log.read_text(errors="replace")[-num_chars:] if self.log is not None else ""


def _become_subreaper() -> None:
    if ctypes.CDLL(None).prctl(36, 1) != 0:  # PR_SET_CHILD_SUBREAPER
        raise SystemExit("the cost of a tree of processes can be read on Linux only")


def _descendants() -> dict[int, float]:
    """Processor seconds (with waited-for children) of every descendant of this process, by pid."""
    parents, cpu_s = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _read_stat(int(entry))) is not None:
            parents[int(entry)], cpu_s[int(entry)] = stat
    found, newest = set[int](), {os.getpid()}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest}
        found |= newest
    return {pid: cpu_s[pid] for pid in found}


def _read_stat(pid: int) -> tuple[int, float] | None:
    """Parent and processor seconds of a process; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _pss_bytes(pid: int) -> int:
    """Memory of a process, where a page shared by n processes counts as 1/n; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class Answering:
    """A process that reads a JSON object per line and answers each with one. Ends with the block."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], wait_s: float
    ) -> None:
        self._name, self._command, self._environment, self._wait_s = name, command, environment, wait_s

    def __enter__(self) -> Answering:
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **ONE_THREAD, **self._environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if selector.select(self._wait_s) else ""
        if not line:
            raise SystemExit(f"{self._name} gave no answer to {dict(request)} within {self._wait_s:g} s")
        answer: dict[str, Any] = json.loads(line)
        return answer
