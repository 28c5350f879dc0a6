"""Searching with a model: what stands between networks and trees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.algorithms.muzero.config import planning_config
from offbeat.algorithms.muzero.fitting import Fit
from offbeat.algorithms.muzero.lane import Roots
from offbeat.config.models import RunConfig
from offbeat.models.computing import autocast, cast_weights, compiled, enable_tf32
from offbeat.models.muzero import MuZeroNetwork
from offbeat.models.ranks import choose_device
from offbeat.models.world_spec import Computing, WorldSpec
from offbeat.search import SearchConfig, SearchResult, Trees, draw_noise, mix_priors, search
from offbeat.types import Array

Floats = NDArray[np.float32]
_ONE_RECORDS = Lock()
"""Collectors that are threads of one process record one after the other."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What B searches found.

    ``policy`` is over all actions ``[B, A]``; or over the ``candidates`` ``[B, slots, size]`` where actions
    are continuous.
    """

    result: SearchResult
    policy: Floats
    drawn: Array | None
    """Actions that trees chose among, ``[B, slots, ...]``; None: all."""

    @property
    def candidates(self) -> Array | None:
        """Continuous actions that trees chose among."""
        return self.drawn if self.drawn is not None and self.drawn.ndim == 3 else None

    def act(self, temperature: float, rngs: Sequence[np.random.Generator] | None) -> Array:
        """An action for each root: its number, or the numbers it consists of."""
        chosen = self.result.act(temperature, rngs)
        return chosen if self.drawn is None else self.drawn[np.arange(len(chosen)), chosen]


class Planner(ABC):
    """Searches from many roots at once with one network; weights are loaded by name.

    One call of the network serves all trees. What it keeps of a node is found by the node's number. On a GPU
    that call is recorded once and then played back: small steps would else wait for their launches.
    """

    def __init__(
        self,
        network: nn.Module,
        fit: Fit,
        config: SearchConfig,
        num_trees: int,
        device: torch.device,
        how: Computing,
    ) -> None:
        self._network = network.to(device).eval()
        cast_weights(self._network, how)
        self._fit, self._device, self._how, self.num_trees = fit, device, how, num_trees
        self._trees = Trees(config, num_trees, fit.num_slots)
        self._lanes = torch.arange(num_trees, device=device)
        # Actions that were drawn for each node, and the randomness behind them.
        self._drawn = self._noise = None
        if fit.is_sampled:
            shape = (config.num_nodes, num_trees, fit.num_slots)
            if fit.spec.num_actions:
                self._drawn = torch.zeros(shape, dtype=torch.long, device=device)
                self._noise = torch.zeros(shape, device=device)
            else:
                self._drawn = torch.zeros((*shape, fit.spec.action_size), device=device)
                self._noise = torch.zeros_like(self._drawn)
        # What a step of the model is told, parents, actions and the new node, in one transfer; on a GPU what
        # it says comes back in one, too.
        on_gpu = device.type == "cuda"
        self._told = torch.zeros(2 * num_trees + 1, dtype=torch.long, pin_memory=on_gpu)
        self._inputs = self._told.to(device)
        self._said = torch.zeros((num_trees, 2 + fit.num_slots), pin_memory=True) if on_gpu else None
        self._recording: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights; nothing computed with earlier ones is used any more."""
        with torch.no_grad():
            for name, parameter in self._network.named_parameters():
                parameter.copy_(torch.from_numpy(np.asarray(weights[name])))

    @torch.inference_mode()
    def plan(self, roots: Roots, rngs: Sequence[np.random.Generator], *, explores: bool) -> Plan:
        """Search from all roots; randomness of each tree comes from its own generator."""
        seeds = np.array([rng.integers(2**64, dtype=np.uint64) for rng in rngs], np.uint64)
        if self._noise is not None:
            self._noise.copy_(self._draw(rngs))  # in place: a recording reads it there
        with autocast(self._how, self._device):
            node = torch.zeros(1, dtype=torch.long, device=self._device)
            outputs, values = self._begin(roots, node)
        logits = self._choices(self._allowed(outputs.float(), roots), node).cpu().numpy()
        legal = logits > -np.inf
        noise = draw_noise(self._trees.config, rngs, legal) if explores else None
        found = search(
            self._step,
            self._trees,
            logits,
            values.float().cpu().numpy(),
            seeds=seeds,
            legal=legal,
            noise=noise,
        )
        if self._drawn is None:
            return Plan(found, found.policy, None)
        drawn = self._drawn[0].cpu().numpy().copy()
        if not self._fit.spec.num_actions:
            return Plan(found, found.policy, drawn)
        policy = np.zeros((self.num_trees, self._fit.spec.num_actions), np.float32)
        np.add.at(policy, (np.arange(self.num_trees)[:, None], drawn), found.policy)
        return Plan(found, policy, drawn)

    def _allowed(self, outputs: Tensor, roots: Roots) -> Tensor:
        """The policies of roots with what somebody else makes of them, without what is not legal."""
        if roots.prior is not None:
            if not self._fit.spec.num_actions:
                raise ValueError("a prior from elsewhere is over numbered actions; these are continuous")
            logits = mix_priors(outputs.cpu().numpy(), roots.prior, roots.prior_weight, roots.legal)
            return torch.from_numpy(logits).to(self._device)
        if roots.legal is None:
            return outputs
        return outputs.masked_fill(torch.from_numpy(~roots.legal).to(self._device), -torch.inf)

    def _step(self, parents: Array, actions: Array, node: int) -> tuple[Array, Array, Array]:
        told = self._told.numpy()
        told[: self.num_trees], told[self.num_trees : -1], told[-1] = parents, actions, node
        if self._said is None:
            self._inputs.copy_(self._told)
            said = self._ahead().numpy()
        else:
            self._inputs.copy_(self._told, non_blocking=True)
            self._said.copy_(self._play_back(), non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
            said = self._said.numpy()
        return said[:, 0], said[:, 1], said[:, 2:]

    def _ahead(self) -> Tensor:
        """One step of the model as it was told: rewards, values and logits side by side."""
        above, slots = self._inputs[: self.num_trees], self._inputs[self.num_trees : -1]
        node = self._inputs[-1:]
        taken = slots if self._drawn is None else self._drawn[above, self._lanes, slots]
        with autocast(self._how, self._device):
            outputs, values, rewards = self._imagine(above, taken, node)
        logits = self._choices(outputs.float(), node)
        return torch.cat([rewards.float()[:, None], values.float()[:, None], logits], 1)

    def _play_back(self) -> Tensor:
        """The same on a GPU, recorded the first time."""
        if self._recording is None:
            with _ONE_RECORDS, torch.cuda.device(self._device):
                self._recording = self._record()
        graph, found = self._recording
        graph.replay()
        return found

    def _record(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph, ahead = torch.cuda.CUDAGraph(), compiled(self._ahead, self._how, self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries set themselves up at first use, which cannot be recorded
                ahead()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = ahead()
        return graph, found

    def _draw(self, rngs: Sequence[np.random.Generator]) -> Tensor:
        """Noise for the actions that nodes choose among, of each tree from its own generator."""
        assert self._noise is not None
        num_nodes, _, *shape = self._noise.shape
        size = (num_nodes, *shape)
        if self._fit.spec.num_actions:
            return torch.from_numpy(np.stack([rng.random(size, np.float32) for rng in rngs], 1))
        return torch.from_numpy(np.stack([rng.standard_normal(size, np.float32) for rng in rngs], 1))

    def _choices(self, outputs: Tensor, node: Tensor) -> Tensor:
        """Logits ``[B, slots]`` for the tree, of all actions or of some that are drawn from the policy."""
        if self._drawn is None or self._noise is None:
            return outputs
        noise = self._noise.index_select(0, node)[0]
        if self._fit.spec.num_actions:
            drawn, logits = draw_actions(outputs, noise)
        else:
            mean, deviation = gaussian(outputs)
            drawn = (mean[:, None] + deviation[:, None] * noise).clamp(-1, 1)
            logits = torch.zeros_like(drawn[..., 0])  # drawn from the policy: each is as good as the next
        self._drawn.index_copy_(0, node, drawn[None])
        return logits

    def _see(self, obs: Array) -> Tensor:
        return observed(obs, self._fit.spec, self._device)

    @abstractmethod
    def _begin(self, roots: Roots, node: Tensor) -> tuple[Tensor, Tensor]:
        """Policies and values of the roots, which become ``node`` ``[1]``."""

    @abstractmethod
    def _imagine(self, parents: Tensor, actions: Tensor, node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Policies, values and rewards of what follows actions at nodes, which become ``node`` ``[1]``."""


class MuZeroPlanner(Planner):
    """Keeps the latent of each node."""

    _network: MuZeroNetwork

    def __init__(
        self,
        network: MuZeroNetwork,
        fit: Fit,
        config: SearchConfig,
        num_trees: int,
        device: torch.device,
        how: Computing,
    ) -> None:
        super().__init__(network, fit, config, num_trees, device, how)
        shape = (config.num_nodes, num_trees, *fit.spec.latent_shape)
        self._latents = torch.zeros(shape, device=device)

    def _begin(self, roots: Roots, node: Tensor) -> tuple[Tensor, Tensor]:
        return self._judged(self._network.encode(self._see(roots.obs[:, -1])), node)

    def _imagine(self, parents: Tensor, actions: Tensor, node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latent, reward = self._network.imagine(self._latents[parents, self._lanes], actions)
        return (*self._judged(latent, node), self._network.rewards.mean(reward))

    def _judged(self, latent: Tensor, node: Tensor) -> tuple[Tensor, Tensor]:
        self._latents.index_copy_(0, node, latent[None].float())
        policy, value = self._network.judge(latent)
        return policy, self._network.values.mean(value)


def ready_device(config: RunConfig, lane: int, *, is_eval: bool) -> torch.device:
    """Where the model of a collector or evaluator computes; torch is made ready for it.

    Collectors have the GPUs in turn. Who evaluates or plays may be on a machine without one.
    """
    torch.set_num_threads(config.runtime.worker_torch_threads)
    enable_tf32(planning_config(config).network.computing)
    wanted = config.rollout.device
    wanted = "auto" if is_eval and wanted == "cuda" else wanted
    return choose_device(wanted, lane, key="rollout.device")


def draw_actions(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Actions ``[B, K]`` drawn from policies ``[B, A]`` by ``uniform`` ``[B, K]``, and their log priors.

    The prior of an action is how often it was drawn; in places where it is drawn again it has none.
    """
    ends = logits.softmax(-1).cumsum(-1)
    last = (logits > -torch.inf).long().mul(torch.arange(logits.shape[1], device=logits.device)).amax(-1)
    drawn = torch.searchsorted(ends, uniform * ends[:, -1:], right=True).minimum(last[:, None])
    same = drawn[:, :, None] == drawn[:, None, :]
    is_again = same.tril(-1).any(-1)
    return drawn, same.sum(-1).float().log().masked_fill(is_again, -torch.inf)


def gaussian(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Means within -1 and 1 and deviations of a continuous policy's outputs ``[..., 2 size]``."""
    mean, spread = outputs.chunk(2, -1)
    return mean.tanh(), torch.nn.functional.softplus(spread) + 0.1


def observed(obs: Array, spec: WorldSpec, device: torch.device) -> Tensor:
    """Stored observations ``[..., *shape]`` as the networks see them: floats, channels first."""
    seen = torch.from_numpy(np.ascontiguousarray(obs)).to(device).to(torch.float32)
    if spec.kind == "conv" and not spec.is_channel_first:
        seen = seen.movedim(-1, -3)
    return seen * spec.observation.scale if spec.observation.scale != 1.0 else seen
