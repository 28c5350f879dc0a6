"""How networks compute: how exactly, and whether they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from offbeat.models.world_spec import Computing

P = ParamSpec("P")
R = TypeVar("R")


def rounding(how: Computing, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a network computes."""
    if how.precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def allow(how: Computing) -> None:
    """Let products of matrices be as rough as they may, in the whole process."""
    if how.precision == "tf32":
        torch.set_float32_matmul_precision("high")


def shorten(network: nn.Module, how: Computing) -> None:
    """Keep the matrices of a network that is not trained in the precision that it computes in."""
    if how.precision == "bfloat16":
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.to(torch.bfloat16)


def compiled(function: Callable[P, R], how: Computing, device: torch.device) -> Callable[P, R]:
    """The function itself, or compiled where that is wanted and there is a GPU."""
    if not how.compiled or device.type != "cuda":
        return function
    return torch.compile(function, dynamic=False)
