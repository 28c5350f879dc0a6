"""Tries the promises of a run in thousands of random schedules: ``python -m offbeat.pacing.simulate``.

The simulator runs the real driver, so it stands above it: see `offbeat.testing.simulator`.
"""

from __future__ import annotations

import sys

from offbeat.testing.simulator import main

if __name__ == "__main__":
    sys.exit(main())
