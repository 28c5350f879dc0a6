"""Batched Monte-Carlo tree search over learned models: MuZero's pUCT and Gumbel MuZero."""

from offbeat.search.config import SearchConfig
from offbeat.search.result import SearchResult
from offbeat.search.rules import draw_noise, mix_priors
from offbeat.search.trees import ModelStep, Trees, search

__all__ = [
    "ModelStep",
    "SearchConfig",
    "SearchResult",
    "Trees",
    "draw_noise",
    "mix_priors",
    "search",
]
