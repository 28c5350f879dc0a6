"""Everything that is recorded, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import util
from pathlib import Path

from tests.net.incidents import INCIDENTS, record_incident
from tests.net.recording import Record, record_recipe
from tests.net.small import NEEDS, recipes

EVALUATES_BESIDE = "cartpole-ppo-async+eval"
"""A recipe as it comes in one thing: evaluation goes on beside training."""


def subjects() -> dict[str, Callable[[Path], Record]]:
    """Functions that record a subject in a directory that does not exist yet."""
    runs = {recipe: partial(record_recipe, recipe) for recipe in recipes()}
    beside = {"async_training.enable_async_eval": True}
    eval_beside = partial(record_recipe, "cartpole-ppo-async", changes=beside)
    incidents = {incident(name): partial(record_incident, name) for name in INCIDENTS}
    return {**runs, EVALUATES_BESIDE: eval_beside, **incidents}


def incident(name: str) -> str:
    """The name of an incident's file."""
    return f"incident-{name}"


def missing_package(subject: str) -> str | None:
    """The package that a subject needs and that is not installed."""
    package = NEEDS.get(subject)
    return package if package is not None and util.find_spec(package) is None else None
