"""How long rounds stand still for a checkpoint of a large learner: written beside training, and in turns.

The learner has ``--parameters`` (135 million, fp32) and the two moments of Adam, as plain torch tensors:
1.6 GB of state, and as much again for the copy that is written. A round is 0.2 s of matrix products and a
step on one of its layers. Checkpoints come every ``--interval`` rounds, and the first one counts: memory for
the copy is there before round 1.

The gap between two rounds is the time from the end of one ``train`` to the beginning of the next, as the
learner sees it. Rounds stand still for as long as the gaps from a checkpoint to the moment when it is on the
disk are longer than the median of the other gaps. On ``threads`` checkpoints are written beside training; on
``inline`` the same run takes turns with writing them, which is the synchronous save to compare with.

Bars: on ``threads`` no checkpoint stops rounds for more than 0.5 s, nor for more than 10 % of the median of
the synchronous saves. Run it alone: times are wall times.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import conclude, median, parser, say

from offbeat import Callback, PerWorker, Pipeline, Segment
from offbeat.config.models import CheckpointConfig
from offbeat.observe.callbacks import CheckpointInfo
from offbeat.pipeline import Settings
from offbeat.types import Batch, Ticket

ROUND_S = 0.2
LAYER = 1_000_000
MOST_S, MOST_SHARE = 0.5, 0.1


class Learner:
    """Parameters with Adam's moments; collectors get one layer of them, checkpoints all."""

    def __init__(self, parameters: int, products: int) -> None:
        sizes = [LAYER] * (parameters // LAYER) + [parameters % LAYER or LAYER]
        self.params = [torch.randn(size) for size in sizes]
        self.means = [torch.zeros(size) for size in sizes]
        self.squares = [torch.zeros(size) for size in sizes]
        self.products = products
        self.rounds: list[tuple[float, float]] = []
        self._square = torch.full((512, 512), 1 / 512)

    def train(self, batch: Batch) -> dict[str, float]:
        """Compute, and take a step on the next layer."""
        began_s = time.perf_counter()
        multiply(self._square, self.products)
        layer = len(self.rounds) % len(self.params)
        grad = self.params[layer].sign()
        self.means[layer].mul_(0.9).add_(grad, alpha=0.1)
        self.squares[layer].mul_(0.999).addcmul_(grad, grad, value=0.001)
        self.params[layer].addcdiv_(self.means[layer], self.squares[layer].sqrt().add_(1e-8), value=-1e-3)
        self.rounds.append((began_s, time.perf_counter()))
        return {}

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters, without a copy."""
        return {f"layer.{index}": tensor for index, tensor in enumerate(self.params)}

    def published(self) -> dict[str, Any]:
        """What collectors get: little, so that publishing takes no time beside a checkpoint."""
        return {"head": self.params[0][:1000].clone()}

    def state_dict(self) -> dict[str, Any]:
        """Parameters and moments, without a copy."""
        moments = {"means": self.means, "squares": self.squares}
        return {"params": self.params, **moments, "rounds": len(self.rounds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def multiply(square: torch.Tensor, count: int) -> None:
    for _ in range(count):
        torch.mm(square, square)


def calibrate() -> int:
    """Matrix products that take as long as a round is to take."""
    square, count = torch.full((512, 512), 1 / 512), 20
    multiply(square, count)
    began_s = time.perf_counter()
    multiply(square, count)
    return max(1, round(count * ROUND_S / (time.perf_counter() - began_s)))


class Saves(Callback):
    """Notes when checkpoints were on the disk, and how long writing them took."""

    def __init__(self) -> None:
        self.saves: dict[int, tuple[float, float]] = {}

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        self.saves[info.version] = time.perf_counter(), info.seconds


def collect(ticket: Ticket, weights: Any) -> Segment:
    return Segment(ticket, {"x": np.zeros(8)}, np.array([ticket.version]), {"env_steps": 8})


def measure(kind: str, options: Any, products: int, directory: Path) -> dict[str, Any]:
    """Run, and return for how long each checkpoint stopped the rounds."""
    learner, saves = Learner(options.parameters, products), Saves()
    every = CheckpointConfig(interval_rounds=options.interval, interval_s=None)
    Pipeline(
        collect=collect,
        train=PerWorker(lambda context: learner),
        runtime=kind,  # type: ignore[arg-type]
        num_workers=1,
        off_policy_degree=1,
        run_dir=directory,
        settings=Settings(checkpoint=every),
        callbacks=[saves],
    ).run(rounds=options.interval * options.checkpoints + options.interval // 2)
    rounds = learner.rounds
    gaps = [after[0] - before[1] for before, after in pairwise(rounds)]
    # Gap v - 1 comes after round v, from 1; those of the first rounds hold the start of the collector.
    spans = [
        [version - 1, *(index for index in range(version, len(gaps)) if rounds[index][1] < on_disk_s)]
        for version, (on_disk_s, _) in saves.saves.items()
        if version <= len(gaps)
    ]
    inside = set(chain(*spans))
    usual_s = median([gap for index, gap in enumerate(gaps) if index not in inside and index > 3])
    stops = [sum(max(0.0, gaps[index] - usual_s) for index in span) for span in spans]
    lengths = [end - begin for begin, end in rounds]
    busy = [lengths[index] for index in inside]
    quiet = [length for index, length in enumerate(lengths) if index not in inside]
    return {
        "checkpoints": len(stops),
        "standstill_s": stops,
        "writing_s": [seconds for _, seconds in saves.saves.values()][: len(stops)],
        "usual_gap_s": usual_s,
        "round_s": median(quiet),
        "round_while_writing_s": median(busy),
    }


def main() -> int:
    options = arguments()
    torch.set_num_threads(1)
    products = calibrate()
    say(f"{options.parameters / 1e6:,.0f} M parameters, {12 * options.parameters / 1e9:.2f} GB of state")
    found = {}
    for kind in ("threads", "inline"):
        directory = Path(tempfile.mkdtemp(prefix="offbeat-checkpoint-", dir=options.directory))
        try:
            found[kind] = measure(kind, options, products, directory / "run")
        finally:
            shutil.rmtree(directory)
        figures = found[kind]
        stops = ", ".join(f"{stop:.3f}" for stop in figures["standstill_s"])
        say(f"{kind:8} rounds of {figures['round_s']:.3f} s stand still for {stops} s")
        writing_s, meanwhile_s = median(figures["writing_s"]), figures["round_while_writing_s"]
        say(f"{'':8} writing takes {writing_s:.2f} s, a round meanwhile {meanwhile_s:.3f} s")
    longest_s = max(found["threads"]["standstill_s"])
    share = longest_s / median(found["inline"]["standstill_s"])
    of_sync = f"{share:.1%} of a synchronous save (aim {MOST_SHARE:.0%})"
    say(f"\nlongest standstill {longest_s:.3f} s (aim {MOST_S}), {of_sync}")
    figures = {"parameters": options.parameters, **found, "longest_s": longest_s, "share": share}
    return conclude(figures, longest_s <= MOST_S and share <= MOST_SHARE, options)


def arguments() -> Any:
    made = parser(__doc__)
    made.add_argument("--parameters", type=int, default=135_000_000)
    made.add_argument("--interval", type=int, default=60, help="rounds between two checkpoints")
    made.add_argument("--checkpoints", type=int, default=3, help="how many are measured in each run")
    made.add_argument("--directory", help="where the runs write; default: the system's for temporary files")
    options = made.parse_args()
    if options.quick:
        options.parameters, options.interval, options.checkpoints = 2_500_000, 6, 2
    return options


if __name__ == "__main__":
    raise SystemExit(main())
