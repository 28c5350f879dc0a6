"""Placement of the actors of a run on Ray nodes, and a refusal in words when the nodes cannot hold them.

Nothing here talks to Ray: nodes come in, placements go out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from offbeat.config.settings import Settings
from offbeat.errors import ConfigError
from offbeat.runtime.spec import RunSpec

Role = Literal["learner", "store", "collector", "evaluator"]
_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster and what it has in all; ``port`` is where its Ray listens.

    Example: ``Node("a1f", "10.0.0.7", {"CPU": 8.0})``.
    """

    id: str
    name: str
    total: Mapping[str, float]
    port: int = 0


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Resources that one actor needs; ``spread`` is its number among its role's nodes.

    ``key`` is the setting that asks for its resources, ``gpu_key`` for its GPUs, ``count_key`` for as many
    such actors.
    """

    component: str
    role: Role
    resources: Mapping[str, float]
    key: str
    gpu_key: str = ""
    count_key: str = ""
    spread: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of an actor: a node, and the resources it takes there."""

    node: Node
    resources: Mapping[str, float]


def requests_of(spec: RunSpec) -> list[ResourceRequest]:
    """Everything the run may start, the learner first."""
    ray = spec.settings.runtime.ray
    requests = _learner_requests(spec.settings)
    if spec.mode == "replay":
        requests.append(ResourceRequest("store", "store", ray.store_resources, "runtime.ray.store_resources"))
    requests += _collector_requests(spec.settings, spec.num_collectors)
    if spec.evaluate is not None:
        key = "runtime.ray.evaluator_resources"
        requests.append(ResourceRequest("evaluator", "evaluator", ray.evaluator_resources, key))
    return requests


def _learner_requests(settings: Settings) -> list[ResourceRequest]:
    """The learner's one node: one actor for all ranks, which are its children. Several: an actor a rank."""
    trainer, ranks = settings.trainer, settings.learner.num_ranks
    each = settings.runtime.ray.learner_resources
    gpus = trainer.n_gpus_per_node or int(trainer.device == "cuda")
    keys = ("runtime.ray.learner_resources", "trainer.n_gpus_per_node", "learner.num_ranks")
    if trainer.nnodes == 1:
        resources = {name: amount * ranks for name, amount in each.items()}
        return [ResourceRequest("learner", "learner", _with_gpus(resources, float(gpus)), *keys)]
    if ranks % trainer.nnodes:
        raise ConfigError(
            f"learner.num_ranks {ranks} does not divide by trainer.nnodes {trainer.nnodes}: change one"
        )
    on_node = ranks // trainer.nnodes
    resources = _with_gpus(each, _share(gpus, on_node))
    names = ("learner", *(f"learner_rank_{rank}" for rank in range(1, ranks)))
    return [
        ResourceRequest(name, "learner", resources, *keys, rank // on_node) for rank, name in enumerate(names)
    ]


def _collector_requests(settings: Settings, num_collectors: int) -> list[ResourceRequest]:
    nodes, gpus = settings.rollout.nnodes, settings.rollout.n_gpus_per_node
    keys = ("runtime.ray.collector_resources", "rollout.n_gpus_per_node", "runtime.num_workers")
    requests = []
    for collector in range(num_collectors):
        on_node = len(range(collector % nodes, num_collectors, nodes))
        resources = _with_gpus(settings.runtime.ray.collector_resources, _share(gpus, on_node))
        requests.append(
            ResourceRequest(f"collector_{collector}", "collector", resources, *keys, collector % nodes)
        )
    return requests


def _share(num_gpus: int, sharers: int) -> float:
    """GPUs for each of those who share a node's: whole ones, or an equal part of one that packs."""
    if num_gpus == 0:
        return 0.0
    if num_gpus >= sharers:
        return float(num_gpus // sharers)
    return math.floor(1e4 / math.ceil(sharers / num_gpus)) / 1e4


def _with_gpus(resources: Mapping[str, float], gpus: float) -> dict[str, float]:
    return {**resources, "GPU": gpus} if gpus else dict(resources)


def cpus_of(requests: Iterable[ResourceRequest]) -> int:
    """Processors that all actors together request for, rounded up."""
    return math.ceil(sum(request.resources.get("CPU", 0.0) for request in requests) - _SLACK)


def place(requests: Sequence[ResourceRequest], nodes: Sequence[Node], spec: RunSpec) -> dict[str, Placement]:
    """Give each actor a node, the first node before the others; refuse what the nodes cannot hold.

    An evaluator without room is left out: it costs evaluations beside training, not the run.
    """
    wanted = {"learner": spec.settings.trainer.nnodes, "collector": spec.settings.rollout.nnodes}
    pools: dict[Role, list[Node]] = {}
    left = {node.id: dict(node.total) for node in nodes}
    placements: dict[str, Placement] = {}
    for request in requests:
        if request.role not in pools:
            pools[request.role] = _pool(request, nodes, wanted.get(request.role, 1))
        chosen = pools[request.role][request.spread : request.spread + 1]
        room = (node for node in (*chosen, *nodes) if _fits(request.resources, left[node.id]))
        node = next(room, None)
        if node is not None:
            placements[request.component] = Placement(node, request.resources)
            for name, amount in request.resources.items():
                left[node.id][name] = left[node.id].get(name, 0.0) - amount
        elif request.role != "evaluator":
            raise ConfigError(_no_room(request, requests, nodes, len(placements)))
    return placements


def another_placement(lost: Placement, others: Iterable[Placement], nodes: Sequence[Node]) -> Placement:
    """Return a new placement when a node is gone: where most is left, or as before if nowhere is room."""
    left = {node.id: dict(node.total) for node in nodes}
    for taken in others:
        for name, amount in taken.resources.items() if taken.node.id in left else ():
            left[taken.node.id][name] = left[taken.node.id].get(name, 0.0) - amount
    fitting = [node for node in nodes if _fits(lost.resources, left[node.id])]
    best = max(fitting, key=lambda node: left[node.id].get("CPU", 0.0), default=lost.node)
    return Placement(best, lost.resources)


def _pool(request: ResourceRequest, nodes: Sequence[Node], num_nodes: int) -> list[Node]:
    """The nodes of a role: those that could hold one of its actors, in order."""
    fitting = [node for node in nodes if _fits(request.resources, node.total)]
    if request.role == "evaluator" or len(fitting) >= num_nodes:
        return fitting[:num_nodes]
    if not fitting:
        raise ConfigError(_missing(request, nodes))
    key = "trainer.nnodes" if request.role == "learner" else "rollout.nnodes"
    raise ConfigError(
        f"{key}={num_nodes} asks for {num_nodes} nodes, but Ray has {len(fitting)} that could hold "
        f"{_in_words(request.resources)}: lower {key}, or add nodes (`ray start --address=HEAD`) and set "
        "runtime.ray.address"
    )


def _fits(resources: Mapping[str, float], room: Mapping[str, float]) -> bool:
    return all(amount <= room.get(name, 0.0) + _SLACK for name, amount in resources.items())


def _missing(request: ResourceRequest, nodes: Sequence[Node]) -> str:
    """Return the error text when no node can hold even one such actor."""
    most = {
        name: max((node.total.get(name, 0.0) for node in nodes), default=0.0) for name in request.resources
    }
    lacking = [name for name, amount in request.resources.items() if amount > most[name] + _SLACK]
    lines = [
        f"{name}: {request.resources[name]:g} asked, at most {most[name]:g} on a node" for name in lacking
    ]
    if not lines:
        lines = ["no single node has all of it"]
    keys = " and ".join(dict.fromkeys(request.gpu_key if name == "GPU" else request.key for name in lacking))
    return (
        f"{request.component} asks for {_in_words(request.resources)}, which no node of Ray has "
        f"({'; '.join(lines)}). {_totals(nodes)}. Lower {keys or request.key}, or set runtime.ray.address "
        "to a cluster that has it (named resources come from `ray start --resources`)"
    )


def _no_room(
    request: ResourceRequest, requests: Sequence[ResourceRequest], nodes: Sequence[Node], placed: int
) -> str:
    alike = sum(other.role == request.role for other in requests)
    keys = " or ".join(
        key for key in (request.count_key, request.key, "GPU" in request.resources and request.gpu_key) if key
    )
    return (
        f"{alike} x {request.role} with {_in_words(request.resources)} each do not fit: there is room for "
        f"{placed} actors of the run, and none for {request.component}. {_totals(nodes)}. Lower {keys}, "
        "or add nodes"
    )


def _totals(nodes: Sequence[Node]) -> str:
    listed = (f"{node.name}: {_in_words(_plain(node.total))}" for node in nodes)
    return f"Ray has {len(nodes)} node(s): {'; '.join(listed)}"


def _plain(total: Mapping[str, float]) -> dict[str, float]:
    """Without what Ray adds for itself."""
    hidden = ("node:", "memory", "object_store_memory", "accelerator_type:")
    return {name: amount for name, amount in total.items() if not name.startswith(hidden)}


def _in_words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items()) or "nothing"
