"""The loss of a micro-batch, put together from the choices in the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from torch import Tensor

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.config.code import import_named, is_token_loss, own_losses
from offbeat.errors import ConfigError
from offbeat.ops.corrections import importance_weights, sequence_mask
from offbeat.ops.token_losses import TokenBatch, clipped_loss, detached_loss, sequence_ratios, token_ratios

TokenLoss = Callable[[TokenBatch], Tensor]
"""From tokens to the loss of each, ``[N]``."""


def make_token_loss(config: GRPOConfig) -> TokenLoss:
    """Return the loss of the settings, or a user's function, as a function of the tokens alone."""
    parts = config.choices
    if parts.surrogate == "own":
        return _own_loss(config)
    assert parts.clip_low is not None, "a named loss has bounds"
    assert parts.clip_high is not None
    bounds = {"clip_low": parts.clip_low, "clip_high": parts.clip_high}

    def loss(batch: TokenBatch) -> Tensor:
        ratios = ratios_of(config, batch)
        if parts.surrogate == "detached":
            return detached_loss(ratios, batch.log_probs, batch.advantages, **bounds)
        return clipped_loss(ratios, batch.advantages, dual_clip=config.dual_clip, **bounds)

    return loss


def ratios_of(config: GRPOConfig, batch: TokenBatch) -> Tensor:
    """Ratios ``[N]`` of the trained policy to the proximal one, of tokens or of responses."""
    if config.choices.ratio == "sequence":
        return sequence_ratios(batch.log_probs, batch.proximal, batch.rows)
    return token_ratios(batch.log_probs, batch.proximal)


def correction_weights(config: GRPOConfig, batch: TokenBatch) -> Tensor | None:
    """Weights ``[N]`` of tokens that are stale, 0 for responses that are masked; None where all are 1."""
    own = config.correction
    is_decoupled = own.proximal == "round_start"
    log_ratios = (batch.proximal if is_decoupled else batch.log_probs.detach()) - batch.behaviour
    weights = None
    if own.weight != "none":
        weights = importance_weights(log_ratios, batch.rows, level=own.weight, cap=own.weight_cap)
    if own.mask_low is not None or own.mask_high is not None:
        mask = sequence_mask(log_ratios, batch.rows, low=own.mask_low, high=own.mask_high)
        weights = mask if weights is None else weights * mask
    return weights


def policy_loss(
    config: GRPOConfig, token_loss: TokenLoss, batch: TokenBatch, weights: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the share of a micro-batch in the loss ``[]``, and its corrections ``[N]``, None for none.

    ``weights`` ``[N]`` are those of the aggregation. What a correction masks still counts in denominators.
    """
    losses, corrections = token_loss(batch), correction_weights(config, batch)
    return (losses * weights if corrections is None else losses * corrections * weights).sum(), corrections


def _own_loss(config: GRPOConfig) -> TokenLoss:
    """Find a user's function; ConfigError when there is none, or its arguments do not fit."""
    name, declared = config.loss, own_losses()
    found = declared[name] if name in declared else _imported(name)
    try:
        inspect.signature(found).bind(None, **config.loss_kwargs)
    except TypeError as error:
        raise ConfigError(f"algorithm.loss_kwargs does not fit {name}: {error}") from error
    function = partial(found, **config.loss_kwargs)

    def checked(batch: TokenBatch) -> Tensor:
        losses = function(batch)
        if not isinstance(losses, Tensor) or losses.shape != batch.log_probs.shape:
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigError(
                f"algorithm.loss {name} gave {got}: it has to return a loss for each of the "
                f"{len(batch.log_probs)} tokens, a tensor like batch.log_probs"
            )
        return losses

    return checked


def _imported(name: str) -> Callable[..., Tensor]:
    module, _, attribute = name.partition(":")
    # Somebody else's code: whatever it raises belongs into a message that says whose it is.
    try:
        found = getattr(import_named(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"algorithm.loss {name!r} cannot be imported: {type(error).__name__}: {error}; it is "
            "module:function, with a module that is installed or lies in the working directory"
        ) from error
    if not is_token_loss(found):
        raise ConfigError(f"algorithm.loss {name!r} is not declared: put @offbeat.token_loss above it")
    own: Callable[..., Tensor] = found
    return own
