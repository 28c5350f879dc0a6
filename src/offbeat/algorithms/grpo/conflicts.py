"""Settings that are fine one by one and cannot run together: each with its key and the fix. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.algorithms.grpo.losses import LOSSES
from offbeat.config.code import own_losses
from offbeat.config.errors import did_you_mean

if TYPE_CHECKING:
    from offbeat.algorithms.grpo.config import GRPOConfig

Found = list[tuple[str, str]]


def problems(config: GRPOConfig, groups: int) -> Found:
    """List what cannot run, with rounds of so many groups."""
    checks = (_own_loss, _advantages, _terms, _corrections)
    return [one for check in checks for one in check(config)] + _sizes(config, groups)


def _own_loss(config: GRPOConfig) -> Found:
    if config.loss in LOSSES:
        is_idle = bool(config.loss_kwargs)
        return [("loss_kwargs", "they are for a function of your own: remove them")] if is_idle else []
    unused = ("ratio", "clip_low", "clip_high", "dual_clip")
    message = "a function of your own does not look at it: remove it, or use loss_kwargs"
    found = [(name, message) for name in unused if getattr(config, name) is not None]
    if ":" in config.loss or config.loss in own_losses():
        return found
    hint = did_you_mean(config.loss, [*LOSSES, *own_losses()])
    return [*found, ("loss", f"there is no such loss; {hint}; one of your own is named module:function")]


def _advantages(config: GRPOConfig) -> Found:
    parts, found = config.choices, Found()
    if config.loss == "ppo" and parts.advantage != "gae":
        message = "ppo learns a value function: set it to gae, or algorithm.loss to dapo or rloo"
        found.append(("advantage", message))
    if parts.advantage == "gae" and parts.norm_adv == "group":
        found.append(("norm_adv", "gae does not look at groups: set it to batch or none"))
    if config.dual_clip is not None and parts.surrogate == "detached":
        found.append(("dual_clip", f"{config.loss} bounds weights by clip_high: set dual_clip to null"))
    return found


def _terms(config: GRPOConfig) -> Found:
    kl, found = config.kl, Found()
    if kl.coef == 0 and kl.reference is not None:
        found.append(("algorithm.kl.reference", "nothing is compared with it: set algorithm.kl.coef above 0"))
    if kl.coef > 0 and kl.place == "loss" and kl.estimator == "k1":
        message = "its gradient in a loss has mean 0: take k2 or k3, or set algorithm.kl.place to reward"
        found.append(("algorithm.kl.estimator", message))
    return found


def _corrections(config: GRPOConfig) -> Found:
    own, found = config.correction, Found()
    if own.weight != "none" and own.proximal == "behaviour":
        message = (
            "ratios to the policy that drew a token hold this weight already: set"
            " algorithm.correction.proximal to round_start, or this to none"
        )
        found.append(("algorithm.correction.weight", message))
    if own.mask_low is not None and own.mask_high is not None and own.mask_low >= own.mask_high:
        found.append(("algorithm.correction.mask_low", "must be below algorithm.correction.mask_high"))
    return found


def _sizes(config: GRPOConfig, groups: int) -> Found:
    found = Found()
    if config.group_size == 1 and config.choices.advantage != "gae":
        message = "one response has no others to compare with: set it to 2 or more, or algorithm.loss to ppo"
        found.append(("group_size", message))
    if config.group_size == 1 and config.dynamic_sampling:
        message = "one response has no spread: set group_size to 2 or more, or this to false"
        found.append(("dynamic_sampling", message))
    if config.num_minibatches > groups:
        found.append(("num_minibatches", f"a round has {groups} groups: lower it to {groups} or less"))
    return found
