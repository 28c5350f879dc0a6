"""Settings of what surrounds a loss: corrections, penalties, the value head. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from offbeat.config.models import Section


class CorrectionConfig(Section):
    """Corrections for tokens that older weights drew, or the engine with other numerics."""

    proximal: Literal["behaviour", "round_start"] = Field(
        default="behaviour",
        description="The policy that ratios are taken to: the one that drew each token (bypass), or the"
        " weights at the round's start (decoupled, arXiv:2110.00641).",
    )
    weight: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="Truncated importance sampling: the weight of a token is the ratio of the proximal policy"
        " to the one that drew it, or of its whole response. For `proximal: round_start`.",
    )
    weight_cap: float = Field(default=2.0, gt=0, description="Bound on these weights. Default of verl.")
    mask_low: float | None = Field(
        default=None,
        gt=0,
        description="Leaves out responses the geometric mean of whose ratios to the policy that drew them is"
        " lower; null: no bound.",
    )
    mask_high: float | None = Field(default=None, gt=0, description="The same, where it is higher.")


class KLConfig(Section):
    """Penalty on the KL divergence from a reference model."""

    coef: float = Field(default=0.0, ge=0, description="Weight of the penalty; 0: no reference is kept.")
    place: Literal["loss", "reward"] = Field(
        default="loss", description="Added to the loss, or taken off the reward of each token."
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Estimate of the divergence at a token, joschu.net/blog/kl-approx.html."
    )
    reference: str | None = Field(
        default=None, description="Folder of the reference model; null: the weights after the warm-up."
    )


class ValueConfig(Section):
    """The value head of `advantage: gae`: a linear map of the hidden state before each token."""

    coef: float = Field(default=0.1, ge=0, description="Weight of the value loss. Default of TRL.")
    lr: float = Field(default=1e-3, gt=0, description="Learning rate of the head alone.")
    clip: float | None = Field(
        default=0.5, gt=0, description="Largest change of a value in a round; null: no bound. verl's."
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="Discount per token. Default of verl.")
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="Decay of the trace. Default of verl.")


class OverlongConfig(Section):
    """Penalty on long responses, rising before the limit (DAPO)."""

    buffer: int = Field(default=0, ge=0, description="Tokens below the limit where it begins; 0: none.")
    penalty: float = Field(default=1.0, ge=0, description="What the longest response loses. DAPO's.")
