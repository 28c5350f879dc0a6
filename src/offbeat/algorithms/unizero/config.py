"""The settings of UniZero. No torch."""

from __future__ import annotations

from pydantic import Field

from offbeat.algorithms.muzero.config import PlanningConfig, WorldSettings
from offbeat.config.models import RunConfig
from offbeat.errors import ConfigError
from offbeat.models.world_spec import MAX_TOKENS


class TransformerSettings(WorldSettings):
    """The networks: an encoder, a transformer and heads."""

    latent: int = Field(default=64, ge=2, description="Width of the transformer. As LightZero's CartPole.")
    blocks: int = Field(
        default=1,
        ge=1,
        description="Hidden layers of the encoder; of planes one convolution more.",
    )
    layers: int = Field(default=2, ge=1, description="Blocks of the transformer.")
    heads: int = Field(default=2, ge=1, description="Heads of its attention.")


class UniZeroConfig(PlanningConfig):
    """Planning with a transformer that remembers (https://arxiv.org/abs/2406.10667).

    Example: ``algorithm: {name: unizero, network: {layers: 2, latent: 64}}``.
    """

    name: str = Field("unizero", description="Which algorithm trains; `unizero` here.")
    network: TransformerSettings = Field(default=TransformerSettings(), description="The networks.")
    context_length: int = Field(
        default=4, ge=1, description="Steps that a search looks back, the newest included. As LightZero's."
    )
    lr: float = Field(default=1e-4, gt=0, description="Learning rate of Adam. As LightZero's.")
    latent_coef: float = Field(
        default=10.0, ge=0, description="Weight of how far predicted latents are from those that came."
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Share of value and reward targets spread over all atoms."
    )

    @property
    def context(self) -> int:
        """Observations that a search begins with, the newest included."""
        return self.context_length

    @property
    def window_tokens(self) -> int:
        """Tokens that are remembered while a search looks ahead.

        With an action and the latent after it they are no more than were trained at once, and the first is a
        latent, as it was then.
        """
        return 2 * self.num_unroll - 3

    def problems(self, config: RunConfig) -> list[tuple[str, str]]:
        """Find settings that contradict each other or the run."""
        found = super().problems(config)
        settings = self.network
        if settings.latent % (2 * settings.heads):
            found.append(
                (
                    "algorithm.network.latent",
                    f"must be a multiple of twice algorithm.network.heads, {settings.heads}",
                )
            )
        if self.num_unroll < 3:
            found.append(("num_unroll", "must be at least 3: a search adds a step to the one it begins with"))
        elif self.context_length >= self.num_unroll:
            found.append(
                (
                    "context_length",
                    f"must be less than the {self.num_unroll} steps trained at once (num_unroll): a search"
                    " adds a step",
                )
            )
        simulations = max(self.search.num_simulations, self.search.eval_simulations or 0)
        if 2 * (self.context_length + simulations) > MAX_TOKENS:
            most = MAX_TOKENS // 2 - self.context_length
            found.append(("algorithm.search.num_simulations", f"must be at most {most}: positions end there"))
        return found


def unizero_config(config: RunConfig) -> UniZeroConfig:
    """The resolved settings of a run."""
    if not isinstance(config.algorithm, UniZeroConfig):
        raise ConfigError(f"algorithm.name is {config.algorithm.name!r}; these roles need UniZero's settings")
    return config.algorithm.resolved(config)
