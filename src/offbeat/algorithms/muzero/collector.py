"""MuZero's collector: plays with a tree search, or searches anew what was played before."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.muzero.config import PlanningConfig, reanalysis_turn
from offbeat.algorithms.muzero.fitting import Fit
from offbeat.algorithms.muzero.lane import Lane, Roots
from offbeat.algorithms.muzero.planning import Planner
from offbeat.algorithms.muzero.steps import POLICY, VALUE, segment_spec
from offbeat.algorithms.muzero.wishes import wishes_of
from offbeat.config.models import RunConfig
from offbeat.envs import World
from offbeat.seeding import derive_seed
from offbeat.types import Array, ArraySpec, Episodes, Segment, StateTree, Ticket


class MuZeroCollector:
    """Collects ``num_steps`` steps of N environments, each chosen by a search.

    A ticket whose number is one for reanalysis yields a segment of the same size: as many steps of the
    replay, which came with the weights, searched anew.
    """

    def __init__(
        self, run: RunConfig, algorithm: PlanningConfig, world: World, fit: Fit, planner: Planner
    ) -> None:
        self._run, self._config = run, algorithm
        self._world, self._fit, self._planner = world, fit, planner
        self._lane: Lane | None = None
        self._start = 0

    def segment_spec(self) -> dict[str, ArraySpec]:
        """Names, shapes and dtypes of a segment's arrays."""
        return segment_spec(self._fit, self._config.num_steps, self._world.num_envs)

    def collect(self, ticket: Ticket, weights: Mapping[str, Array]) -> Segment:
        """Collect one segment into arrays of its own."""
        out = {name: spec.empty() for name, spec in self.segment_spec().items()}
        return self.collect_into(ticket, weights, out)

    def collect_into(self, ticket: Ticket, weights: Mapping[str, Array], out: Mapping[str, Array]) -> Segment:
        """Collect one segment into ``out``."""
        self._planner.load(weights)
        rngs = [
            np.random.Generator(np.random.SFC64(derive_seed(ticket.seed, "tree", tree)))
            for tree in range(self._world.num_envs)
        ]
        turn = reanalysis_turn(ticket.number, self._run)
        out["is_new"][0] = turn is None
        if turn is not None:
            self._search_anew(turn, weights, rngs, out)
            none, versions = (0,) * self._world.num_envs, np.array([ticket.version])
            return Segment(ticket, out, versions, {"env_steps": 0}, steps_by_env=none)
        if self._lane is None:
            obs = self._world.reset(derive_seed(ticket.seed, "reset"))
            self._lane = Lane.begin(obs, self._config.context, self._fit)
            self._start = ticket.number << 32  # where no other collector of this lane has been
        out["start"][0] = self._start
        self._start += self._config.num_steps
        out["stream"][:], out["number"][:] = -1, -1
        episodes = self._play(self._lane, rngs, out)
        by_env = tuple(np.count_nonzero(out["valid"], axis=0).tolist())
        units, versions = {"env_steps": sum(by_env)}, np.array([ticket.version])
        return Segment(ticket, out, versions, units, episodes, steps_by_env=by_env)

    def _play(self, lane: Lane, rngs: list[np.random.Generator], out: Mapping[str, Array]) -> Episodes:
        """Step the environments, one search for each step of all."""
        config, fit, finished = self._config, self._fit, []
        for t in range(config.num_steps):
            seen = lane.obs[:, -1]
            roots = Roots(lane.obs, lane.actions, lane.first, fit.legal(seen, lane.ended))
            plan = self._planner.plan(roots, rngs, explores=True)
            actions = plan.act(config.search.temperature, rngs)
            out["obs"][t], out["actions"][t], out["valid"][t] = seen, actions, ~lane.ended
            out[POLICY][t], out[VALUE][t] = plan.policy, plan.result.values
            if plan.candidates is not None:
                out["candidates"][t] = plan.candidates
            step = self._world.step(fit.to_env(actions))
            out["rewards"][t], out["terminated"][t] = step.rewards, step.terminated
            out["truncated"][t] = step.truncated
            lane.returns += step.rewards * self._signs(lane)
            lane.lengths += ~lane.ended
            ended = step.terminated | step.truncated
            for env in np.flatnonzero(ended):
                finished.append((float(lane.returns[env]), int(lane.lengths[env])))
            lane.returns[ended], lane.lengths[ended] = 0, 0
            lane.move(actions, step.obs, ended)
        return Episodes(tuple(total for total, _ in finished), tuple(length for _, length in finished))

    def _signs(self, lane: Lane) -> NDArray[np.float64] | float:
        """Returns are the first player's: what the second one wins, he loses."""
        return np.where(lane.lengths % 2, -1.0, 1.0) if self._fit.two_player else 1.0

    def _search_anew(
        self,
        turn: int,
        weights: Mapping[str, Array],
        rngs: list[np.random.Generator],
        out: Mapping[str, Array],
    ) -> None:
        wishes = wishes_of(weights, turn)
        out["start"][0] = -1
        out["stream"][:], out["number"][:] = -1, -1
        for name in ("valid", "terminated", "truncated"):
            out[name][:] = False
        if wishes is None:
            return
        for t in range(self._config.num_steps):
            rows = slice(t * self._world.num_envs, (t + 1) * self._world.num_envs)
            part = wishes.part(rows)
            legal = self._fit.legal(part.obs[:, -1])
            plan = self._planner.plan(Roots(part.obs, part.actions, part.first, legal), rngs, explores=False)
            out["stream"][t], out["number"][t] = part.stream, part.number
            out[POLICY][t], out[VALUE][t] = plan.policy, plan.result.values
            if plan.candidates is not None:
                out["candidates"][t] = plan.candidates

    def state_dict(self) -> StateTree | None:
        """Environments and where they stand; {} before the first segment; None if they cannot be saved."""
        if self._lane is None:
            return {}
        world = self._world.state_dict()
        return (
            None
            if world is None
            else {
                "world": world,
                "lane": self._lane.state_dict(),
                "start": self._start,
            }
        )

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        self._lane = None
        if state:
            self._world.load_state_dict(state["world"])
            self._lane = Lane.from_state(state["lane"])
            self._start = int(state["start"])
