"""From a configuration to a team: finding the environment, choosing what brings it into the common form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator

from offbeat.envs.checks import check_spaces, explain
from offbeat.envs.make import find_spec
from offbeat.envs.teams.adapters import ParallelSingle, Single, TupleSingle, is_parallel, is_turn_based
from offbeat.envs.teams.alice_and_bob import ENV_ID, AliceAndBobTeam
from offbeat.envs.teams.loop import LoopTeam
from offbeat.envs.teams.shown import ShownTeam
from offbeat.envs.user_wrappers import wrapped
from offbeat.errors import EnvError

if TYPE_CHECKING:
    from offbeat.config.models import EnvConfig
    from offbeat.envs.teams.team import Team

INSTALL = 'pip install "offbeat[marl]"'
_PACKAGES = {"lbforaging": "Foraging", "rware": "rware-", "mpe2": "simple_", "pettingzoo": ""}
"""Packages of multi-agent environments, and how the names begin that they register."""
_OWN: dict[str, Callable[..., Team]] = {ENV_ID: AliceAndBobTeam}
_LIMITS = ("max_episode_steps", "max_steps", "max_cycles", "horizon")
"""Names under which environments take a limit of their own for the length of episodes."""
_TEAM_PARTS = ("num_envs", "num_agents", "obs_size", "state_size", "single_action_space", "has_legal", "step")


def make_team(config: EnvConfig, num_envs: int) -> Team:
    """Make a team of ``num_envs`` environments as the configuration says.

    ``config.id`` is a Gymnasium id (``offbeat/AliceAndBob-v0``), an id with the module that registers it
    (``lbforaging:Foraging-8x8-2p-3f-coop-v3``), or a class, or function declared by `offbeat.env_factory`,
    that makes a Gymnasium environment with Tuple spaces, a parallel environment as PettingZoo defines it
    (``mpe2.simple_spread_v3:parallel_env``) or, when it takes ``num_envs``, a `Team`.

    Example: ``make_team(EnvConfig(id="offbeat/AliceAndBob-v0"), 8).reset(seed=1).obs`` is ``[8, 2, 18]``.
    """
    if num_envs < 1:
        raise EnvError(f"a team needs at least one environment, not {num_envs}; raise env.num_envs")
    spec = _find(config.id)
    vector = _vector_creator(spec)
    if vector is not None and config.vectorize != "loop" and not config.wrappers:
        return _make_vector(vector, config, num_envs)
    if config.vectorize == "vector" and config.wrappers:
        raise EnvError(
            f"env.wrappers are for single environments, not for the vector version of {config.id}; "
            "set env.vectorize=loop, or drop env.wrappers"
        )
    if config.vectorize == "vector":
        raise EnvError(
            f"{config.id} has no vector version with several agents; set env.vectorize=loop (or auto)"
        )
    if vector is not None and vector is spec.entry_point:
        raise EnvError(f"{config.id} has only a vector version; set env.vectorize=vector (or auto)")
    singles = [_make_single(spec, config) for _ in range(num_envs)]
    return LoopTeam(config.id, singles, config.max_episode_steps or spec.max_episode_steps)


def make_shown_team(config: EnvConfig, render_mode: str | None = None) -> ShownTeam:
    """Make one environment of the configuration by itself, to be looked at in one of its render modes."""
    spec = _find(config.id)
    kwargs = config.kwargs if render_mode is None else {**config.kwargs, "render_mode": render_mode}
    single = _make_single(spec, config.model_copy(update={"kwargs": kwargs}))
    return ShownTeam(single, config.max_episode_steps or spec.max_episode_steps)


def _find(env_id: str) -> EnvSpec:
    try:
        return find_spec(env_id)
    except EnvError as error:
        package = env_id.partition(":")[0].partition(".")[0]
        if isinstance(error.__cause__, ImportError) and package in _PACKAGES:
            raise EnvError(f"{env_id} needs {package} ({error.__cause__}): {INSTALL}") from error
        for package, start in _PACKAGES.items():
            if ":" not in env_id and start and env_id.startswith(start):
                raise EnvError(
                    f"{error}. The id of an environment of {package} begins with it, as in {package}:{env_id}"
                ) from error
        raise


def _vector_creator(spec: EnvSpec) -> Callable[..., Any] | None:
    """What makes N environments at once, if the environment has such a thing."""
    if spec.id in _OWN:
        return _OWN[spec.id]
    entry: Any = spec.entry_point
    return entry if callable(entry) and "num_envs" in _parameters(entry) else None


def _make_vector(creator: Callable[..., Any], config: EnvConfig, num_envs: int) -> Team:
    kwargs = _limited(creator, dict(config.kwargs), config.max_episode_steps)
    if config.max_episode_steps is not None and not set(_LIMITS) & set(kwargs):
        raise EnvError(
            f"{config.id} takes no limit on the length of episodes; give it an argument max_episode_steps, "
            "or drop env.max_episode_steps"
        )
    made = _guarded(config.id, lambda: creator(num_envs=num_envs, **kwargs))
    missing = [part for part in _TEAM_PARTS if not hasattr(made, part)]
    if missing:
        raise EnvError(
            f"{config.id} takes num_envs, so it must make a Team, but its {type(made).__name__} has no "
            f"{', '.join(missing)}; see offbeat.envs.teams.Team"
        )
    team: Team = made
    return team


def _make_single(spec: EnvSpec, config: EnvConfig) -> Single:
    env = _guarded(config.id, lambda: _make_env(spec, config))
    if is_turn_based(env):
        raise EnvError(
            f"{config.id} is an AECEnv, where agents act in turns; give its parallel version, mostly called "
            "parallel_env, or wrap it with pettingzoo.utils.conversions.aec_to_parallel"
        )
    adapter: Callable[[Any], Single]
    if is_parallel(env):
        if config.wrappers:
            raise EnvError(
                f"env.wrappers are for Gymnasium environments, and {config.id} is one of PettingZoo; "
                "name a function that makes and wraps it as env.id (module:function)"
            )
        _check_limit(env, config)
        adapter = ParallelSingle
    elif isinstance(env, gymnasium.Env):
        check_spaces(config.id, env)
        env = wrapped(env, config.id, config.wrappers)
        _check_agents(env, config.id)
        adapter = TupleSingle
    else:
        raise EnvError(
            f"{config.id} makes a {type(env).__name__}, not a Gymnasium environment with Tuple spaces, "
            "a parallel environment as PettingZoo defines it or, with an argument num_envs, a Team"
        )
    try:
        return adapter(env)
    except EnvError as error:
        raise EnvError(f"{config.id}: {error}") from error
    except (TypeError, ValueError) as error:
        if isinstance(env, gymnasium.Env):
            explain(config.id, env, None, error)
        raise


def _make_env(spec: EnvSpec, config: EnvConfig) -> Any:
    entry: Any = spec.entry_point
    if entry is None:
        raise EnvError(
            f"{config.id} has only a vector version of one agent; give an environment with several"
        )
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    kwargs = _limited(creator, {**spec.kwargs, **config.kwargs}, config.max_episode_steps)
    if callable(entry):
        return creator(**kwargs)
    # The team counts steps itself and resets before it steps, so that neither needs a wrapper.
    spec = replace(spec, kwargs=kwargs, order_enforce=False, max_episode_steps=None)
    return gymnasium.make(spec, disable_env_checker=True)


def _limited(creator: Callable[..., Any], kwargs: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """Pass a limit on the length of episodes on to an environment that has one of its own."""
    if limit is None:
        return kwargs
    known = _parameters(creator)
    return {**kwargs, **{name: limit for name in _LIMITS if name in kwargs or name in known}}


def _parameters(creator: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(creator).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _check_limit(env: Any, config: EnvConfig) -> None:
    own = getattr(getattr(env, "unwrapped", env), "max_cycles", None)
    if isinstance(own, int) and config.max_episode_steps is not None and own < config.max_episode_steps:
        raise EnvError(
            f"{config.id} ends its episodes after {own} steps by itself, before "
            f"env.max_episode_steps={config.max_episode_steps}; set env.kwargs.max_cycles instead"
        )


def _check_agents(env: gymnasium.Env[Any, Any], env_id: str) -> None:
    spaces = (env.observation_space, env.action_space)
    if not all(isinstance(space, gymnasium.spaces.Tuple) for space in spaces):
        raise EnvError(
            f"{env_id} has a single agent, which sees {spaces[0]} and acts in {spaces[1]}; "
            "set algorithm.name=ppo, or give an environment with a Tuple of spaces, one for each agent"
        )


def _guarded(env_id: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except EnvError:
        raise
    except Exception as error:
        hint = f"It may need: {INSTALL}. " if isinstance(error, ImportError) else ""
        raise EnvError(
            f"{env_id} could not be made: {type(error).__name__}: {error}. {hint}Check env.id and env.kwargs"
        ) from error
