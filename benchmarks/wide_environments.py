"""What it is worth that no environment waits for another: 64 with exponential step times in one collector.

The collector and its environments are those of ``examples/slow_environments.py``: steps take 50 ms in the
mean, each environment has a thread, and environment i works on the tickets n with n mod 64 = i, in order. In
lock step, which is how vectorised environments work, all 64 take a step and wait for the slowest. Both act
with the same policy and train on the same number of steps per round, with the dial at the same k. The
environments only sleep, so this needs little processor time.

Bar: at least 3 times the steps per second of lock step (4.7 is the limit: the mean of the slowest of 64 over
the mean of one), and no environment's share of the trained segments more than 10 % from equal.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from common import REPOSITORY, conclude, parser, say

from offbeat import PerWorker, Pipeline, Segment
from offbeat.config.models import AsyncTrainingConfig
from offbeat.pacing.events import Handlers, RoundTrained
from offbeat.pipeline import Settings
from offbeat.roles import WorkerContext
from offbeat.run.driver import Driver
from offbeat.types import Ticket

sys.path.insert(0, str(REPOSITORY / "examples"))
from slow_environments import MEAN_S, NUM_ENVS, NUM_STEPS, Learner, SlowEnv, SlowEnvironments

BAR_RATIO, BAR_SHARE = 3.0, 0.1
WARM_UP_ROUNDS = 2


class LockStep:
    """All environments take a step, and the next one once the slowest is done. A segment is of all."""

    def __init__(self, context: WorkerContext) -> None:
        self.done: SimpleQueue[tuple[int, Any, float]] = SimpleQueue()
        self.inboxes: list[SimpleQueue[tuple[str, Any]]] = [SimpleQueue() for _ in range(NUM_ENVS)]
        for index in range(NUM_ENVS):
            Thread(target=self.serve, args=(index, SlowEnv(index)), daemon=True).start()

    def serve(self, index: int, env: SlowEnv) -> None:
        """Do what the inbox of an environment asks for, in its thread."""
        while True:
            method, argument = self.inboxes[index].get()
            self.done.put((index, *getattr(env, method)(argument)))

    def all_do(self, method: str, arguments: Any) -> tuple[Any, Any]:
        """Have each environment do something; wait for all; return observations and rewards."""
        for inbox, argument in zip(self.inboxes, arguments, strict=True):
            inbox.put((method, argument))
        rows = sorted((self.done.get() for _ in range(NUM_ENVS)), key=lambda row: row[0])
        return np.array([obs for _, obs, _ in rows]), np.array([reward for *_, reward in rows])

    def collect(self, ticket: Ticket, weights: Any) -> Segment:
        rng = np.random.default_rng(ticket.seed)
        obs, _ = self.all_do("reset", rng.integers(2**31, size=NUM_ENVS))
        rows: dict[str, list[Any]] = {"obs": [], "actions": [], "rewards": []}
        for _ in range(NUM_STEPS):
            actions = (rng.random(NUM_ENVS) < 1.0 / (1.0 + np.exp(-obs @ weights))).astype(int)
            rows["obs"].append(obs)
            rows["actions"].append(actions)
            obs, rewards = self.all_do("step", actions.tolist())
            rows["rewards"].append(rewards)
        data = {name: np.concatenate(row) for name, row in rows.items()}
        return Segment(ticket, data, np.array([ticket.version]), {"env_steps": NUM_ENVS * NUM_STEPS})


@dataclass
class Rounds:
    """When rounds ended, and what they trained."""

    ended_s: list[float] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    by_env: Counter[int] = field(default_factory=Counter)

    def handlers(self, driver: Driver) -> Handlers:
        return {RoundTrained: self.on_trained}

    def on_trained(self, event: RoundTrained, now_s: float) -> None:
        self.ended_s.append(event.ended_s)
        self.num_steps.append(sum(segment.num_steps for segment in event.batch.segments))
        self.by_env.update(segment.ticket.number % NUM_ENVS for segment in event.batch.segments)

    def steps_per_s(self) -> float:
        """Trained steps per second after the warm-up."""
        begin = min(WARM_UP_ROUNDS, len(self.ended_s) - 1)
        return sum(self.num_steps[begin:]) / (self.ended_s[-1] - self.ended_s[begin - 1])

    def unequal(self) -> float:
        """Largest distance of an environment's share of the trained segments from an equal one."""
        equal = self.by_env.total() / NUM_ENVS
        return max(abs(self.by_env[index] / equal - 1.0) for index in range(NUM_ENVS))


def measure(make: Callable[[WorkerContext], Any], size: int, rounds: int, degree: int) -> Rounds:
    """Train so many rounds with such a collector."""
    made = Pipeline(
        collect=PerWorker(make),
        train=Learner(),
        off_policy_degree=degree,
        segments_per_round=size,
        runtime="threads",
        settings=Settings(async_training=AsyncTrainingConfig(open_rounds=0)),
    )
    seen = Rounds()
    with made.open(rounds, handlers=seen.handlers) as run:
        run.complete()
    return seen


def main() -> int:
    """Measure both, compare, and conclude."""
    arguments = parser(__doc__)
    arguments.add_argument("--k", type=int, default=4, help="off_policy_degree of both (4)")
    arguments.add_argument("--rounds", type=int, default=30, help="rounds of 1,024 steps (30; lock step: 7)")
    options = arguments.parse_args()
    rounds, lock_step_rounds = (4, 3) if options.quick else (options.rounds, 7)
    began_cpu_s = time.process_time()
    wide = measure(SlowEnvironments, NUM_ENVS, rounds, options.k)
    cpu_s = time.process_time() - began_cpu_s
    lock_step = measure(LockStep, 1, lock_step_rounds, options.k)
    limit = sum(1.0 / number for number in range(1, NUM_ENVS + 1))
    figures = {
        "wide_steps_per_s": wide.steps_per_s(),
        "lock_step_steps_per_s": lock_step.steps_per_s(),
        "ratio": wide.steps_per_s() / lock_step.steps_per_s(),
        "limit": limit,
        "most_unequal_share": wide.unequal(),
        "wide_cpu_us_per_step": 1e6 * cpu_s / sum(wide.num_steps),
    }
    say(f"{NUM_ENVS} environments, steps of {1e3 * MEAN_S:g} ms in the mean, k = {options.k}")
    say(f"in one wide collector: {figures['wide_steps_per_s']:6.0f} steps/s")
    say(f"in lock step:          {figures['lock_step_steps_per_s']:6.0f} steps/s")
    shares = f"no environment's share is more than {figures['most_unequal_share']:.1%} from equal"
    say(f"ratio {figures['ratio']:.2f} (limit {limit:.2f}); {shares}")
    holds = figures["ratio"] >= BAR_RATIO and figures["most_unequal_share"] <= BAR_SHARE
    return conclude(figures, holds, options)


if __name__ == "__main__":
    sys.exit(main())
