"""Games in child processes, which are replaced when they are killed, crash or hang; no step is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from offbeat.envs.text.child import About, Failure
from offbeat.envs.text.finding import BUDGET, Found
from offbeat.envs.text.game import Scene
from offbeat.errors import ConfigError, EnvError

_CHILD = "import sys; from offbeat.envs.text.child import main; main(sys.argv[1:])"
_TIMEOUT_S = 120.0
_MOST_DEATHS = 10
_EXIT_S = 1.0


class RemoteGame:
    """A game (`offbeat.envs.text.opening.open_game`) in a child process of its own.

    Its owner keeps the state after each step. When the child is gone, or one request takes longer than
    ``timeout_s``, another child goes on from that state with the same request; ``num_deaths`` counts. A
    request that costs ten children in a row is given up. ``cpu_s`` is the processor time of the last request.

    Example: ``RemoteGame("zork1.z3", seed=1)``.
    """

    def __init__(
        self, what: str, seed: int | None = None, budget: int = BUDGET, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self.num_deaths = 0
        self.cpu_s = 0.0
        self._what, self._seed, self._budget, self._timeout_s = what, seed, budget, timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._state: bytes | None = None
        self._scene: Scene | None = None
        self._is_ready = False
        try:
            self.about: About = self._ask("about")
        except BaseException:
            self.close()
            raise
        self.name, self.max_score = self.about.name, self.about.max_score
        self.md5, self.finder, self.budget = self.about.md5, self.about.finder, self.about.budget

    @property
    def pid(self) -> int | None:
        """The child's process id, for whoever measures or kills it."""
        return None if self._child is None else self._child.pid

    def start(self) -> Scene:
        """Begin anew."""
        self._state, self._is_ready = None, True
        self._scene, self._state = self._ask("start")
        return self._scene

    def step(self, command: str) -> Scene:
        """Carry a command out in the child."""
        self._begun()
        self._scene, self._state = self._ask("step", command)
        return self._scene

    def scene(self) -> Scene:
        """Return the present scene."""
        if self._scene is None:
            self._begun()
            self._scene = self._ask("restore", self._state)
        return self._scene

    def actions(self) -> Sequence[str]:
        """Return the valid actions of the present state."""
        return self.find().labels

    def find(self) -> Found:
        """Return the valid actions with the finder's counts."""
        self._begun()
        found: Found = self._ask("actions")
        return found

    def expert(self) -> str | None:
        """Return the solution's next action; None also where the game knows no solution."""
        self._begun()
        action: str | None = self._ask("expert")
        return action

    def save(self) -> bytes:
        """Return the state, which is here already."""
        self._begun()
        assert self._state is not None
        return self._state

    def restore(self, state: bytes) -> None:
        """Put a saved state back, in the child at once: a wrong one is refused here."""
        scene = self._ask("restore", state)
        self._state, self._scene, self._is_ready = state, scene, True

    def close(self) -> None:
        """End the child."""
        if self._connection is not None:
            self._connection.close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child = self._connection = None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    # ------------------------------------------------------------ the child

    def _begun(self) -> None:
        if self._state is None and not self._is_ready:
            self.start()

    def _ask(self, request: str, argument: object = None) -> Any:
        """Return the answer of the child, or of the one after it; EnvError when all of them die of it."""
        for _ in range(_MOST_DEATHS):
            with contextlib.suppress(OSError, EOFError):
                self._ensure_child(request)
                return self._roundtrip(request, argument)
            self.num_deaths += 1
            reason = self._bury()
        given = f" {argument!r}" if isinstance(argument, str) else ""
        raise EnvError(
            f"{self._what}: {_MOST_DEATHS} children in a row ended in the request {request}{given}, the last "
            f"one {reason}: the game's interpreter cannot do that"
        )

    def _ensure_child(self, request: str) -> None:
        """Start a child unless there is one, and give it the state that the request goes on from."""
        if self._child is not None:
            return
        ours, theirs = socket.socketpair()
        with ours, theirs:
            seed = "" if self._seed is None else str(self._seed)
            command = [
                sys.executable,
                "-P",
                "-c",
                _CHILD,
                str(theirs.fileno()),
                self._what,
                seed,
                str(self._budget),
            ]
            self._child = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            )
            self._connection = Connection(ours.detach())
        if request in ("step", "actions", "expert") and self._state is not None:
            self._roundtrip("restore", self._state)

    def _roundtrip(self, request: str, argument: object) -> Any:
        assert self._connection is not None
        self._connection.send((request, argument))
        if not self._connection.poll(self._timeout_s):
            raise EOFError
        reply, self.cpu_s = self._connection.recv()
        if isinstance(reply, Failure):
            raise ConfigError(reply.text) if reply.is_config else EnvError(_prefixed(reply, self._what))
        return reply

    def _bury(self) -> str:
        """End a child that is of no use any more, and say how it ended."""
        code: int | None = None
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._child.wait(_EXIT_S)  # its pipe closes a moment before it is gone
        self.close()
        if code is None:
            return f"did not answer within {self._timeout_s:g} s"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _prefixed(reply: Failure, what: str) -> str:
    return reply.text if reply.is_ours else f"{what} raised:\n{reply.text}"
