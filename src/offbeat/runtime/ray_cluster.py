"""The Ray that a run uses: one that is there already, a cluster to join, or one of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ray

from offbeat.config.models import RayConfig
from offbeat.errors import ConfigError
from offbeat.runtime.ray_actors import Actor, ProcessEnv
from offbeat.runtime.ray_placement import Node, Placement
from offbeat.runtime.shared import pickled_role

_BECAUSE = ("The actor is dead because", "The actor died because")
_CONNECT_TIMEOUT_S = 0.5
_JOIN_TIMEOUT_S = 5.0
STACK_WAIT_S = 1.0
LIFE, CARRY, STORE, ACCEPT = "life", "carry", "store", "accept"
"""Concurrency groups: what an actor answers beside its work. To give is not to wait for what is carried.

One thread passes messages on, so that they keep their order.
"""
_GROUPS = {LIFE: 2, CARRY: 4, STORE: 2, ACCEPT: 1}
_CLASSES: dict[type[Actor], Any] = {}
# A node that does not answer for about 5 s is dead; Ray's own default is about 30 s.
_SEES_DEATH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}


class Cluster:
    """Starts or joins Ray, and ends what it started."""

    def __init__(self) -> None:
        self._is_ours = False
        self.is_started = False
        """True when this is a Ray of the run's own."""

    def open(self, config: RayConfig, num_cpus: int) -> None:
        """Use the Ray that is there, join ``config.address``, or start one with ``num_cpus`` or more."""
        if ray.is_initialized():
            _check_in_use(config.address)
            return
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if config.address is None:
            options |= _own_ray(config, num_cpus)
        else:
            _check_address(config.address)
            options |= {"address": config.address}
        with _own_signal_handler(), _without_usage_reports():
            try:
                ray.init(**options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                own = f"a Ray of its own could not be started: {error}"
                address = config.address
                raise ConfigError(own if address is None else _no_ray_at(address, error)) from error
        self._is_ours, self.is_started = True, config.address is None

    def nodes(self) -> list[Node]:
        """The nodes that are alive, the driver's first; one that does not answer is not among them."""
        here = ray.get_runtime_context().get_node_id()
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = [
            Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], node["NodeManagerPort"])
            for node in alive
        ]
        nodes = [node for node in nodes if node.id == here or is_reachable(node)]
        return sorted(nodes, key=lambda node: (node.id != here, node.name, node.id))

    def close(self) -> None:
        """Leave Ray, and end it if it was started here."""
        if self._is_ours:
            self._is_ours = self.is_started = False
            ray.shutdown()


def _own_ray(config: RayConfig, num_cpus: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "address": "local",
        "_node_ip_address": "127.0.0.1",  # nobody else is to reach it
        "include_dashboard": False,
        # Actors of a run are few and wait for each other: more of them than cores must not wait for Ray.
        "num_cpus": max(num_cpus, os.cpu_count() or 1),
        "_system_config": _SEES_DEATH,
    }
    if config.object_store_mb is not None:
        options["object_store_memory"] = config.object_store_mb * 2**20
    return options


def _check_in_use(address: str | None) -> None:
    """Refuse an address that is not the one of the Ray that this process uses already."""
    in_use = str(ray.get_runtime_context().gcs_address)
    if address in (None, "auto", in_use) or _resolved(str(address)) == _resolved(in_use):
        return
    raise ConfigError(
        f"runtime.ray.address={address}, but this process uses the Ray at {in_use} already: call "
        "ray.shutdown() before the run, or leave runtime.ray.address out to use that one"
    )


def _resolved(address: str) -> tuple[str, str]:
    """Host and port, with a number for the host; this machine has one however it is called."""
    host, _, port = address.rpartition(":")
    try:
        number = socket.gethostbyname(host)
    except OSError:
        return host, port
    return (ray.util.get_node_ip_address() if number.startswith("127.") else number), port


def _check_address(address: str) -> None:
    """Check at once that the address answers: Ray itself would keep trying for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        with socket.create_connection((host.removeprefix("ray://"), int(port)), _JOIN_TIMEOUT_S):
            return
    except OSError as error:
        raise ConfigError(_no_ray_at(address, error)) from error


def _no_ray_at(address: str, error: Exception) -> str:
    return (
        f"runtime.ray.address={address}: no Ray could be joined there ({error}). Start one with "
        "`ray start --head`, or leave runtime.ray.address out for one on this machine"
    )


@contextlib.contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Ray takes SIGTERM over when it starts; what it means is the run's to say."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


@contextlib.contextmanager
def _without_usage_reports() -> Iterator[None]:
    """Disable usage statistics for a run's own Ray, unless the environment says otherwise."""
    name = "RAY_USAGE_STATS_ENABLED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


def make_actor(kind: type[Actor], where: Placement, env: ProcessEnv, payload: Any) -> Any:
    """Start an actor on its node, or on another when that is gone; return its handle."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    packed = pickled_role(payload, "a role", "a Ray actor")
    named = dict(where.resources)
    options: dict[str, Any] = {"num_cpus": named.pop("CPU", 0.0), "num_gpus": named.pop("GPU", 0.0)}
    if "memory" in named:
        options["memory"] = named.pop("memory")
    options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(where.node.id, soft=True)
    options |= {"max_restarts": 0, "max_task_retries": 0}  # the driver decides what is replaced
    return _actor_class(kind).options(**options, resources=named).remote(env, packed)


def _actor_class(kind: type[Actor]) -> Any:
    """One class of Ray's for all actors of a kind: it is sent to the cluster once, not with every actor."""
    if kind not in _CLASSES:
        _CLASSES[kind] = ray.remote(concurrency_groups=_GROUPS)(kind)
    return _CLASSES[kind]


def kill_actor(handle: Any) -> None:
    """End an actor at once; nothing happens if it has ended."""
    with contextlib.suppress(Exception):  # Ray itself may be gone
        ray.kill(handle, no_restart=True)


def is_reachable(node: Node) -> bool:
    """Return True if a node's Ray answers: the cluster itself takes seconds to notice that one has died."""
    try:
        with socket.create_connection((node.name, node.port), _CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def cause_of(error: BaseException) -> str:
    """The cause of an error, out of the page that Ray writes about it."""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "it cannot be reached (its node or process may have died)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith(_BECAUSE)), "")
    if not told:
        return lines[0] if lines else type(error).__name__
    if "Worker unexpectedly exits" in told:
        return "its process ended unexpectedly (killed, out of memory, or crashed)"
    return told.partition(" because ")[2]
