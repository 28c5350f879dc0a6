"""A prioritized replay in a Ray actor of its own, for several processes.

Where one process trains, the replay is best kept in it: a draw from here is a message there and back, and the
batch is copied on the way. Ray is imported when a shared replay is started, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from offbeat.errors import ConfigError, LearnerLost
from offbeat.replay.prioritized import Handles, PrioritizedReplay, Sample
from offbeat.types import Array, ArraySpec, StateTree

_GIVE_IT_UP = "or keep the replay in the learner's process (algorithm.shared_buffer=false)"


class Replay(Protocol):
    """What a learner asks of a replay, wherever that lives; see `PrioritizedReplay`."""

    def __len__(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Number of items that are kept."""
        ...

    def add(
        self, items: Mapping[str, Array], versions: ArrayLike, priorities: ArrayLike | None = None
    ) -> Handles:
        """Write items over the oldest ones."""
        ...

    def update(self, handles: Handles, priorities: ArrayLike) -> int:
        """Give items new priorities; how many were still there."""
        ...

    def expire(self, before_version: int) -> int:
        """Let go of items with an older version; how many those were."""
        ...

    def sample(self, rng: np.random.Generator, batch_size: int, *, beta: float) -> Sample:
        """Draw items by priority."""
        ...

    def sample_uniform(self, rng: np.random.Generator, batch_size: int) -> Sample:
        """Draw items with equal chances."""
        ...

    def state_dict(self) -> StateTree:
        """All that a checkpoint needs."""
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave."""
        ...


class SharedReplayBuffer:
    """A `PrioritizedReplay` in a Ray actor; every process that has this object uses the same one.

    It has the methods of `PrioritizedReplay` and gives the same results, bit for bit: draws depend on the
    generator handed in, which goes on here as it would have there. The object can be sent to other actors and
    tasks. The replay ends with the process that started it, with the last of these objects, or with `close`.

    Example::

        replay = SharedReplayBuffer.start({"obs": ArraySpec((64,), "float32")}, capacity=100_000)
        ray.get([add_some.remote(replay) for _ in range(4)])
        sample = replay.sample(rng, 128, beta=0.4)
    """

    def __init__(self, actor: Any, capacity: int, timeout_s: float) -> None:
        self.capacity = capacity
        self._actor = actor
        self._timeout_s = timeout_s

    @classmethod
    def start(
        cls,
        spec: Mapping[str, ArraySpec],
        capacity: int,
        *,
        alpha: float = 0.6,
        eps: float = 1e-6,
        name: str | None = None,
        resources: Mapping[str, float] | None = None,
        timeout_s: float = 30.0,
        start_timeout_s: float = 60.0,
    ) -> SharedReplayBuffer:
        """Start an empty replay, or join the one of this ``name``.

        Args:
            spec: shape and dtype of each array of an item, as for `PrioritizedReplay`.
            capacity: number of items that are kept.
            alpha: how much priorities count, from 0 to 1.
            eps: added to every priority.
            name: whoever comes first with a name starts the replay, the others of the same Ray job join it.
            resources: what the actor asks of Ray, such as ``{"CPU": 1}``; nothing by default.
            timeout_s: longest wait for an answer, in seconds.
            start_timeout_s: longest wait for the actor to start, in seconds.
        """
        wanted = _checked_settings(spec, capacity, alpha, eps)
        ray = _import_ray()
        if not ray.is_initialized():
            raise ConfigError("a shared replay lives in Ray: call ray.init() first, or use PrioritizedReplay")
        asked = dict(resources or {})
        options = _options(name, asked)
        actor = ray.remote(_ReplayActor).options(**options).remote(dict(spec), capacity, alpha, eps)
        shared = cls(actor, capacity, start_timeout_s)
        try:
            found = shared._ask("settings")
        except LearnerLost as error:
            shared.close()
            raise LearnerLost(
                f"the shared replay did not start within {start_timeout_s:g} s: it asks Ray for"
                f" {asked or 'nothing'} (runtime.ray.store_resources), free are {_free(asked)}. Lower that,"
                f" allow more time (runtime.start_timeout_s), {_GIVE_IT_UP}; {error}"
            ) from error
        shared._timeout_s = timeout_s
        if found != wanted:
            raise ConfigError(
                f"the replay named {name!r} has the settings {found}, and not {wanted}: give both the same,"
                " or another name"
            )
        return shared

    def close(self) -> None:
        """End the replay, for all who use it."""
        _import_ray().kill(self._actor, no_restart=True)

    def __len__(self) -> int:
        return int(self._ask("count"))

    def add(
        self, items: Mapping[str, Array], versions: ArrayLike, priorities: ArrayLike | None = None
    ) -> Handles:
        """Write items over the oldest ones; see `PrioritizedReplay.add`."""
        handles: Handles = self._ask("add", dict(items), versions, priorities)
        return handles

    def update(self, handles: Handles, priorities: ArrayLike) -> int:
        """Give items new priorities; see `PrioritizedReplay.update`."""
        return int(self._ask("update", handles, priorities))

    def expire(self, before_version: int) -> int:
        """Let go of items with a version below ``before_version``; return how many those were."""
        return int(self._ask("expire", before_version))

    def sample(self, rng: np.random.Generator, batch_size: int, *, beta: float) -> Sample:
        """Draw items by priority; see `PrioritizedReplay.sample`."""
        return self._draw(rng, batch_size, beta)

    def sample_uniform(self, rng: np.random.Generator, batch_size: int) -> Sample:
        """Draw items with equal chances; see `PrioritizedReplay.sample_uniform`."""
        return self._draw(rng, batch_size, None)

    def state_dict(self) -> StateTree:
        """All that a checkpoint needs, that of a `PrioritizedReplay`; its arrays cannot be written."""
        return self._ask("state_dict")

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave, here or by a `PrioritizedReplay`; whatever was there is gone."""
        self._ask("load_state_dict", state)

    def _draw(self, rng: np.random.Generator, batch_size: int, beta: float | None) -> Sample:
        """Draw with a copy of the generator, which then goes on where the copy stands."""
        sample, state = self._ask("draw", rng, batch_size, beta)
        rng.bit_generator.state = state
        return _writable(sample)

    def _ask(self, method: str, *args: Any) -> Any:
        exceptions = _import_ray().exceptions
        try:
            return _import_ray().get(getattr(self._actor, method).remote(*args), timeout=self._timeout_s)
        except exceptions.GetTimeoutError:
            raise LearnerLost(
                f"the shared replay did not answer `{method}` within {self._timeout_s:g} s"
                f" (async_training.sync_timeout): raise that, {_GIVE_IT_UP}"
            ) from None
        except exceptions.RayTaskError as error:
            raise error.cause from None
        except exceptions.RayError as error:
            text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise LearnerLost(
                f"the shared replay is gone, or its node: {text.strip()} Its contents are those of the newest"
                " checkpoint"
            ) from error


class _ReplayActor:
    """The replay in its process. Ray lets one call in at a time."""

    def __init__(self, spec: Mapping[str, ArraySpec], capacity: int, alpha: float, eps: float) -> None:
        _warm_up()
        self._replay = PrioritizedReplay(spec, capacity, alpha=alpha, eps=eps)
        self._settings = self._replay.state_dict()["settings"]

    def settings(self) -> StateTree:
        return self._settings

    def count(self) -> int:
        return len(self._replay)

    def add(self, items: Mapping[str, Array], versions: ArrayLike, priorities: ArrayLike | None) -> Handles:
        return self._replay.add(items, versions, priorities)

    def update(self, handles: Handles, priorities: ArrayLike) -> int:
        return self._replay.update(handles, priorities)

    def expire(self, before_version: int) -> int:
        return self._replay.expire(before_version)

    def draw(
        self, rng: np.random.Generator, batch_size: int, beta: float | None
    ) -> tuple[Sample, Mapping[str, Any]]:
        if beta is None:
            sample = self._replay.sample_uniform(rng, batch_size)
        else:
            sample = self._replay.sample(rng, batch_size, beta=beta)
        return sample, rng.bit_generator.state

    def state_dict(self) -> StateTree:
        return self._replay.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        self._replay.load_state_dict(state)


def is_ray_actor() -> bool:
    """Whether this process is a Ray actor, where a shared replay can be started that ends with it."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and bool(ray.get_runtime_context().get_actor_id())


def _checked_settings(
    spec: Mapping[str, ArraySpec], capacity: int, alpha: float, eps: float
) -> dict[str, StateTree]:
    """The settings as a replay keeps them; what it would refuse is refused here, where the mistake is."""
    small = PrioritizedReplay(spec, min(capacity, 1), alpha=alpha, eps=eps)
    return {**small.state_dict()["settings"], "capacity": capacity}


def _warm_up() -> None:
    """Compile what numba compiles before anybody waits for an answer."""
    replay = PrioritizedReplay({"item": ArraySpec((), "float32")}, 2)
    replay.add({"item": np.zeros(2, np.float32)}, 0)
    sample = replay.sample(np.random.default_rng(0), 2, beta=0.5)
    replay.update(sample.handles, np.ones(2))


def _writable(sample: Sample) -> Sample:
    """What Ray gives lies in memory that others may read: the caller gets copies."""
    items = {name: np.array(array) for name, array in sample.items.items()}
    handles = Handles(np.array(sample.handles.index), np.array(sample.handles.generation))
    rest = (np.array(sample.weights), np.array(sample.versions), np.array(sample.probabilities))
    return Sample(items, handles, *rest)


def _options(name: str | None, resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options of the actor: on this node where that has room."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    named = dict(resources)
    here = _import_ray().get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "num_cpus": named.pop("CPU", 0.0),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True),
        "max_restarts": 0,  # a new one would be empty
    }
    if "memory" in named:
        options["memory"] = named.pop("memory")
    if name is not None:
        options |= {"name": name, "get_if_exists": True}
    return {**options, "resources": named}


def _free(resources: Mapping[str, float]) -> dict[str, float]:
    free = _import_ray().available_resources()
    return {name: free.get(name, 0.0) for name in resources}


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError('a shared replay needs Ray: pip install "offbeat[ray]"') from None
    return ray
