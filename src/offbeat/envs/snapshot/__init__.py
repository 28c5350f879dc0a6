"""The state of an environment as plain data, taken and put back without pickle.

`capture` walks everything an environment holds, through its wrappers; `restore` puts it back onto a freshly
made and reset one. Either all of it is captured or nothing: whatever may hide state in native code (physics
engines, open files, iterators, threads) makes the whole capture None, never a state that is partly wrong.
What it does not see is state outside the object: module globals, class attributes, the clock.

A state is ``{"root": value, "nodes": [...]}``. None, bool, int, finite float and str stand for themselves,
``[i]`` is node i, ``[]`` is a value that belongs to the environment it is restored onto (specs, loggers,
windows). Nodes are dicts with a ``kind``; arrays are the only values in them that JSON cannot hold.
"""

from __future__ import annotations

from offbeat.envs.snapshot.capture import capture, why_not
from offbeat.envs.snapshot.restore import restore

__all__ = ["capture", "restore", "why_not"]
