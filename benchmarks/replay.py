"""How fast prioritized replay samples and updates, against other libraries; and whether it samples right.

Every contestant is a process of its own with one thread, which fills a buffer and then, on request, runs
cycles: sample a batch with its weights (the items are copied out), then give the items new priorities. The
contestants take turns, block by block. Rates are per processor second, and medians over blocks. An item is a
float32 observation of 64 numbers, an action, a reward and whether the episode ended; alpha is 0.6, beta 0.4.
Buffers are full, but a peer that is slow to insert is filled for ``--fill-s`` seconds only, which its figures
say: drawing from fewer items is an advantage for it. offbeat takes part a second time, without numba.

A peer lives in a virtual environment of its own, ``.venvs/PEER``, made when it is needed.

Also here, for offbeat alone: chi-square of how often items are drawn against their priorities (batches of 4
from 4096 items, so that draws are nearly independent), and the sums of the tree after 10 million updates
against those of a tree made at once from the same leaves.

Bars: sample + update at least 2.5 times as fast as the best peer for every capacity and batch size;
chi-square at most five deviations above its mean; every sum equal in every bit.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import Answering, conclude, median, parser, peer_python, say

from offbeat.replay import PrioritizedReplay, SumTree
from offbeat.types import ArraySpec

HERE = Path(__file__).resolve().parent
PEERS = {"cpprb": ("cpprb==11.0.0",), "tianshou": ("tianshou==2.0.1",), "torchrl": ("torchrl==0.14.1",)}
OURS, OURS_IN_NUMPY = "offbeat", "offbeat in numpy"
BAR_SPEED = 2.5
BATCHES = (128, 1024)
BLOCK_S = 0.05
ANSWER_S = 300.0


# ---------------------------------------------------------------- contestants


@dataclass(slots=True)
class Contestant:
    """A process that runs one library's buffer."""

    name: str
    rates: dict[str, list[float]] = field(default_factory=dict)
    fills: dict[str, dict[str, Any]] = field(default_factory=dict)
    _process: Answering = field(init=False)

    def __enter__(self) -> Contestant:
        is_ours = self.name in (OURS, OURS_IN_NUMPY)
        python = sys.executable if is_ours else peer_python(self.name, PEERS[self.name])
        script = HERE / "peers" / f"replay_{OURS if is_ours else self.name}.py"
        uses_numba = {"OFFBEAT_NUMBA": "0" if self.name == OURS_IN_NUMPY else "1"}
        self._process = Answering(self.name, [python, str(script)], uses_numba, ANSWER_S)
        self._process.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.__exit__(*error)

    def ask(self, request: Mapping[str, float]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        return self._process.ask(request)

    def fill(self, capacity: int, limit_s: float) -> None:
        """Make a buffer, fill it, and let everything compile."""
        self.fills[str(capacity)] = self.ask({"capacity": capacity, "limit_s": limit_s})
        for batch in BATCHES:
            self.ask({"batch": batch, "seconds": 4 * BLOCK_S})

    def run_block(self, capacity: int, batch: int) -> None:
        """Time one block of cycles."""
        answer = self.ask({"batch": batch, "seconds": BLOCK_S})
        rate = answer["cycles"] * batch / answer["seconds"]
        self.rates.setdefault(f"{capacity}/{batch}", []).append(rate)

    def figures(self, capacity: int, batch: int) -> dict[str, Any]:
        """Medians of what was timed."""
        rate, fill = median(self.rates[f"{capacity}/{batch}"]), self.fills[str(capacity)]
        return {
            "items_per_s": rate,
            "us_per_cycle": 1e6 * batch / rate,
            "inserted_per_s": fill["inserted_per_s"],
            "filled": fill["filled"] / capacity,
            "version": fill["version"],
        }


def race(contestants: Sequence[Contestant], capacity: int, num_blocks: int, fill_s: float) -> None:
    """Fill everybody's buffer, then let them take turns."""
    for contestant in contestants:
        contestant.fill(capacity, fill_s)
    for batch in BATCHES:
        for block in range(num_blocks):
            for contestant in contestants if block % 2 else contestants[::-1]:
                contestant.run_block(capacity, batch)


def compare(contestants: Sequence[Contestant], capacity: int, batch: int) -> dict[str, Any]:
    """Figures of all at one size, and how many times the best peer's rate ours is."""
    found = {contestant.name: contestant.figures(capacity, batch) for contestant in contestants}
    say(f"\ncapacity {capacity}, batch {batch}")
    for name, figures in found.items():
        partly = f"   ({figures['filled']:.0%} filled)" if figures["filled"] < 1 else ""
        say(
            f"  {name:16} {figures['version']:8} {figures['items_per_s'] / 1e6:7.3f} M items/s"
            f"   {figures['us_per_cycle']:8.1f} us"
            f"   insert {figures['inserted_per_s'] / 1e6:7.3f} M/s{partly}"
        )
    peers = {name: figures["items_per_s"] for name, figures in found.items() if name in PEERS}
    if not peers:
        return found
    best = max(peers, key=lambda name: peers[name])
    ratio = found[OURS]["items_per_s"] / peers[best]
    say(f"  {ratio:.2f} x {best}   bar: >= {BAR_SPEED}")
    return {**found, "best_peer": best, "ratio": ratio}


# ---------------------------------------------------------------- correctness


def chi_square_part(num_batches: int, num_items: int = 4096, batch: int = 4) -> dict[str, Any]:
    """How far the frequencies of draws are from the priorities."""
    rng = np.random.default_rng(0)
    replay = PrioritizedReplay({"item": ArraySpec((), "int64")}, num_items)
    priorities = rng.exponential(size=num_items)
    replay.add({"item": np.arange(num_items)}, versions=0, priorities=priorities)
    counts = np.zeros(num_items)
    for _ in range(num_batches):
        np.add.at(counts, replay.sample(rng, batch, beta=0.4).items["item"], 1)
    shares = (priorities + replay.eps) ** replay.alpha
    expected = shares / shares.sum() * num_batches * batch
    found = float(((counts - expected) ** 2 / expected).sum())
    limit = num_items - 1 + 5 * (2 * (num_items - 1)) ** 0.5
    say(f"\nchi-square of {num_batches * batch} draws {found:.0f}   bar: <= {limit:.0f}")
    return {"chi_square": found, "limit": limit, "draws": num_batches * batch, "holds": found <= limit}


def drift_part(num_updates: int, capacity: int = 100_000, batch: int = 1000) -> dict[str, Any]:
    """Sums after many random updates against those of a tree made at once."""
    rng, tree, fresh = np.random.default_rng(0), SumTree(capacity), SumTree(capacity)
    for _ in range(num_updates // batch):
        tree.set(rng.integers(0, capacity, batch), 10.0 ** rng.uniform(-6, 6, batch))
    fresh.set_range(0, tree.state)
    num_different = int(np.count_nonzero(tree.inner != fresh.inner))
    exact = float(tree.state.sum(dtype=np.longdouble))
    say(
        f"after {num_updates} updates {num_different} of {tree.inner.size} sums differ from fresh ones"
        f" (bar: 0); the total is off by {abs(tree.total / exact - 1):.1e} of itself"
    )
    return {"updates": num_updates, "sums_that_differ": num_different, "holds": num_different == 0}


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=sorted(PEERS), help="(all)")
    made.add_argument("--capacities", nargs="*", type=int, default=[100_000, 1_000_000], help="(1e5 1e6)")
    made.add_argument("--blocks", type=int, default=40, help="blocks of each kind (40)")
    made.add_argument("--fill-s", type=float, default=60.0, help="longest time to fill a buffer (60)")
    options = made.parse_args(arguments)
    num_batches, num_updates = 100_000, 10_000_000
    if options.quick:
        options.capacities, options.blocks, options.fill_s = [10_000], 4, 2.0
        num_batches, num_updates = 20_000, 100_000
    figures: dict[str, Any] = {"chi_square": chi_square_part(num_batches), "drift": drift_part(num_updates)}
    figures["rates"] = run_race(options.peers, options.capacities, options.blocks, options.fill_s)
    fast = all(found.get("ratio", BAR_SPEED) >= BAR_SPEED for found in figures["rates"].values())
    right = figures["chi_square"]["holds"] and figures["drift"]["holds"]
    return conclude(figures, fast and right, options)


def run_race(peers: Sequence[str], capacities: Sequence[int], blocks: int, fill_s: float) -> dict[str, Any]:
    """All figures of speed, by ``capacity/batch``."""
    with ExitStack() as stack:
        contestants = [stack.enter_context(Contestant(name)) for name in (OURS, OURS_IN_NUMPY, *peers)]
        figures = {}
        for capacity in capacities:
            race(contestants, capacity, blocks, fill_s)
            for batch in BATCHES:
                figures[f"{capacity}/{batch}"] = compare(contestants, capacity, batch)
    return figures


if __name__ == "__main__":
    sys.exit(main())
