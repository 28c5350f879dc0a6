"""Does the environment that weights are judged in fit the one they are trained in?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.envs.make import make_world
from offbeat.errors import EnvError

if TYPE_CHECKING:
    from offbeat.config.models import RunConfig


def check_eval_env(config: RunConfig) -> None:
    """Make both environments where ``eval.env_kwargs`` tells them apart; raises EnvError with the fix."""
    if not config.eval.env_kwargs:
        return
    trained = make_world(config.env, 1)
    try:
        judged = make_world(config.eval_env, 1)
    except EnvError as error:
        raise EnvError(f"eval.env_kwargs: {error}") from error
    spaces = {
        "observations": (trained.single_observation_space, judged.single_observation_space),
        "actions": (trained.single_action_space, judged.single_action_space),
    }
    trained.close()
    judged.close()
    for name, (before, after) in spaces.items():
        if before != after:
            raise EnvError(
                f"eval.env_kwargs changes the {name} of {config.env.id} from {before} to {after}, so that "
                "the weights do not fit; leave the arguments out that do so, or move them to env.kwargs"
            )
