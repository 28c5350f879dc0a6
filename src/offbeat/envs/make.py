"""From a configuration to a world: finding the environment, choosing how to step many of them."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, registry
from gymnasium.vector import VectorEnv

from offbeat.config.code import import_named, is_env_factory
from offbeat.envs.checks import check_spaces
from offbeat.envs.loop import LoopWorld
from offbeat.envs.user_wrappers import wrapped
from offbeat.envs.vector import VectorWorld, resets_at_next_step
from offbeat.envs.world import World
from offbeat.envs.wrappers import Flat, MinAtarImages, OneHot
from offbeat.errors import EnvError

if TYPE_CHECKING:
    from offbeat.config.models import EnvConfig

_PETTING_ZOOS = ("pettingzoo", "mpe2")
AnyEnv = gymnasium.Env[Any, Any]
AnyVectorEnv = VectorEnv[Any, Any, Any]

MIN_VECTOR_ENVS = 6
"""Under ``vectorize: auto``, fewer environments than this are looped over: a step of numpy's CartPole costs
as much as six steps of the plain one, however few environments it holds."""
_EXTRAS = {"minigrid": "minigrid", "minatar": "minatar", "lbforaging": "marl", "rware": "marl"}
"""Packages that register environments, and the extra that installs each."""
_INSTALL = {
    "MinAtar/": 'pip install "offbeat[minatar]"',
    "MiniGrid-": 'pip install "offbeat[minigrid]", and write the id as minigrid:MiniGrid-...',
    "LunarLander": 'pip install "offbeat[box2d]"',
    "BipedalWalker": 'pip install "offbeat[box2d]"',
    "CarRacing": 'pip install "offbeat[box2d]"',
    "ALE/": "pip install ale-py, and write the id as ale_py:ALE/...",
}


def make_world(config: EnvConfig, num_envs: int) -> World:
    """Make a world of ``num_envs`` environments as the configuration says.

    ``config.id`` is a Gymnasium id (``CartPole-v1``), an id with the module that registers it
    (``my_package:MyEnv-v0``), or a class of environments (``my_package.envs:MyEnv``) or function that is
    declared to make some by `offbeat.env_factory`.

    Example: ``make_world(EnvConfig(id="CartPole-v1"), 8).reset(seed=1)`` is an array ``[8, 4]``.
    """
    if num_envs < 1:
        raise EnvError(f"a world needs at least one environment, not {num_envs}; raise env.num_envs")
    spec = find_spec(config.id)
    if config.vectorize == "auto" and _prefers_vector(spec, config, num_envs):
        env = _make_vector(spec, config, num_envs)
        if spec.entry_point is None or (resets_at_next_step(env) and _is_plain(env.single_observation_space)):
            return VectorWorld(config.id, env)
        env.close()
    if config.vectorize == "vector":
        return VectorWorld(config.id, _make_vector(spec, config, num_envs))
    return _make_loop(spec, config, num_envs)


def _is_plain(space: gymnasium.Space[Any]) -> bool:
    """Return True if a vector environment's observations can be shown as they are, or one-hot."""
    return isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.Discrete)


def make_single(config: EnvConfig, render_mode: str | None = None) -> AnyEnv:
    """Make one environment of the configuration by itself, to be looked at in one of its render modes."""
    spec = find_spec(config.id)
    if spec.entry_point is None:
        raise EnvError(f"{config.id} has only a vector version, which cannot be shown; give it a single one")
    kwargs = config.kwargs if render_mode is None else {**config.kwargs, "render_mode": render_mode}
    return _make_single(spec, config.model_copy(update={"kwargs": kwargs}))


def find_spec(env_id: str) -> EnvSpec:
    """Find the registered spec behind an id, or make one for a class; EnvError says what could be meant."""
    if env_id.startswith("MinAtar/"):
        _register_minatar(env_id)
    module_name, _, name = env_id.rpartition(":")
    module = _import(module_name, env_id) if module_name else None
    spec = registry.get(name)
    if spec is not None:
        return spec
    creator = getattr(module, name, None)
    if not callable(creator):
        raise EnvError(_unknown(env_id, name, module_name))
    if not (_is_env_class(creator) or is_env_factory(creator) or _is_known_factory(module_name, name)):
        raise EnvError(
            f"env.id {env_id!r} names neither a class of environments nor a function declared to make some; "
            "put @offbeat.env_factory above the function, or name a class with reset() and step()"
        )
    return _spec_of(creator, name)


def _is_env_class(found: object) -> bool:
    """A class of environments: Gymnasium's, vectorised ones, or one with several agents."""
    if not inspect.isclass(found):
        return False
    has_methods = all(inspect.isfunction(getattr(found, name, None)) for name in ("reset", "step"))
    return issubclass(found, (gymnasium.Env, VectorEnv)) or has_methods


def _is_known_factory(module_name: str, name: str) -> bool:
    """PettingZoo's way to offer an environment: a function of this name in the environment's module."""
    return module_name.partition(".")[0] in _PETTING_ZOOS and name in ("parallel_env", "env", "raw_env")


def _spec_of(creator: Any, name: str) -> EnvSpec:
    is_vector = inspect.isclass(creator) and issubclass(creator, VectorEnv)
    if is_vector:
        return EnvSpec(id=name, vector_entry_point=creator)
    return EnvSpec(id=name, entry_point=creator)


def _import(module_name: str, env_id: str) -> object:
    try:
        return import_named(module_name)
    except ImportError as error:
        package = module_name.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        fix = "install the package, or run from the folder it lies in"
        if is_missing and package in _EXTRAS:
            fix = f'pip install "offbeat[{_EXTRAS[package]}]"'
        raise EnvError(f"env.id {env_id!r}: cannot import {module_name!r} ({error}); {fix}") from error


def _register_minatar(env_id: str) -> None:
    if env_id in registry:
        return
    try:
        minatar = importlib.import_module("minatar.gym")
    except ImportError as error:
        raise EnvError(f"{env_id} needs MinAtar ({error}): {_INSTALL['MinAtar/']}") from error
    if "MinAtar/Breakout-v1" not in registry:
        minatar.register_envs()


def _unknown(env_id: str, name: str, module_name: str) -> str:
    if module_name:
        where = f"{module_name} neither registers nor defines {name!r}"
    else:
        where = "no such environment is registered"
    near = difflib.get_close_matches(name, registry, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"env.id {env_id!r}: {where}; {hint}{_install_hint(env_id)}"
        "An environment of your own is written package.module:ClassName"
    )


def _install_hint(env_id: str) -> str:
    name = env_id.rpartition(":")[2]
    commands = [command for start, command in _INSTALL.items() if name.startswith(start)]
    return f"It may need: {commands[0]}. " if commands else ""


def _prefers_vector(spec: EnvSpec, config: EnvConfig, num_envs: int) -> bool:
    if spec.vector_entry_point is None or spec.entry_point is None or config.wrappers:
        return spec.entry_point is None
    return num_envs >= MIN_VECTOR_ENVS and _takes(spec, _vector_kwargs(spec, config), config.id)


def _takes(spec: EnvSpec, kwargs: dict[str, Any], env_id: str) -> bool:
    """Whether the vector version takes these arguments, which may be meant for the single one only."""
    if spec.additional_wrappers:
        return False
    entry: Any = spec.vector_entry_point
    creator = _guarded(env_id, lambda: load_env_creator(entry)) if isinstance(entry, str) else entry
    try:
        inspect.signature(creator).bind(num_envs=1, **kwargs)
    except TypeError:
        return False
    return True


def _vector_kwargs(spec: EnvSpec, config: EnvConfig) -> dict[str, Any]:
    kwargs = {**spec.kwargs, **config.kwargs}
    max_steps = config.max_episode_steps or spec.max_episode_steps
    return kwargs if max_steps is None else {**kwargs, "max_episode_steps": max_steps}


def _make_vector(spec: EnvSpec, config: EnvConfig, num_envs: int) -> AnyVectorEnv:
    if spec.vector_entry_point is None and inspect.isfunction(spec.entry_point):
        # What a user's function makes is not known before; `vectorize: vector` says that it is vectorised.
        spec = EnvSpec(id=spec.id, vector_entry_point=spec.entry_point)
    if spec.vector_entry_point is None:
        raise EnvError(f"{config.id} has no vector version; set env.vectorize=loop (or auto)")
    if config.wrappers:
        raise EnvError(
            f"env.wrappers are for single environments, not for the vector version of {config.id}; "
            "set env.vectorize=loop, or drop env.wrappers"
        )
    kwargs = _vector_kwargs(spec, config)
    if not _takes(spec, kwargs, config.id):
        raise EnvError(
            f"the vector version of {config.id} does not take {sorted(kwargs)}; "
            "set env.vectorize=loop, or drop env.kwargs and env.max_episode_steps"
        )
    made = _guarded(
        config.id,
        lambda: gymnasium.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs),
    )
    if not isinstance(made, VectorEnv):
        raise EnvError(f"{config.id} makes a {type(made).__name__}, not a gymnasium.vector.VectorEnv")
    return made


def _make_loop(spec: EnvSpec, config: EnvConfig, num_envs: int) -> LoopWorld:
    if spec.entry_point is None:
        raise EnvError(f"{config.id} has only a vector version; set env.vectorize=vector (or auto)")
    # A world always resets before it steps, so that order needs no guard at every step.
    spec = replace(spec, order_enforce=False)
    envs = [_make_single(spec, config) for _ in range(num_envs)]
    outermost = envs[0]
    return LoopWorld(config.id, envs, [outermost.note] if isinstance(outermost, Flat) else [])


def _make_single(spec: EnvSpec, config: EnvConfig) -> AnyEnv:
    env = _guarded(
        config.id,
        lambda: gymnasium.make(
            spec, max_episode_steps=config.max_episode_steps, disable_env_checker=True, **config.kwargs
        ),
    )
    check_spaces(config.id, env)
    if spec.id.startswith("MinAtar/"):
        env = MinAtarImages(env)
    env = wrapped(env, config.id, config.wrappers)
    if isinstance(env.observation_space, gymnasium.spaces.Box):
        return env
    return (
        OneHot(env) if isinstance(env.observation_space, gymnasium.spaces.Discrete) else Flat(env, config.id)
    )


def _guarded(env_id: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except EnvError:
        raise
    except Exception as error:
        hint = _install_hint(env_id) if isinstance(error, (ImportError, gymnasium.error.Error)) else ""
        reason = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise EnvError(
            f"{env_id} could not be made: {reason}. {hint}Check env.id and env.kwargs"
            f"{_arguments(env_id) if isinstance(error, TypeError) else ''}"
        ) from error


def _arguments(env_id: str) -> str:
    """The arguments that an environment's constructor takes, as far as it says so."""
    entry: Any = registry[name].entry_point if (name := env_id.rpartition(":")[2]) in registry else None
    try:
        creator = load_env_creator(entry) if isinstance(entry, str) else entry
        names = [name for name in inspect.signature(creator).parameters if name not in ("args", "kwargs")]
    except (TypeError, ValueError, ImportError, AttributeError):
        return ""
    return f": it takes {', '.join(names)}" if names else ""
