"""Searching with a transformer: what each node of a tree remembers."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.algorithms.muzero.fitting import Fit
from offbeat.algorithms.muzero.lane import Roots
from offbeat.algorithms.muzero.planning import Planner
from offbeat.models.unizero import TransformerSpec, UniZeroNetwork, Window
from offbeat.models.world_spec import Computing
from offbeat.search import SearchConfig


class UniZeroPlanner(Planner):
    """Keeps, for each node of each tree, the keys and values of the last tokens on the way there.

    Nothing is kept from one search to the next: a root reads its whole context anew, so that no key of
    earlier weights can be left.
    """

    _network: UniZeroNetwork

    def __init__(
        self,
        network: UniZeroNetwork,
        fit: Fit,
        transformer: TransformerSpec,
        config: SearchConfig,
        num_trees: int,
        window_tokens: int,
        device: torch.device,
        how: Computing,
    ) -> None:
        super().__init__(network, fit, config, num_trees, device, how)
        self._size = window_tokens
        width = fit.spec.latent // transformer.heads
        shape = (transformer.layers, 2, transformer.heads, window_tokens, width)
        lead = (config.num_nodes, num_trees)
        dtype = torch.bfloat16 if how.precision == "bfloat16" else torch.float32
        self._kept = torch.zeros((*lead, *shape), dtype=dtype, device=device)
        self._counts = torch.zeros(lead, dtype=torch.long, device=device)
        self._positions = torch.zeros(lead, dtype=torch.long, device=device)

    def _begin(self, roots: Roots, node: Tensor) -> tuple[Tensor, Tensor]:
        network = self._network
        latents = network.encode(self._see(roots.obs))
        actions = torch.from_numpy(roots.actions).to(self._device)
        first = torch.from_numpy(roots.first).to(self._device)
        state, window = network.look(latents, actions, first, self._size)
        return self._judged(state, window, node)

    def _imagine(self, parents: Tensor, actions: Tensor, node: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        network, lanes = self._network, self._lanes
        before = self._kept[parents, lanes]
        counts, positions = self._counts[parents, lanes], self._positions[parents, lanes]
        window = Window(before, before[..., :0, :], counts, positions)
        state, window = network.go_on(network.embed(actions), window)
        rewards = network.rewards.mean(network.reward(state))
        state, window = network.go_on(network.latent(state), window)
        return (*self._judged(state, window, node), rewards)

    def _judged(self, state: Tensor, window: Window, node: Tensor) -> tuple[Tensor, Tensor]:
        window = window.settled()
        self._kept.index_copy_(0, node, window.keys_values[None].to(self._kept.dtype))
        self._counts.index_copy_(0, node, window.count[None])
        self._positions.index_copy_(0, node, window.position[None])
        return self._network.policy(state), self._network.values.mean(self._network.value(state))
