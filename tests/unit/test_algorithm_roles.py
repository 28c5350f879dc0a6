"""Roles of all algorithms."""

from __future__ import annotations

import pickle

import pytest

import offbeat
from offbeat.run.start import make_roles

RECIPES = [
    *("cartpole-ppo", "cartpole-ppo-per", "cartpole-muzero", "cartpole-unizero"),
    *("alice-bob-mappo", "alice-bob-hmasd"),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_roles_are_pickled_without_cloudpickle(recipe: str) -> None:
    roles = make_roles(offbeat.load_config(recipe))
    pickle.loads(pickle.dumps(roles))
