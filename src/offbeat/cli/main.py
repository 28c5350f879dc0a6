"""The console script: verbs and nothing else."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Mapping, Sequence

from offbeat.cli import supervise

VERBS: Mapping[str, str] = {
    "train": "offbeat.cli.train:train",
    "resume": "offbeat.cli.resume:resume",
    "status": "offbeat.cli.status:status",
    "eval": "offbeat.cli.evaluate:evaluate",
    "play": "offbeat.cli.play:play",
    "replay": "offbeat.cli.replay:replay",
    "check": "offbeat.cli.check:check",
    "generate": "offbeat.cli.generate:generate",
    "convert": "offbeat.cli.convert:convert",
    "text": "offbeat.cli.text:text",
    "list": "offbeat.cli.listing:list_all",
    "digest": "offbeat.cli.digest:digest",
    "doctor": "offbeat.cli.doctor:doctor",
}
"""Every verb of the command and its function, in the order of its help.

By name: a run forks before anything is imported that its guard would then hold in memory, too.
"""

_ROLES = ("learner", "evaluator", "collector")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``offbeat`` command; ends in ``SystemExit`` with 0, 1, 2 (configuration, usage) or 130.

    Called as a command (without ``arguments``), a run is done by a child that is followed by another one
    when it is killed; killed for good by signal n, the code is 128 + n.
    """
    child = None
    if arguments is None:
        # The interpreter's last collections would walk over all of torch: a second after the last line.
        atexit.register(gc.freeze)
    if arguments is None and supervise.is_wanted(sys.argv[1:]):
        child = supervise.supervise(as_json="--json" in sys.argv)
    try:
        if child is not None and child.after is not None:
            from offbeat.cli.recover import continue_run

            continue_run(child, child.after, as_json="--json" in sys.argv)
        from offbeat.cli.commands import run

        run(VERBS, arguments, child)
    except SystemExit as ended:
        if arguments is None and isinstance(ended.code, int) and _is_role_at_work():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code)
        raise


def _is_role_at_work() -> bool:
    """Return True if a thread of a run did not end with it: an orderly exit could abort in native code."""
    return any(thread.name.partition("-")[0] in _ROLES for thread in threading.enumerate())
