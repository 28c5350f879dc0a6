"""What is kept of a step, and what a segment consists of. No torch."""

from __future__ import annotations

from offbeat.algorithms.muzero.fitting import Fit
from offbeat.types import ArraySpec

POLICY, VALUE = "policy", "value"
REFRESHED = (POLICY, VALUE)
"""What a search says of a step, and another one may say better."""


def step_spec(fit: Fit) -> dict[str, ArraySpec]:
    """Arrays of one step.

    ``obs`` is what was seen before it, ``policy`` and ``value`` what the search found there. The policy is
    over all actions; where these are continuous, over the ``candidates`` ``[slots, size]`` that the tree
    chose among. After an episode's end comes a step that is not ``valid``: it shows what was seen last, and
    its action is ignored.
    """
    spec = fit.spec
    actions = ArraySpec((), "int64") if spec.num_actions else ArraySpec((spec.action_size,), "float32")
    found = {
        "obs": ArraySpec(spec.observation.shape, spec.observation.dtype),
        "actions": actions,
        "rewards": ArraySpec((), "float32"),
        "terminated": ArraySpec((), "bool"),
        "truncated": ArraySpec((), "bool"),
        "valid": ArraySpec((), "bool"),
        POLICY: ArraySpec((spec.num_actions or fit.num_slots,), "float32"),
        VALUE: ArraySpec((), "float32"),
    }
    if not spec.num_actions:
        found["candidates"] = ArraySpec((fit.num_slots, spec.action_size), "float32")
    return found


def segment_spec(fit: Fit, num_steps: int, num_envs: int) -> dict[str, ArraySpec]:
    """Arrays of a segment: ``num_steps`` steps of each environment, or so many steps searched anew.

    ``is_new`` says which; ``start`` names the first step among all of the environments: a segment that goes
    on where another ended starts ``num_steps`` later. Steps searched anew have ``stream`` and ``number``, -1
    where there was nothing to do.
    """
    lead = (num_steps, num_envs)
    steps = {name: ArraySpec((*lead, *spec.shape), spec.dtype) for name, spec in step_spec(fit).items()}
    return {
        **steps,
        "stream": ArraySpec(lead, "int64"),
        "number": ArraySpec(lead, "int64"),
        "is_new": ArraySpec((1,), "bool"),
        "start": ArraySpec((1,), "int64"),
    }
