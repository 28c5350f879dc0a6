"""How many simulations per processor second the tree search does, against mctx; and whether it is right.

The tree alone: the model is a table whose rows are made beforehand, found by the number of a node here, and
by its depth in mctx, which does not tell numbers. A search is its noise at the root, one call of ``begin``,
all its simulations, and its result with the actions. mctx is a process of its own that is held to one
processor, with all of a search in one compiled function. The two take turns, block by block. Rates are per
processor second, and medians over blocks. pUCT stands beside ``mctx.muzero_policy``, with a way to value
untried actions that is near to mctx's (``low``: trees are deeper then, and slower) and with our own; Gumbel
stands beside ``mctx.gumbel_muzero_policy``.

mctx lives in a virtual environment of its own, ``.venvs/mctx``, made when it is needed.

Also here: root visits and values of the compiled search against the one in numpy, bit for bit, on 1,000
random problems of each kind.

Bars: at least 5 times as fast as mctx at every size, for the same kind; no problem that differs.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from common import Answering, conclude, median, parser, peer_python, say

from offbeat.ops.compiled import uses_numba
from offbeat.search import SearchConfig, SearchResult, Trees, draw_noise

HERE = Path(__file__).resolve().parent
REQUIREMENTS = ("mctx==0.0.71", "jax[cpu]>=0.7")
BAR_SPEED = 5.0
BLOCK_S = 0.1
ANSWER_S = 600.0
OURS = {"puct": ("puct, low", "puct"), "gumbel": ("gumbel",)}
"""By kind; the first is compared with mctx."""


@dataclass(frozen=True, slots=True)
class Size:
    """What is searched."""

    batch: int
    simulations: int
    actions: int

    def __str__(self) -> str:
        return f"{self.batch} trees, {self.simulations} simulations, {self.actions} actions"


# ---------------------------------------------------------------- contestants


class OurSearch:
    """A search over tables, one row for each node."""

    def __init__(self, name: str, size: Size, seed: int = 0) -> None:
        kind, _, first_play = name.partition(", ")
        rng, shape = np.random.default_rng(seed), (size.simulations + 1, size.batch)
        config = SearchConfig(kind, size.simulations, 0.997, first_play=first_play or "mean")  # type: ignore[arg-type]
        self._trees = Trees(config, size.batch, size.actions)
        self._logits = rng.normal(size=(*shape, size.actions)).astype(np.float32)
        self._values, self._rewards = rng.normal(size=(2, *shape)).astype(np.float32)
        self._seeds = rng.integers(0, 2**64, size.batch, np.uint64)
        self._rngs = [np.random.default_rng((seed, lane)) for lane in range(size.batch)]
        self._legal = np.ones((size.batch, size.actions), np.bool_)

    def run(self) -> SearchResult:
        """Search once."""
        trees, logits = self._trees, self._logits
        noise = draw_noise(trees.config, self._rngs, self._legal)
        trees.begin(logits[0], self._values[0], seeds=self._seeds, noise=noise)
        for row in range(1, trees.config.num_nodes):
            trees.descend()
            trees.expand(self._rewards[row], self._values[row], logits[row])
        found = trees.result()
        found.act()
        return found

    def rate(self, seconds: float) -> float:
        """Searches per processor second."""
        started_s = time.process_time()
        searches, spent_s = 0, 0.0
        while spent_s < seconds:
            self.run()
            searches, spent_s = searches + 1, time.process_time() - started_s
        return searches / spent_s


class Mctx(Answering):
    """A process that runs mctx's searches."""

    def __init__(self) -> None:
        script = HERE / "peers" / "mctx_search.py"
        super().__init__("mctx", [peer_python("mctx", REQUIREMENTS), str(script)], {}, ANSWER_S)
        self.versions: Mapping[str, str] = {}

    def prepare(self, kind: str, size: Size) -> None:
        """Make and compile a search."""
        sizes = {"batch": size.batch, "simulations": size.simulations, "actions": size.actions}
        self.versions = self.ask({"kind": kind, **sizes})["versions"]
        self.rate(BLOCK_S)

    def rate(self, seconds: float) -> float:
        """Searches per processor second."""
        answer = self.ask({"seconds": seconds})
        return float(answer["searches"] / answer["seconds"])


def race(size: Size, kind: str, mctx: Mctx | None, num_blocks: int) -> dict[str, Any]:
    """Rates of a kind of search at one size, in simulations per processor second."""
    ours = {name: OurSearch(name, size) for name in OURS[kind]}
    for search in ours.values():
        search.run()
    if mctx is not None:
        mctx.prepare(kind, size)
    rates: dict[str, list[float]] = {}
    for _ in range(num_blocks):
        for name, search in ours.items():
            rates.setdefault(name, []).append(search.rate(BLOCK_S))
        if mctx is not None:
            rates.setdefault("mctx", []).append(mctx.rate(BLOCK_S))
    found = {name: median(values) * size.batch * size.simulations for name, values in rates.items()}
    told = "   ".join(f"{name} {rate / 1e6:6.3f} M/s" for name, rate in found.items())
    if mctx is None:
        say(f"  {size}: {told}")
        return found
    ratio = found[OURS[kind][0]] / found["mctx"]
    say(f"  {size}: {told}   {ratio:5.1f} x   bar: >= {BAR_SPEED:g}")
    return {**found, "ratio": ratio}


def run_race(kinds: Iterable[str], sizes: Sequence[Size], num_blocks: int, with_mctx: bool) -> dict[str, Any]:
    """All rates, by kind and size."""
    with ExitStack() as stack:
        mctx = Mctx() if with_mctx else None
        if mctx is not None:
            stack.enter_context(mctx)
        figures: dict[str, Any] = {}
        for kind in kinds:
            say(f"\n{kind}: simulations per processor second")
            for size in sizes:
                name = f"{kind}/{size.batch}/{size.simulations}/{size.actions}"
                figures[name] = race(size, kind, mctx, num_blocks)
        return {**figures, "versions": mctx.versions if mctx is not None else None}


# ---------------------------------------------------------------- correctness


def equality_part(num_problems: int, batch: int = 50) -> dict[str, Any]:
    """On how many random problems the compiled search differs from the one in numpy."""
    figures: dict[str, Any] = {}
    for kind in ("puct", "gumbel"):
        different = 0
        for number in range(num_problems // batch):
            size = Size(batch, (1, 2, 25, 50)[number % 4], (1, 2, 5, 20)[number // 4 % 4])
            compiled = OurSearch(kind, size, seed=number).run()
            with patch.dict(os.environ, {"OFFBEAT_NUMBA": "0"}):
                plain = OurSearch(kind, size, seed=number).run()
            same = np.all(compiled.visits == plain.visits, axis=1) & (compiled.values == plain.values)
            different += int(np.count_nonzero(~same))
        say(f"{kind}: {different} of {num_problems} problems differ from the numpy search   bar: 0")
        figures[kind] = {"problems": num_problems, "different": different}
    return {**figures, "holds": not any(figures[kind]["different"] for kind in ("puct", "gumbel"))}


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--no-peer", action="store_true", help="measure ours alone, without mctx")
    made.add_argument("--blocks", type=int, default=9, help="blocks of each kind (9)")
    made.add_argument(
        "--kinds", nargs="*", choices=("puct", "gumbel"), default=["puct", "gumbel"], help="(both)"
    )
    made.add_argument("--batches", nargs="*", type=int, default=[8, 64, 256], help="(8 64 256)")
    options = made.parse_args(arguments)
    if not uses_numba():
        raise SystemExit("numba is not there or turned off: install it and unset OFFBEAT_NUMBA")
    simulations, actions, num_problems = (25, 50), (2, 20), 1000
    if options.quick:
        options.batches, simulations, options.blocks, num_problems = options.batches[:1], (25,), 2, 200
    sizes = [Size(*size) for size in product(options.batches, simulations, actions)]
    figures: dict[str, Any] = {"equality": equality_part(num_problems)}
    figures["rates"] = run_race(options.kinds, sizes, options.blocks, not options.no_peer)
    ratios = [
        rates["ratio"] for rates in figures["rates"].values() if isinstance(rates, dict) and "ratio" in rates
    ]
    fast = all(ratio >= BAR_SPEED for ratio in ratios)
    return conclude(figures, figures["equality"]["holds"] and fast, options)


if __name__ == "__main__":
    sys.exit(main())
